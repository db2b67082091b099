"""Weights by their Hugging Face names: the parameter table, checkpoint loading, digests, updates.

Import from the modules; this file stays empty so that `areno.weights.digest` loads nothing but torch.
"""
