"""What is learnt of a tensor when it is staged: its digest, whether it is finite, whether it differs from the live one.

The update asks once for each tensor, beside decode, so that a commit has nothing left to read but a few numbers. On a CUDA
device everything runs on the staging stream, many tensors in one launch, and no answer is waited for until the commit; tensors
that are staged in host memory pass through the device piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from areno.weights.digest import MASK64, bits_of, digest_part, digest_rows, signed
from areno.weights.names import is_finite

PIECE_ELEMENTS = 1 << 24
"""Elements that are looked at in one go on a device; bounds the memory that this takes."""


@dataclass(frozen=True, slots=True)
class StagedFacts:
    """A staged tensor's digest, whether all its elements are finite, and whether its bits differ from the live tensor's."""

    digest: int
    finite: bool
    changed: bool

    def words(self) -> tuple[int, int, int]:
        """Return them as signed 64-bit integers."""
        return signed(self.digest), int(self.finite), int(self.changed)


@dataclass(frozen=True, slots=True)
class PendingFacts:
    """Facts that a device is still finding out. Shapes: int64 [3], in the order of `StagedFacts`."""

    words: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """How a rank's part lies in its whole tensor: the flat index of its first element, and runs of so many that begin `stride` apart."""

    first: int
    run: int
    stride: int

    def index_of(self, place: int) -> int:
        """Return the flat index in the whole tensor of an element of the part; of the first one of a run."""
        return self.first + place // self.run * self.stride


def inspect(staged: torch.Tensor, live: torch.Tensor, layout: Layout | None = None) -> StagedFacts:
    """Find out about a tensor, or a rank's part of one, staged in host memory for a model there. Shapes: both alike, contiguous."""
    if layout is None:
        return inspect_rows(staged.reshape(1, -1), live, 0, 0)
    return inspect_rows(staged.view(-1, layout.run), live, layout.first, layout.stride)


def inspect_rows(staged: torch.Tensor, live: torch.Tensor, start: int, stride: int) -> StagedFacts:
    """Find out about rows in host memory whose first elements have flat indices `start`, `start` + `stride`, ... in the whole tensor.

    Shapes: [rows, width], and live elements as many. Digests of all parts of a tensor add up to its own.
    """
    return StagedFacts(digest_rows(staged, start, stride), is_finite(staged), not torch.equal(bits_of(staged), bits_of(live)))


def inspect_on_device(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], layouts: Sequence[Layout] | None = None) -> list[PendingFacts]:
    """Find out about staged tensors of a model on a CUDA device, or a rank's parts of them, without waiting.

    Shapes: each two alike, contiguous; a layout for each of them where they are parts.
    """
    from areno.kernels.weights import inspect_pairs

    facts = {
        place: _inspect_parts(*pair, None if layouts is None else layouts[place]) for place, pair in enumerate(pairs) if not pair[0].is_cuda
    }
    there = [place for place in range(len(pairs)) if place not in facts]
    if there:
        cut = None if layouts is None else [(layouts[place].first, layouts[place].run, layouts[place].stride) for place in there]
        facts |= zip(there, map(PendingFacts, inspect_pairs([pairs[place] for place in there], cut)))
    return [facts[place] for place in range(len(pairs))]


def _inspect_parts(staged: torch.Tensor, live: torch.Tensor, layout: Layout | None) -> PendingFacts:
    """Find out about a tensor that waits in host memory."""
    flat, against = staged.reshape(-1), live.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=live.device)
    finite = torch.ones((), dtype=torch.bool, device=live.device)
    changed = torch.zeros((), dtype=torch.bool, device=live.device)
    layout = layout or Layout(0, 1, 1)
    if layout.run == flat.numel():
        layout = Layout(layout.first, 1, 1)
    # Pieces begin where a run does.
    elements = max(PIECE_ELEMENTS // layout.run, 1) * layout.run
    for start in range(0, flat.numel(), elements):
        piece = flat[start : start + elements].to(live.device, non_blocking=True)
        total += digest_part(piece, layout.index_of(start), run=layout.run if layout.run > 1 else 0, stride=layout.stride)
        low, high = torch.aminmax(piece)
        finite &= torch.isfinite(low) & torch.isfinite(high)
        changed |= (bits_of(piece) != bits_of(against[start : start + elements])).any()
    return PendingFacts(torch.stack([total, finite.to(torch.int64), changed.to(torch.int64)]))


def join_facts(parts: Iterable[StagedFacts]) -> StagedFacts:
    """Return what is known of a tensor from its parts."""
    found = list(parts)
    return StagedFacts(sum(part.digest for part in found) & MASK64, all(part.finite for part in found), any(part.changed for part in found))


def known(facts: Iterable[StagedFacts | PendingFacts]) -> list[StagedFacts]:
    """Return facts that may still be on their way. Blocks: until the device has found them out, once for all."""
    found = list(facts)
    pending = [one.words for one in found if isinstance(one, PendingFacts)]
    rows = iter(torch.stack(pending).tolist() if pending else ())
    known_facts = []
    for one in found:
        if isinstance(one, PendingFacts):
            words = next(rows)
            known_facts.append(StagedFacts(words[0] & MASK64, bool(words[1]), bool(words[2])))
        else:
            known_facts.append(one)
    return known_facts
