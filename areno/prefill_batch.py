"""What one prefill launch gathers: chunks of prompts, the rows that draw their first token from them, and copies of pages.

The scheduler fills one in each step and takes a launch out of it. A waiting request whose prompt the batch computes to its end for another
one needs no prefill of its own: it joins as a lane of that chunk. Invariant: one lane per request that draws, in the chunks' order;
`copies` are made before the launch, `forks` within it, behind its attention and in front of its sampling. Host only, no torch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from areno.commands import CopyPages, PrefillChunk, PrefillLaunch
from areno.kv.residency import PageCopy
from areno.live import LiveRequest
from areno.sampling.variant import Variant
from areno.seats import Seats


class PrefillBatch:
    """The prefill of one step under `version`, as far as it is planned."""

    __slots__ = ("_chunks", "_lanes", "_places", "_version", "copies", "forks")

    def __init__(self, version: int) -> None:
        self._version = version
        self._chunks: list[PrefillChunk] = []
        self._lanes: list[list[LiveRequest]] = []
        self._places: dict[tuple[str | None, bytes], int] = {}
        self.copies: list[PageCopy] = []
        self.forks: list[PageCopy] = []

    def add(self, chunk: PrefillChunk, live: LiveRequest) -> bool:
        """Add a chunk; return whether it completes its prompt, whose request draws then."""
        ends = live.computed == live.ids.size
        if ends and live.is_built_by(self._version):
            self._places.setdefault(_prompt_of(live), len(self._chunks))
        self._chunks.append(chunk)
        self._lanes.append([live] if ends else [])
        return ends

    def join(self, live: LiveRequest) -> None:
        """Let a request draw from the prompt completed last."""
        self._lanes[-1].append(live)

    def computes(self, live: LiveRequest) -> LiveRequest | None:
        """Return the request whose prompt, completed here, is that of `live` as a whole, salt included."""
        if not self._places or live.prompt_logprobs is not None:
            return None
        place = self._places.get(_prompt_of(live))
        return None if place is None else self._lanes[place][0]

    def join_same(self, live: LiveRequest) -> None:
        """Let a request draw from the prompt that is its own too, see `computes`."""
        self._lanes[self._places[_prompt_of(live)]].append(live)

    @property
    def drawing(self) -> list[LiveRequest]:
        """The requests that draw, one lane each."""
        return [live for lanes in self._lanes for live in lanes]

    def page_copies(self) -> CopyPages | None:
        """Return the copies that come before the launch, if there are any."""
        if not self.copies:
            return None
        return CopyPages(sources=_pages(self.copies, "source"), targets=_pages(self.copies, "target"), tokens=_pages(self.copies, "tokens"))

    def launch(self, seats: Seats) -> PrefillLaunch | None:
        """Return the launch; None without a chunk."""
        if not self._chunks:
            return None
        needs = Variant().counts()
        for live in self.drawing:
            needs += live.needs
        lanes = np.array([live.seat for live in self.drawing], dtype=np.int64)
        return PrefillLaunch(
            chunks=tuple(replace(chunk, rows=tuple(live.row for live in lives)) for chunk, lives in zip(self._chunks, self._lanes)),
            fork_sources=_pages(self.forks, "source"),
            fork_targets=_pages(self.forks, "target"),
            seats=lanes,
            generations=seats.generation[lanes].copy(),
            variant=Variant.of_counts(needs),
        )


def _prompt_of(live: LiveRequest) -> tuple[str | None, bytes]:
    return live.request.cache_salt, live.ids.tobytes()


def _pages(copies: list[PageCopy], side: str) -> np.ndarray:
    return np.array([getattr(copy, side) for copy in copies], dtype=np.int64)
