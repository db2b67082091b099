"""What an engine says of itself: the model it runs, and its sizes and limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What runs and what it allows; counts in tokens unless the name says otherwise.

    `result_transport` is host (CPU), mapped or copy, with the reason.
    """

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
    run_ahead: int
    decode_tables: str
    kept_ids: bool
    result_transport: str
    result_transport_reason: str
    num_parameters: int
    tp: int = 1
