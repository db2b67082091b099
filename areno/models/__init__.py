"""Model families: what a checkpoint's config says, and the forward that follows it."""
