"""One live request as the scheduler sees it: its phase, what it holds, and what a resume would have to rebuild.

The scheduler moves requests through their phases; `kv/residency.py` gives and takes what they hold. No torch.

    WAITING -> PREFILLING -> RUNNING -> (its own end)                      each ends in one `Finished`
       ^            |           |-----> CLOSING (cancelled, being killed)
       +------------+-----------+       a restarted prefill or a preempted row waits again, keeping its tokens
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from areno.kv.prefix import OpenTail, Spans
from areno.request import Request
from areno.sampling.kept import MAX_KEPT
from areno.sampling.slot_content import SlotContent
from areno.sampling.variant import Variant
from areno.step_output import FinishReason

NO_SLOT = -1
NO_ROW = -1


class Phase(enum.Enum):
    """Where a live request stands; it leaves the table with its `Finished`."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    CLOSING = "closing"


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Everything the scheduler knows of one request that is not in the seat arrays.

    `ids` and `versions` are the known ids and, for outputs, the version that sampled them, as of the last time the request
    waited; `base_spans` say which versions built the KV of the first `computed` of them.
    """

    request: Request
    seed: int
    stop_ids: np.ndarray
    ids: np.ndarray
    versions: np.ndarray
    phase: Phase = Phase.WAITING
    seat: int = -1
    row: int = NO_ROW
    generation: int = 0
    sampling_slot: int = NO_SLOT
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int = 0
    base_spans: Spans = ()
    open_tail: OpenTail | None = None
    close_after: int = 0
    reason: FinishReason | None = None
    rebuilt_at: list[int] = field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None
    _needs: np.ndarray | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt ids, earlier output included."""
        return int(np.asarray(self.request.prompt_ids).size)

    @property
    def limit(self) -> int:
        """The most ids this request can have."""
        return self.prompt_tokens - self.request.prior_output_tokens + self.request.sampling.max_new_tokens

    @property
    def given_tokens(self) -> int:
        """Number of prompt ids that are not the request's own earlier output."""
        return self.prompt_tokens - self.request.prior_output_tokens

    @property
    def keeps_kv(self) -> bool:
        """Whether its KV may be of older weights than the live ones."""
        return self.request.kv_policy == "keep"

    def is_built_by(self, version: int) -> bool:
        """Whether all of the KV that it has so far is of one version."""
        return self.base_spans in ((), ((0, version),))

    def may_take(self, parent: LiveRequest, version: int) -> bool:
        """Whether it could have built, or reused, the prompt's KV of `parent` as it is, when `version` is live."""
        if parent.is_built_by(version):
            return True
        lineage = self.request.lineage
        own = self.keeps_kv and lineage is not None and lineage == parent.request.lineage
        return own and min(made_by for _, made_by in parent.base_spans) >= version - self.request.max_kv_lag

    @property
    def variant(self) -> Variant:
        """Which sampler parts this request needs."""
        sampling = self.request.sampling
        greedy = sampling.temperature == 0.0
        return Variant(
            noise=not greedy,
            temperature=not greedy and sampling.temperature != 1.0,
            stop_mask=sampling.min_new_tokens > 0 and self.stop_ids.size > 0,
            slots=sampling.needs_slot,
            filters=sampling.filters,
            wide=sampling.filters and not 0 < sampling.top_k <= MAX_KEPT,
            kept=sampling.return_kept_ids,
            sums=sampling.logprobs,
        )

    @property
    def needs(self) -> np.ndarray:
        """Return the variant's counts, the same for the request's life. Shapes: int64 [needs]."""
        if self._needs is None:
            self._needs = self.variant.counts()
        return self._needs

    def slot_content(self) -> SlotContent | None:
        """Return what its sampling slot holds with the ids known now; None without a slot."""
        sampling = self.request.sampling
        if not sampling.needs_slot:
            return None
        nothing = np.zeros(0, dtype=np.int64)
        biases = sampling.logit_bias
        return SlotContent(
            forced_ids=nothing if sampling.forced_ids is None else np.asarray(sampling.forced_ids),
            bias_ids=np.array(list(biases), dtype=np.int64),
            bias_values=np.array(list(biases.values()), dtype=np.float32),
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            prompt_ids=self.ids[: self.given_tokens].astype(np.int64),
            output_ids=self.ids[self.given_tokens :].astype(np.int64),
        )
