"""Runnable examples of the rollout backend."""
