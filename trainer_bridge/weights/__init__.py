"""How a trainer's weights reach the service: `push` orders the work, `file` carries the bytes, `proof` makes the evidence."""
