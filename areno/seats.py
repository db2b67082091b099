"""Host-side facts of admitted requests in arrays, one seat each, so that a step costs no loop over rows.

A seat is stable while its request lives, whatever row it runs in; the lane maps of launches in flight name seats. The
scheduler owns the seats. Host only, no torch.
"""

from __future__ import annotations

import numpy as np

NO_SEAT = -1


class Seats:
    """Arrays over S seats. `ids` and `versions` [S, M]: token ids, and the version that sampled the token at a place."""

    __slots__ = ("_free", "count", "generation", "ids", "limit", "request_id", "row", "scheduled", "versions", "wants_logprobs")

    def __init__(self, *, num_seats: int, max_tokens: int) -> None:
        self._free = list(range(num_seats - 1, -1, -1))
        self.request_id = np.full(num_seats, -1, dtype=np.int64)
        self.row = np.full(num_seats, -1, dtype=np.int64)
        self.generation = np.zeros(num_seats, dtype=np.int32)
        self.count = np.zeros(num_seats, dtype=np.int64)
        self.scheduled = np.zeros(num_seats, dtype=np.int64)
        self.limit = np.zeros(num_seats, dtype=np.int64)
        self.wants_logprobs = np.zeros(num_seats, dtype=bool)
        self.ids = np.zeros((num_seats, max_tokens), dtype=np.int32)
        self.versions = np.zeros((num_seats, max_tokens), dtype=np.int64)

    @property
    def num_free(self) -> int:
        """Number of free seats."""
        return len(self._free)

    def allocate(self, *, request_id: int, prompt: np.ndarray, limit: int, wants_logprobs: bool) -> int:
        """Seat a request whose ids may grow to `limit`."""
        seat = self._free.pop()
        self.request_id[seat] = request_id
        self.row[seat] = -1
        self.count[seat] = self.scheduled[seat] = prompt.size
        self.limit[seat] = limit
        self.wants_logprobs[seat] = wants_logprobs
        self.ids[seat, : prompt.size] = prompt
        return seat

    def release(self, seat: int) -> None:
        """Give a seat back."""
        assert seat not in self._free, f"seat {seat} is free already"
        self.request_id[seat] = -1
        self.row[seat] = -1
        self._free.append(seat)
