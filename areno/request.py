"""What a caller hands to the engine: requests and sampling parameters. What it gets back is in `step_output.py`.

No torch here: the scheduler and the service's bookkeeping read these types. Everything is validated when it is
made, except what needs a model's limits; `check_request` does that part at the engine's door.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from areno.errors import InvalidRequest, RequestTooLong, shown
from areno.option_names import OTHER_PARAMETERS, checks_names
from areno.request_values import as_biases, as_ids, as_integer, as_number, check_range
from areno.sampling.kept import MAX_KEPT

MAX_STOP_IDS = 16
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 1e4
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_PENALTY = 100.0
_TEMPERATURES = f"0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_GREEDY = "use temperature=0 for greedy decoding"
_NOT_OF_SAMPLING = {
    "stop": "stop strings are matched by the service; pass stop_ids here",
    "n": "pass one Request for each continuation, all with one group",
}


@checks_names(InvalidRequest, {**OTHER_PARAMETERS, **_NOT_OF_SAMPLING})
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn.

    Units: `temperature` divides the logits (0 = greedy, lowest id on ties); counts are in tokens; biases and penalties are
    in logits. Order: biases and masks, penalties, temperature, min-p, top-k, top-p. Off: `top_k` 0 or -1 (larger than the
    vocabulary keeps all), `top_p` 1, `min_p` 0, `repetition_penalty` 1, the others 0.
    `stop_ids` are added to the model's own end-of-sequence ids; `ignore_eos` drops the model's, never `stop_ids`.
    Before `min_new_tokens` every stop id is removed from the draw. `forced_ids` are emitted first, with the
    log-probabilities the forward gives them. A missing `seed` is drawn by the engine and reported.
    `return_kept_ids` returns the ids that the filters kept for each token; it needs `top_k` of 1 to 64.
    `prompt_logprobs_from` asks for the log-probabilities of the prompt's ids from that position on (1 = all that have one).
    Raises: InvalidRequest naming field, value, limit and remedy.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_ids: Sequence[int] | np.ndarray = ()
    ignore_eos: bool = False
    forced_ids: Sequence[int] | np.ndarray | None = None
    logprobs: bool = True
    prompt_logprobs_from: int | None = None
    return_kept_ids: bool = False

    @property
    def needs_slot(self) -> bool:
        """Whether the row needs a sampling slot."""
        penalised = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalised or bool(self.logit_bias) or self.forced_ids is not None

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p narrow the draw."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("max_new_tokens", as_integer("max_new_tokens", self.max_new_tokens, 1, 2**31 - 1))
        put("min_new_tokens", as_integer("min_new_tokens", self.min_new_tokens, 0, 2**31 - 1))
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}",
                field="min_new_tokens",
                value=self.min_new_tokens,
                limit=f"at most max_new_tokens ({self.max_new_tokens})",
                remedy="lower min_new_tokens or raise max_new_tokens",
            )
        put("temperature", as_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE, _TEMPERATURES, _GREEDY))
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidRequest(
                f"temperature={shown(self.temperature)} is too small",
                field="temperature",
                value=self.temperature,
                limit=f"allowed: {_TEMPERATURES}",
                remedy=_GREEDY,
            )
        self._check_shaping(put)
        if self.seed is not None:
            put("seed", as_integer("seed", self.seed, 0, 2**64 - 1))
        for name in ("ignore_eos", "logprobs", "return_kept_ids"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise InvalidRequest(
                    f"{name}={shown(value)} is not a bool", field=name, value=value, limit="True or False", remedy="pass a bool"
                )
        if self.return_kept_ids and not 1 <= self.top_k <= MAX_KEPT:
            raise InvalidRequest(
                f"return_kept_ids with top_k={self.top_k}",
                field="return_kept_ids",
                value=self.top_k,
                limit=f"kept sets hold at most {MAX_KEPT} ids",
                remedy=f"set top_k to 1..{MAX_KEPT}; top_p and min_p may be added",
            )
        if self.prompt_logprobs_from is not None:
            put("prompt_logprobs_from", as_integer("prompt_logprobs_from", self.prompt_logprobs_from, 1, 2**31 - 1))
        stop_ids = np.unique(as_ids("stop_ids", self.stop_ids, allow_empty=True))
        if stop_ids.size > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_ids has {stop_ids.size} ids",
                field="stop_ids",
                value=int(stop_ids.size),
                limit=f"at most {MAX_STOP_IDS} with the model's own",
                remedy="pass fewer stop ids",
            )
        put("stop_ids", stop_ids)
        if self.forced_ids is not None:
            forced = as_ids("forced_ids", self.forced_ids, allow_empty=True)
            if forced.size > self.max_new_tokens:
                raise InvalidRequest(
                    f"forced_ids has {forced.size} ids",
                    field="forced_ids",
                    value=int(forced.size),
                    limit=f"at most max_new_tokens ({self.max_new_tokens})",
                    remedy="raise max_new_tokens or force fewer ids",
                )
            put("forced_ids", forced if forced.size else None)

    def _check_shaping(self, put: Callable[[str, object], None]) -> None:
        """Check filters, penalties and biases."""
        put("top_k", max(as_integer("top_k", self.top_k, -1, 2**31 - 1, "use 0 to keep all ids"), 0))
        put("min_p", as_number("min_p", self.min_p, 0.0, 1.0, "0 to 1", "use min_p=0 to turn it off"))
        put("top_p", as_number("top_p", self.top_p, 0.0, 1.0, "above 0, up to 1", "use top_p=1 to turn it off"))
        if self.top_p == 0.0:
            raise InvalidRequest("top_p=0 keeps nothing", field="top_p", value=0.0, limit="allowed: above 0, up to 1", remedy=_GREEDY)
        low, high = MIN_REPETITION, MAX_REPETITION
        remedy = "use repetition_penalty=1 to turn it off"
        put("repetition_penalty", as_number("repetition_penalty", self.repetition_penalty, low, high, f"{low:g} to {high:g}", remedy))
        for name in ("presence_penalty", "frequency_penalty"):
            limit = MAX_PENALTY
            put(name, as_number(name, getattr(self, name), -limit, limit, f"-{limit:g} to {limit:g}", f"use {name}=0 to turn it off"))
        put("logit_bias", as_biases(self.logit_bias))


KV_POLICIES = ("keep", "recompute")
_OF_SAMPLING = {
    other: f"pass sampling=SamplingParams({name}=...)"
    for other, name in (*OTHER_PARAMETERS.items(), *((one, one) for one in SamplingParams.__dataclass_fields__))
    if name in SamplingParams.__dataclass_fields__
}


@checks_names(InvalidRequest, {**OTHER_PARAMETERS, **_OF_SAMPLING})
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation. `request_id` is the caller's own number, unique among live requests.

    `lineage` is an opaque name under which later requests may reuse this one's pages across weight versions
    (absent: no reuse across versions), at most `max_kv_lag` versions old; `kv_policy` says whether a request that runs across a
    commit keeps its pages ("keep") or rebuilds them ("recompute", which reuses no older ones either); `cache_salt` separates
    prefix pages of different tenants. Requests with one `group` and one prompt share its prefill. The last `prior_output_tokens`
    prompt ids are the request's own earlier output: budget, minimum length, penalties and forced ids count from before them.
    Raises: InvalidRequest.
    """

    request_id: int
    prompt_ids: Sequence[int] | np.ndarray
    sampling: SamplingParams = field(default_factory=SamplingParams)
    lineage: str | None = None
    cache_salt: str | None = None
    kv_policy: str = "keep"
    max_kv_lag: int = 4
    group: int | None = None
    prior_output_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_id", as_integer("request_id", self.request_id, 0, 2**63 - 1))
        object.__setattr__(self, "prompt_ids", as_ids("prompt_ids", self.prompt_ids, allow_empty=False))
        object.__setattr__(self, "max_kv_lag", as_integer("max_kv_lag", self.max_kv_lag, 0, 2**31 - 1))
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest(
                "sampling is not a SamplingParams",
                field="sampling",
                value=type(self.sampling).__name__,
                limit="an areno.SamplingParams is needed",
                remedy="pass areno.SamplingParams(...)",
            )
        if not isinstance(self.kv_policy, str) or self.kv_policy not in KV_POLICIES:
            raise InvalidRequest(
                f"kv_policy={shown(self.kv_policy)} is unknown",
                field="kv_policy",
                value=self.kv_policy,
                limit=f"known: {', '.join(KV_POLICIES)}",
                remedy="use kv_policy='keep' (running requests go on with their pages) or 'recompute' (they rebuild them after a commit)",
            )
        if self.group is not None:
            object.__setattr__(self, "group", as_integer("group", self.group, 0, 2**63 - 1))
        self._check_prior()
        for name in ("lineage", "cache_salt"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and 0 < len(text) <= 256 and _LONE_SURROGATE.search(text) is None):
                raise InvalidRequest(
                    f"{name}={shown(text)}",
                    field=name,
                    value=text,
                    limit="a string of 1 to 256 characters that UTF-8 can hold",
                    remedy=f"change {name} or leave it out",
                )

    def _check_prior(self) -> None:
        """Check how much of the prompt is the request's own earlier output."""
        size, budget = len(self.prompt_ids), self.sampling.max_new_tokens
        prior = as_integer(
            "prior_output_tokens", self.prior_output_tokens, 0, size - 1, "leave at least one prompt id before the earlier output"
        )
        if prior >= budget:
            raise InvalidRequest(
                f"prior_output_tokens={prior} leaves nothing of max_new_tokens={budget}",
                field="prior_output_tokens",
                value=prior,
                limit=f"below max_new_tokens ({budget}), which counts the earlier output too",
                remedy="the rollout is complete; do not resume it",
            )
        object.__setattr__(self, "prior_output_tokens", prior)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a model and its pool allow; ids are checked against `vocab_size` (and sampling against `num_valid_ids`)."""

    vocab_size: int
    num_valid_ids: int
    max_model_len: int
    pool_tokens: int
    eos_ids: tuple[int, ...]
    sampling_slots: int
    kept_ids: bool = False


def resolve_stop_ids(sampling: SamplingParams, limits: RequestLimits) -> np.ndarray:
    """Return the ids that end the request: its own and, unless `ignore_eos`, the model's."""
    own = np.asarray(sampling.stop_ids)
    return own if sampling.ignore_eos else np.union1d(own, np.asarray(limits.eos_ids, dtype=np.int64))


def _check_engine_options(sampling: SamplingParams, limits: RequestLimits) -> None:
    """Refuse what this engine was started without."""
    if sampling.needs_slot and not limits.sampling_slots:
        raise InvalidRequest(
            "forced_ids, biases and penalties need a sampling slot",
            field="forced_ids" if sampling.forced_ids is not None else "logit_bias" if sampling.logit_bias else "repetition_penalty",
            value=None,
            limit="the engine has none",
            remedy="start it with sampling_slots >= 1",
        )
    if sampling.return_kept_ids and not limits.kept_ids:
        raise InvalidRequest(
            "return_kept_ids is not enabled",
            field="return_kept_ids",
            value=True,
            limit="this engine keeps no side ring for kept sets",
            remedy="start it with kept_ids=True (`serve --kept-ids`)",
        )


def check_request(request: Request, limits: RequestLimits) -> None:
    """Refuse what this model can never run. Raises: InvalidRequest, RequestTooLong."""
    sampling = request.sampling
    prompt = np.asarray(request.prompt_ids)
    check_range("prompt_ids", prompt, limits.vocab_size)
    check_range("stop_ids", np.asarray(sampling.stop_ids), limits.vocab_size)
    if sampling.forced_ids is not None:
        check_range("forced_ids", np.asarray(sampling.forced_ids), limits.vocab_size)
    if sampling.logit_bias:
        check_range("logit_bias", np.array(list(sampling.logit_bias), dtype=np.int64), limits.vocab_size)
    _check_engine_options(sampling, limits)
    stops = resolve_stop_ids(sampling, limits)
    if stops.size > MAX_STOP_IDS:
        raise InvalidRequest(
            f"stop_ids and the model's {len(limits.eos_ids)} end ids make {stops.size}",
            field="stop_ids",
            value=int(stops.size),
            limit=f"at most {MAX_STOP_IDS} together",
            remedy="pass fewer stop ids or ignore_eos=True",
        )
    start = sampling.prompt_logprobs_from
    if start is not None and start >= prompt.size:
        raise InvalidRequest(
            f"prompt_logprobs_from={start} is beyond the prompt",
            field="prompt_logprobs_from",
            value=start,
            limit=f"the prompt's last position is {prompt.size - 1}",
            remedy="ask for a position inside the prompt",
        )
    total = prompt.size - request.prior_output_tokens + sampling.max_new_tokens
    if total > limits.max_model_len:
        raise RequestTooLong(
            f"prompt of {prompt.size} and max_new_tokens={sampling.max_new_tokens} make {total} tokens",
            field="max_new_tokens",
            value=total,
            limit=f"the context holds {limits.max_model_len}",
            remedy="shorten the prompt or lower max_new_tokens",
        )
    if total > limits.pool_tokens:
        raise RequestTooLong(
            f"prompt of {prompt.size} and max_new_tokens={sampling.max_new_tokens} make {total} tokens",
            field="max_new_tokens",
            value=total,
            limit=f"the KV pool holds {limits.pool_tokens}",
            remedy="lower max_new_tokens or start the engine with more num_pages",
        )
