"""What is learnt of a tensor when it is staged: its digest, whether it is finite, whether it differs from the live one.

The update asks once for each tensor, beside decode, so that a commit has nothing left to read but a few numbers. On a CUDA
device everything runs on the staging stream, many tensors in one launch, and no answer is waited for until the commit; tensors
that are staged in host memory pass through the device piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from areno.weights.digest import MASK64, bits_of, digest, digest_part, digest_slice
from areno.weights.names import is_finite

PIECE_ELEMENTS = 1 << 24
"""Elements that are looked at in one go on a device; bounds the memory that this takes."""


@dataclass(frozen=True, slots=True)
class StagedFacts:
    """A staged tensor's digest, whether all its elements are finite, and whether its bits differ from the live tensor's."""

    digest: int
    finite: bool
    changed: bool


@dataclass(frozen=True, slots=True)
class PendingFacts:
    """Facts that a device is still finding out. Shapes: int64 [3], in the order of `StagedFacts`."""

    words: torch.Tensor


def inspect(staged: torch.Tensor, live: torch.Tensor) -> StagedFacts:
    """Find out about a tensor staged in host memory for a model there. Shapes: both tensors alike, contiguous."""
    return StagedFacts(digest(staged), is_finite(staged), not torch.equal(bits_of(staged), bits_of(live)))


def inspect_on_device(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[PendingFacts]:
    """Find out about staged tensors of a model on a CUDA device, without waiting. Shapes: each two alike, contiguous."""
    from areno.kernels.weights import inspect_pairs

    facts: dict[int, PendingFacts] = {place: _inspect_parts(*pair) for place, pair in enumerate(pairs) if not pair[0].is_cuda}
    there = [place for place in range(len(pairs)) if place not in facts]
    if there:
        facts |= zip(there, map(PendingFacts, inspect_pairs([pairs[place] for place in there])))
    return [facts[place] for place in range(len(pairs))]


def _inspect_parts(staged: torch.Tensor, live: torch.Tensor) -> PendingFacts:
    """Find out about a tensor that waits in host memory."""
    flat, against = staged.reshape(-1), live.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=live.device)
    finite = torch.ones((), dtype=torch.bool, device=live.device)
    changed = torch.zeros((), dtype=torch.bool, device=live.device)
    for start in range(0, flat.numel(), PIECE_ELEMENTS):
        piece = flat[start : start + PIECE_ELEMENTS].to(live.device, non_blocking=True)
        total += digest_part(piece, start)
        low, high = torch.aminmax(piece)
        finite &= torch.isfinite(low) & torch.isfinite(high)
        changed |= (bits_of(piece) != bits_of(against[start : start + PIECE_ELEMENTS])).any()
    return PendingFacts(torch.stack([total, finite.to(torch.int64), changed.to(torch.int64)]))


def inspect_slice(staged: torch.Tensor, live: torch.Tensor, start: int) -> StagedFacts:
    """Find out about elements from flat index `start` on, in host memory; digests of a tensor's slices add up to its own."""
    return StagedFacts(digest_slice(staged, start), is_finite(staged), not torch.equal(bits_of(staged), bits_of(live)))


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
