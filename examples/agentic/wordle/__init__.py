"""A word-guessing game that a tiny model learns."""
