"""Which arrays a message may carry: names, element types and shapes, by operation.

Read by the codec, which checks them before anything looks at the bytes. Invariant: an operation that is not listed carries none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout.wire.generation_messages import MAX_MEMBERS
from rollout.wire.operations import Op

MAX_NAMED_IDS = 16_384
# More biases than any engine takes: the engine names its own limit, this one only bounds the work of getting there.
MAX_BIAS_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Which arrays a name may carry: shape [n, *row], n at most `most`."""

    dtypes: tuple[str, ...]
    row: tuple[int, ...] = ()
    required: bool = True
    most: int = 2**40
    row_entries: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_entries", math.prod(self.row))


_IDS = ArraySpec(("<i4", "<i8"))
_MAYBE_IDS = ArraySpec(("<i4", "<i8"), required=False)
_FLOATS = ArraySpec(("<f4",))
_MAYBE_FLOATS = ArraySpec(("<f4",), required=False)
_LONGS = ArraySpec(("<i8",))
_INTS = ArraySpec(("<i4",))
_MAYBE_INTS = ArraySpec(("<i4",), required=False)
_REQUEST_IDS = ArraySpec(("|u1",), row=(16,))
_MAYBE_REQUEST_IDS = ArraySpec(("|u1",), row=(16,), required=False)
# What a client names in one message, each of which may be answered: as many as a flush or a heartbeat can make it name, and more.
_NAMED_IDS = ArraySpec(("|u1",), row=(16,), most=MAX_NAMED_IDS)
_PROMPT = {
    "prompt_ids": _IDS,
    "stop_ids": _MAYBE_IDS,
    "forced_ids": _MAYBE_IDS,
    "bias_ids": ArraySpec(("<i4", "<i8"), required=False, most=MAX_BIAS_ENTRIES),
    "bias_values": ArraySpec(("<f8",), required=False, most=MAX_BIAS_ENTRIES),
}
# A token's kept set: how many ids, then the ids of all tokens one after the other. Both absent where no token has any.
_KEPT = {"kept_counts": _MAYBE_INTS, "kept_ids": _MAYBE_INTS}
# Prompts that were scored: whose (a stream's index, or the engine's number), first position, how many, version; then the
# log-probabilities of all of them, one prompt after the other.
_SCORES = {
    "prompt_scores": ArraySpec(("<i8",), row=(4,), required=False),
    "prompt_logprobs": _MAYBE_FLOATS,
    "prompt_raw_logprobs": _MAYBE_FLOATS,
}

ARRAYS: Mapping[Op, Mapping[str, ArraySpec]] = {
    Op.GENERATE: _PROMPT,
    Op.GENERATE_GROUP: {**_PROMPT, "member_ids": ArraySpec(("|u1",), row=(16,), most=MAX_MEMBERS)},
    Op.SUBMIT: _PROMPT,
    Op.ALIVE: {"request_ids": _MAYBE_REQUEST_IDS},
    Op.ATTACH: {"request_ids": _NAMED_IDS, "offsets": _LONGS},
    Op.ACK: {"request_ids": ArraySpec(("|u1",), row=(16,), required=False, most=MAX_NAMED_IDS)},
    # Streams of a flush: ids, first offset, number of tokens. Then the tokens of all of them, one after the other; the
    # versions of those as runs. A missing log-probability array is all NaN. `texts` is UTF-8, in the order of the endings.
    Op.DELTAS: {
        "request_ids": _REQUEST_IDS,
        "offsets": _LONGS,
        "counts": _INTS,
        "token_ids": _INTS,
        "logprobs": _MAYBE_FLOATS,
        "raw_logprobs": _MAYBE_FLOATS,
        "behaviour_logprobs": _MAYBE_FLOATS,
        "version_values": _LONGS,
        "version_counts": _LONGS,
        **_KEPT,
        **_SCORES,
        "texts": ArraySpec(("|u1",), required=False),
    },
    Op.SCORE: {"ids": _IDS},
    Op.SCORED: {"token_logprobs": _FLOATS, "raw_logprobs": _FLOATS},
    Op.TOKENIZER_FILES_RESULT: {"content": ArraySpec(("|u1",))},
    Op.WEIGHTS_STAGE_BUCKET: {"content": ArraySpec(("|u1",), required=False)},
    Op.WEIGHTS_COMMIT: {"canary_ids": _MAYBE_IDS, "canary_counts": ArraySpec(("<i8",), required=False), "canary_logprobs": _MAYBE_FLOATS},
    Op.STEP: {
        "accepted": _LONGS,
        "request_ids": _LONGS,
        "token_ids": _INTS,
        "logprobs": _FLOATS,
        "raw_logprobs": _FLOATS,
        "behaviour_logprobs": _FLOATS,
        "versions": _LONGS,
        **_KEPT,
        **_SCORES,
    },
}
