"""How a request's end is put together, and its form on the wire.

The request desk makes the one terminal event here from all that bears on it; the streams send it.
"""

from __future__ import annotations

from rollout.service.records import Record, Terminal
from rollout.service.stop_text import StopMatch
from rollout.wire.host_messages import HostEnding


def terminal_of(
    record: Record,
    num_tokens: int,
    kind: str,
    *,
    detail: str | None = None,
    error: dict[str, object] | None = None,
    text: str | None = None,
    match: StopMatch | None = None,
    ending: HostEnding | None = None,
) -> Terminal:
    """Return the end of a record of `num_tokens` sampled tokens.

    A stop string that was complete before is the end, whatever came after it. `ending` is the engine's word, None where the
    engine cannot give it; what it says of tokens beyond the record's is left out.
    """
    if match is not None:
        kind, detail, error = "stop", None, None
    common = {"kind": kind, "detail": detail, "error": error, "text": text, "stop_string": None if match is None else match.string}
    if ending is None:
        return Terminal(prompt_tokens=record.prompt_tokens, seed=record.seed, **common)  # type: ignore[arg-type]
    length = ending.prompt_tokens + num_tokens
    return Terminal(
        stop_id=ending.stop_id if num_tokens == ending.output_tokens else None,
        prompt_tokens=ending.prompt_tokens,
        cached_tokens=ending.cached_tokens,
        seed=ending.seed,
        kv_spans=tuple((span[0], span[1]) for span in ending.kv_spans if len(span) == 2 and span[0] < length),
        kv_rebuilt_at=tuple(place for place in ending.kv_rebuilt_at if place <= length),
        **common,  # type: ignore[arg-type]
    )


def ending_fields(index: int, record: Record, output_tokens: int) -> dict[str, object]:
    """Return the wire form of a record's terminal event; its text goes apart."""
    terminal = record.terminal
    assert terminal is not None, "an ending comes after the end"
    return {
        "index": index,
        "kind": terminal.kind,
        "output_tokens": output_tokens,
        "prompt_tokens": terminal.prompt_tokens,
        "cached_tokens": terminal.cached_tokens,
        "seed": terminal.seed,
        "stop_id": terminal.stop_id,
        "stop_string": terminal.stop_string,
        "detail": terminal.detail,
        "error": terminal.error,
        "kv_spans": [list(span) for span in terminal.kv_spans],
        "kv_rebuilt_at": list(terminal.kv_rebuilt_at),
        "prompt_scored": record.prompt_score is not None,
        "text_bytes": None if terminal.text is None else len(terminal.text.encode()),
    }
