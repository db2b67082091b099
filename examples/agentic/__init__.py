"""Agentic reinforcement learning tasks that run on a CPU."""
