"""Building blocks of the decoders: projections, norms, rotary positions, embeddings, attention."""
