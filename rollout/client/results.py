"""What the client returns: frozen values, arrays in numpy, names as in the protocol.

Lengths always agree: ids, logprobs, raw_logprobs, behaviour_logprobs and versions of one value have one entry per
sampled token. A log-probability that was asked for is never missing and never a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollout.client.columns import Columns
from rollout.errors import InvalidRequest, VersionChanged
from rollout.option_names import checks_names

SHOWN_IDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why a generation ended: stop (with the id or the string), length, cancelled, expired or failed."""

    kind: str
    stop_id: int | None = None
    detail: str | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScore:
    """Log-probabilities of a prompt's ids from position `start` on, tempered and raw, and the version that computed them."""

    start: int
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    version: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Generation:
    """A finished request.

    Shapes: `prompt_ids` [p] int32; all per-token arrays [n]. `logprobs` are log-probabilities under the model's logits
    divided by the temperature, `raw_logprobs` under the logits; `behaviour_logprobs` is None when it equals `logprobs`
    everywhere. `versions` names the weights of each token's forward; `kv_spans` lists (first position, version) runs of
    the KV over prompt and output; `kv_rebuilt_at` the numbers of ids at which a preempted request had its KV rebuilt.
    `kept_counts` [n] cut `kept_ids`, the ids that the filters kept, into tokens (None unless `return_kept_ids`).
    `prompt_logprobs` are None unless `prompt_logprobs_from`, or if the prompt was not computed. `text` is None without `stop`;
    else that of the whole output, earlier output included, cut before the stop string.
    """

    request_id: bytes
    prompt_ids: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray | None
    raw_logprobs: np.ndarray | None
    behaviour_logprobs: np.ndarray | None
    versions: np.ndarray
    kv_spans: tuple[tuple[int, int], ...]
    finish_reason: FinishReason
    seed: int
    cached_tokens: int
    prompt_tokens: int
    kept_counts: np.ndarray | None = None
    kept_ids: np.ndarray | None = None
    prompt_logprobs: PromptScore | None = None
    text: str | None = None
    kv_rebuilt_at: tuple[int, ...] = ()

    def __repr__(self) -> str:
        shown = ", ".join(str(one) for one in self.ids[:SHOWN_IDS].tolist()) + (", ..." if self.ids.size > SHOWN_IDS else "")
        versions = sorted({int(one) for one in self.versions})
        return f"Generation({self.finish_reason.kind}, {self.ids.size} ids [{shown}], versions {versions}, seed {self.seed})"


class Shown(NamedTuple):
    """Columns as a delta shows them; None where nothing was asked for, or where nothing differs."""

    ids: np.ndarray
    logprobs: np.ndarray | None
    raw_logprobs: np.ndarray | None
    behaviour_logprobs: np.ndarray | None
    versions: np.ndarray


class Delta:
    """New tokens of a stream from `offset` on; `finished` comes with the last one, `prompt_logprobs` once, as soon as they are there.

    Arrays are views, made when they are asked for: a stream of single tokens costs little more than its wake-ups.
    """

    __slots__ = ("_columns", "_plain", "_start", "_stop", "finished", "kept_counts", "kept_ids", "offset", "prompt_logprobs")

    def __init__(self, offset: int, columns: Columns | Shown, start: int, stop: int, plain: bool, finished: Generation | None) -> None:
        """`plain`: every token has its log-probabilities, and the behaviour's are equal."""
        self.offset = offset
        self._columns = columns
        self._start = start
        self._stop = stop
        self._plain = plain
        self.finished = finished
        self.kept_counts: np.ndarray | None = None
        self.kept_ids: np.ndarray | None = None
        self.prompt_logprobs: PromptScore | None = None

    def __repr__(self) -> str:
        return f"Delta(offset {self.offset}, {len(self.ids)} ids{'' if self.finished is None else ', finished'})"

    @property
    def ids(self) -> np.ndarray:
        """Sampled ids, int32 [n]."""
        return self._columns.ids[self._start : self._stop]

    @property
    def logprobs(self) -> np.ndarray | None:
        """Log-probabilities under logits / temperature, float32 [n]; None with `logprobs=False`."""
        column = self._columns.logprobs
        return None if column is None else column[self._start : self._stop]

    @property
    def raw_logprobs(self) -> np.ndarray | None:
        """Log-probabilities under the logits, float32 [n]; None with `logprobs=False`."""
        column = self._columns.raw_logprobs
        return None if column is None else column[self._start : self._stop]

    @property
    def behaviour_logprobs(self) -> np.ndarray | None:
        """Log-probabilities under the distribution sampled from, float32 [n]; None where equal to `logprobs` everywhere."""
        column = self._columns.behaviour_logprobs
        return None if self._plain or column is None else column[self._start : self._stop]

    @property
    def versions(self) -> np.ndarray:
        """The version of the weights behind each token, int64 [n]."""
        return self._columns.versions[self._start : self._stop]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """Log-probabilities of given ids; entry i belongs to id i + 1."""

    token_logprobs: np.ndarray
    raw_logprobs: np.ndarray
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelResult:
    """Whether the cancel ends the request; `state` is how it was found (live, waiting, stop, gone, unknown, ...)."""

    cancelled: bool
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the running engine is and allows; lengths in tokens. `result_transport` is host (CPU), mapped or copy, with the reason; `tp` the
    number of processes and devices that share the model."""

    model_type: str
    dtype: str
    device: str
    vocab_size: int
    num_valid_ids: int
    eos_ids: tuple[int, ...]
    max_model_len: int
    page_size: int
    num_pages: int
    pool_tokens: int
    max_rows: int
    sampling_slots: int
    kept_ids: bool
    run_ahead: int
    decode_tables: str
    result_transport: str
    result_transport_reason: str
    num_parameters: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """What a service is. `health`: starting, loading, ready, updating, needs_weights, degraded, failed, stopping; `engine` is None until
    it is loaded.

    `paused_by` names the clients for which the engine stands still, and for how long; `asleep` says what memory it has given back:
    "kv", "weights" (both) or None.
    """

    protocol_version: int
    incarnation: str
    address: str
    model: str
    health: str
    version: int
    needs_weights: int | None
    weights_dir: str
    tokenizer_digest: str | None
    chat_template_digest: str | None
    lease_s: float
    max_message_bytes: int
    engine: EngineFacts | None
    paused_by: tuple[str, ...] = ()
    asleep: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTicket:
    """An open weight update and the version it will publish."""

    update_id: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation under way and the version that serves until it ends."""

    evaluation_id: str
    version: int

    def checked(self, generations: list[Generation], deadline_s: float) -> list[Generation]:
        """Return the generations of an evaluation that saw its one version alone. Raises: VersionChanged."""
        for generation in generations:
            seen = {*generation.versions.tolist(), *(version for _, version in generation.kv_spans)}
            if seen - {self.version}:
                raise VersionChanged(
                    f"the evaluation began under version {self.version} and saw {sorted(seen)}",
                    field="deadline_s",
                    value=deadline_s,
                    limit=f"commits waited for {deadline_s:g} s, then went on",
                    remedy="pass a larger deadline_s, or evaluate fewer prompts at once (and without a lineage)",
                )
        return generations


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What a published update moved, changed and cost; gaps are in nats and None without canaries."""

    version: int
    num_tensors: int
    num_bytes: int
    changed_tensors: int
    changed_bytes: int
    staging_s: float
    swap_ms: float
    proof_ms: float
    pause_ms: float
    canary_gap: float | None = None
    canary_mean_gap: float | None = None
    decode_canary_gap: float | None = None
    inspect_s: float = 0.0
    derive_s: float = 0.0
    warning: str | None = None


@checks_names(InvalidRequest)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanarySpec:
    """A sequence with the log-probabilities that the new weights must give; `expected_logprobs` has one entry fewer than `ids`."""

    ids: Sequence[int] | np.ndarray
    expected_logprobs: Sequence[float] | np.ndarray
    temperature: float = 1.0
