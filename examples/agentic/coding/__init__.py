"""Repairing small Python functions in a sandbox."""
