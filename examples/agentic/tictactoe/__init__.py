"""Tic-tac-toe against a random opponent: a short multi-turn task whose win rate a million parameters can raise in minutes on a CPU."""
