"""The service side: the front process and the engine host process."""
