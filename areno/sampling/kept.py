"""How many ids a returned kept set may have. Host only."""

MAX_KEPT = 64
