"""The rows that decode: which seat each one holds, the operations on their way to the tables, and the launch that goes on as it is.

The scheduler says who enters, grows, moves and leaves, and asks once a step for the next launch. Invariant: a launch is repeated only
as long as no row changes; whatever changes one ends the repetition. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from areno.commands import ApplyDelta, DecodeLaunch
from areno.config import ResolvedConfig
from areno.decode.deltas import DeltaPacker
from areno.kv.residency import Residency
from areno.live import LiveRequest
from areno.request import MAX_STOP_IDS
from areno.sampling.variant import Variant
from areno.seats import NO_SEAT


@dataclass(slots=True)
class _Steady:
    """A decode launch that may be made `steps` times, `longest` growing by one, as long as no row changes.

    Shapes: `seats` [n], those of the rows that get a token.
    """

    launch: DecodeLaunch
    seats: np.ndarray
    steps: int
    made: int = 0


def _signed64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class DecodeRows:
    """Rows of running requests, by row; their seats' arrays are the residency's."""

    def __init__(self, resolved: ResolvedConfig, residency: Residency) -> None:
        self._resolved, self._residency, self._seats = resolved, residency, residency.seats
        self._packer = DeltaPacker()
        self._row_seat = np.full(resolved.table_rows, NO_SEAT, dtype=np.int64)
        self._needs = Variant().counts()
        self._steady: _Steady | None = None

    @property
    def is_steady(self) -> bool:
        """Whether the next launch is the last one again, so that every row has its page."""
        return self._steady is not None

    def take_deltas(self) -> list[ApplyDelta]:
        """Return the operations that the tables have not been told of, in order."""
        return [ApplyDelta(slot=slot) for slot in self._packer.take()]

    def enter(self, live: LiveRequest) -> None:
        """Set the row of a request whose prompt is computed."""
        sampling = live.request.sampling
        stop_ids = np.full(MAX_STOP_IDS, -1, dtype=np.int32)
        stop_ids[: live.stop_ids.size] = live.stop_ids
        emitted = live.ids.size - live.given_tokens
        self._packer.set_row(
            {
                "row": live.row,
                "generation": live.generation,
                "length": live.ids.size - 1,
                "remaining": live.limit - live.ids.size,
                "stop_wait": max(sampling.min_new_tokens - emitted, 0),
                "sampling_slot": live.sampling_slot,
                "recurrent_slot": -1,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "seed": _signed64(live.seed),
                "stop_ids": stop_ids,
            },
            np.array(live.pages, dtype=np.int64),
            live.slot_content(),
        )
        self._row_seat[live.row] = live.seat
        self._seats.row[live.seat] = live.row
        self._seats.generation[live.seat] = live.generation
        self._seats.scheduled[live.seat] += 1
        self._seats.covered[live.seat] = self._residency.covered_tokens(live)
        self._needs += live.needs
        self._steady = None

    def grow(self, live: LiveRequest, tokens: int) -> int:
        """Give a row pages for so many ids, as far as there are some; return how many pages."""
        index = len(live.pages)
        pages = self._residency.grow(live, tokens)
        if pages.size:
            self._packer.grow(live.row, live.generation, index, pages)
            self._seats.covered[live.seat] = self._residency.covered_tokens(live)
            self._steady = None
        return int(pages.size)

    def move(self, live: LiveRequest, source: int) -> None:
        """Move a row from `source` to where its request is now."""
        self._packer.move(source, live.row, live.generation)
        self._row_seat[live.row], self._row_seat[source] = live.seat, NO_SEAT
        self._seats.row[live.seat] = live.row
        self._steady = None

    def kill(self, live: LiveRequest) -> None:
        """End a row on the device, and give it back."""
        self._packer.kill(live.row, live.generation)
        self.leave(live)

    def leave(self, live: LiveRequest) -> None:
        """Give the row back; commands that reuse it come later in the log."""
        self._row_seat[live.row] = NO_SEAT
        self._residency.leave_row(live)
        self._needs -= live.needs
        self._steady = None

    def growing(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the seats with budget left and how many ids each will have after the launches made. Shapes: [n], [n]."""
        _, seats, scheduled = self._active()
        return seats, scheduled

    def _active(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows with budget left, their seats, and how many ids each will have after the launches made. Shapes: [n] each."""
        scheduled = self._seats.scheduled[self._row_seat]
        rows = np.flatnonzero(scheduled < self._seats.limit[self._row_seat])
        return rows, self._row_seat[rows], scheduled[rows]

    def next_launch(self) -> DecodeLaunch | None:
        """Return the next decode of the rows as they are, None without a row that gets a token. Mutates: what is scheduled."""
        steady = self._steady
        if steady is None:
            steady = self._steady = self._find_steady()
            if steady is None:
                return None
        first = steady.launch
        launch = DecodeLaunch(
            bucket=first.bucket,
            longest=first.longest + steady.made,
            seats=first.seats,
            generations=first.generations,
            variant=first.variant,
        )
        self._seats.scheduled[steady.seats] += 1
        steady.made += 1
        if steady.made == steady.steps:
            self._steady = None
        return launch

    def _find_steady(self) -> _Steady | None:
        """Plan the decode of the rows as they are and find out for how many steps it holds if nothing else changes."""
        rows, seats, scheduled = self._active()
        # A row without its next page would stall: it is left out of the count, not out of the lanes.
        covered = self._seats.covered[seats]
        fit = scheduled <= covered
        all_fit = bool(fit.all())
        if not all_fit:
            rows, seats, scheduled, covered = rows[fit], seats[fit], scheduled[fit], covered[fit]
        if not rows.size:
            return None
        bucket = self._resolved.bucket_of(int(rows[-1]) + 1)
        lanes = self._row_seat[:bucket].copy()
        launch = DecodeLaunch(
            bucket=bucket,
            longest=int(scheduled.max()),
            seats=lanes,
            generations=self._seats.generation[lanes],
            variant=Variant.of_counts(self._needs),
        )
        steps = min(int((self._seats.limit[seats] - scheduled).min()), int((covered - scheduled).min()) + 1)
        return _Steady(launch=launch, seats=seats, steps=steps if all_fit else 1)

    def check_integrity(self, expected: Mapping[int, LiveRequest]) -> None:
        """Check the rows and what the sampler needs against the running requests, by row. Raises: AssertionError."""
        rows = np.flatnonzero(self._row_seat != NO_SEAT)
        running = dict(zip(rows.tolist(), self._row_seat[rows].tolist()))
        assert running == {row: live.seat for row, live in expected.items()}, "the row map differs from the running requests"
        needs = sum((live.needs for live in expected.values()), Variant().counts())
        assert (needs == self._needs).all(), "sampler needs are miscounted"
