"""Host-side facts of admitted requests in arrays, one seat each, so that a step costs no loop over rows.

A seat is stable while its request holds it, whatever row it runs in; the lane maps of launches in flight name seats. The
residency gives seats, the scheduler reads and writes the arrays. Host only, no torch.
"""

from __future__ import annotations

import numpy as np

from areno.request import SamplingParams

NO_SEAT = -1


class Seats:
    """Arrays over S seats and one more, which no request gets: lanes without a seat name it as `NO_SEAT`, the last place.

    `ids` and `versions` [S + 1, M] are token ids, and the version that sampled the token at a place. `scheduled` counts ids
    that launches made so far will have given, `covered` the positions that the row's pages hold, `num_broken` and
    `num_silent` the seats that are broken or want no log-probabilities.
    """

    __slots__ = (
        "_free",
        "broken",
        "count",
        "covered",
        "generation",
        "ids",
        "limit",
        "num_broken",
        "num_silent",
        "request_id",
        "row",
        "scheduled",
        "versions",
        "wants_kept",
        "wants_logprobs",
    )

    def __init__(self, *, num_seats: int, max_tokens: int) -> None:
        self._free = list(range(num_seats - 1, -1, -1))
        num_seats += 1
        self.request_id = np.full(num_seats, -1, dtype=np.int64)
        self.row = np.full(num_seats, -1, dtype=np.int64)
        self.generation = np.zeros(num_seats, dtype=np.int32)
        self.generation[NO_SEAT] = -1
        self.count = np.zeros(num_seats, dtype=np.int64)
        self.scheduled = np.zeros(num_seats, dtype=np.int64)
        self.covered = np.zeros(num_seats, dtype=np.int64)
        self.limit = np.zeros(num_seats, dtype=np.int64)
        self.broken = np.zeros(num_seats, dtype=bool)
        self.wants_logprobs = np.ones(num_seats, dtype=bool)
        self.wants_kept = np.zeros(num_seats, dtype=bool)
        self.num_broken = 0
        self.num_silent = 0
        self.ids = np.zeros((num_seats, max_tokens), dtype=np.int32)
        self.versions = np.zeros((num_seats, max_tokens), dtype=np.int64)

    @property
    def num_seats(self) -> int:
        """Number of seats, free or not."""
        return self.request_id.size - 1

    @property
    def num_free(self) -> int:
        """Number of free seats."""
        return len(self._free)

    def allocate(self, *, request_id: int, ids: np.ndarray, versions: np.ndarray, limit: int, sampling: SamplingParams) -> int:
        """Seat a request whose `ids` are known and may grow to `limit`; `versions` tag the last ones, its outputs."""
        seat = self._free.pop()
        self.request_id[seat] = request_id
        self.row[seat] = -1
        self.count[seat] = self.scheduled[seat] = ids.size
        self.covered[seat] = 0
        self.limit[seat] = limit
        self.wants_logprobs[seat] = sampling.logprobs
        self.num_silent += not sampling.logprobs
        self.wants_kept[seat] = sampling.return_kept_ids
        self.ids[seat, : ids.size] = ids
        self.versions[seat, ids.size - versions.size : ids.size] = versions
        return seat

    def release(self, seat: int) -> None:
        """Give a seat back."""
        assert seat not in self._free, f"seat {seat} is free already"
        self.request_id[seat] = -1
        self.row[seat] = -1
        self.num_silent -= not self.wants_logprobs[seat]
        self.num_broken -= bool(self.broken[seat])
        self.wants_logprobs[seat], self.broken[seat] = True, False
        self._free.append(seat)

    def mark_broken(self, seat: int) -> None:
        """Remember that nothing more of a seat is told."""
        if not self.broken[seat]:
            self.broken[seat] = True
            self.num_broken += 1
