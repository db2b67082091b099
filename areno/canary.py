"""The proof that new weights give the trainer's numbers: canaries, scored before anything else runs with them.

Every canary goes through the plain forward; the first one also through the decode path, on rows and pages of its own
that were set aside at start-up, so that a proof disturbs no request. The engine calls it between swap and publication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areno.commands import DecodeLaunch, PrefillChunk, PrefillLaunch
from areno.config import LANE_MULTIPLE, RESERVED_PAGES, ResolvedConfig
from areno.decode.deltas import DeltaPacker
from areno.decode.path import DecodePath
from areno.decode.results import ResultRing
from areno.forward import Forward
from areno.kv.store import KVStore
from areno.request import MAX_STOP_IDS
from areno.sampling.slot_content import SlotContent
from areno.sampling.variant import Variant
from areno.weights.canary import Canary

_ROW = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryGaps:
    """Distances in nats between expected and measured log-probabilities; `worst` says where, None without canaries."""

    largest: float | None
    mean: float | None
    decode: float | None
    worst: str | None


class CanaryProof:
    """Scores canaries. `path` and `ring` are its own, with one bucket of rows over the shared store."""

    __slots__ = ("_forward", "_generation", "_pages", "_path", "_resolved", "_ring", "_store")

    def __init__(self, forward: Forward, store: KVStore, path: DecodePath, ring: ResultRing, resolved: ResolvedConfig) -> None:
        self._forward, self._store, self._path, self._ring, self._resolved = forward, store, path, ring, resolved
        self._pages = np.arange(RESERVED_PAGES, RESERVED_PAGES + resolved.canary_pages, dtype=np.int64)
        self._generation = 0

    def measure(self, canaries: Sequence[Canary]) -> CanaryGaps:
        """Score every canary with the live weights. Mutates: the reserved pages and rows only."""
        gaps, worst, largest = [], None, -1.0
        for number, canary in enumerate(canaries):
            tempered, _ = self._forward.score(canary.ids, canary.temperature)
            gap = np.nan_to_num(np.abs(tempered.cpu().numpy().astype(np.float64) - canary.expected_logprobs), nan=np.inf)
            gaps.append(gap)
            if gap.max() > largest:
                largest = float(gap.max())
                worst = f"canary {number}, token {int(gap.argmax()) + 1}"
        if not gaps:
            return CanaryGaps(largest=None, mean=None, decode=None, worst=None)
        decode = self._decode_gap(canaries[0])
        return CanaryGaps(largest=largest, mean=float(np.concatenate(gaps).mean()), decode=decode, worst=worst)

    def _decode_gap(self, canary: Canary) -> float:
        """Run the canary's second half with forced ids through prefill and decode; return the largest distance."""
        ids = canary.ids[: self._pages.size * self._resolved.page_size + 1]
        prompt_tokens = max(ids.size // 2, 1)
        forced = ids[prompt_tokens:]
        # Weights that failed an earlier proof may have left NaN here.
        self._store.clear(self._pages)
        self._enter_row(canary, ids[:prompt_tokens], forced)
        variant = Variant(temperature=canary.temperature not in (0.0, 1.0), slots=True, sums=True)
        lanes: dict[str, np.ndarray] = {"seats": np.zeros(1, dtype=np.int64), "generations": np.array([self._generation], dtype=np.int32)}
        nothing = np.zeros(0, dtype=np.int64)
        chunk = PrefillChunk(
            ids=ids[:prompt_tokens],
            start=0,
            pages=self._pages,
            rows=(_ROW,),
            score_from=0,
            score_targets=nothing,
            temperature=canary.temperature,
            seat=0,
            generation=self._generation,
        )
        computed = self._forward.prefill([chunk])
        measured = []
        for step in range(forced.size):
            _, records = self._ring.take(seats=lanes["seats"], generations=lanes["generations"], version=0)
            if step == 0:
                launch = PrefillLaunch(chunks=(chunk,), fork_sources=nothing, fork_targets=nothing, variant=variant, **lanes)
                self._path.sample_prefill(launch, computed, records)
            else:
                self._path.decode(DecodeLaunch(bucket=LANE_MULTIPLE, longest=prompt_tokens + step, variant=variant, **lanes), records)
            self._ring.launched()
            measured.append(float(self._ring.ready(drain=True)[0].logprobs[0, 0]))
        gap = np.abs(np.array(measured) - canary.expected_logprobs[prompt_tokens - 1 : ids.size - 1])
        return float(np.nan_to_num(gap, nan=np.inf).max())

    def _enter_row(self, canary: Canary, prompt: np.ndarray, forced: np.ndarray) -> None:
        self._generation += 1
        packer = DeltaPacker()
        nothing = np.zeros(0, dtype=np.int64)
        packer.set_row(
            {
                "row": _ROW,
                "generation": self._generation,
                "length": prompt.size - 1,
                "remaining": forced.size,
                "sampling_slot": 0,
                "recurrent_slot": -1,
                "temperature": canary.temperature,
                "top_p": 1.0,
                "stop_ids": np.full(MAX_STOP_IDS, -1, dtype=np.int32),
            },
            self._pages,
            SlotContent(
                forced_ids=forced,
                bias_ids=nothing,
                bias_values=nothing.astype(np.float32),
                repetition=1.0,
                presence=0.0,
                frequency=0.0,
                prompt_ids=prompt,
                output_ids=nothing,
            ),
        )
        for slot in packer.take():
            self._path.apply(slot)
