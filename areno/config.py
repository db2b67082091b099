"""The engine's options: what the user says (`EngineConfig`) and what follows from it (`ResolvedConfig`).

Both are frozen. Options are checked when made; what depends on the model or on free memory is resolved once by
`resolve`, before anything is allocated. No torch here.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from areno.errors import InvalidConfig, shown
from areno.option_names import OTHER_OPTIONS, checks_names

DTYPES = ("float32", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
DECODE_PATHS = ("resident", "rebuilt")
RESULT_TRANSPORTS = ("auto", "mapped", "copy")
STAGING_PLACES = ("auto", "device", "host")
MAX_RUN_AHEAD = 3
MAX_TP = 64
LANE_MULTIPLE = 4
ZERO_PAGE = 0
SINK_PAGE = 1
RESERVED_PAGES = 2
CANARY_TOKENS = 64
GROW_TOKENS = 64
_DEVICE = re.compile("auto|cpu|cuda(:[0-9]{1,4})?")
_WHOLE = {
    "max_rows": (1, 4096),
    "page_size": (1, 1024),
    "num_pages": (1, 2**31 - 1),
    "max_model_len": (2, 2**31 - 1),
    "max_prefill_tokens": (1, 2**20),
    "run_ahead": (0, MAX_RUN_AHEAD),
    "ring_slots": (2, 64),
    "sampling_slots": (0, 4096),
    "compaction_steps": (1, 2**20),
    "seed": (0, 2**64 - 1),
    "initial_version": (0, 2**62),
    "tp": (1, MAX_TP),
}
_CHOICES = {
    "dtype": (DTYPES, "leave dtype out for the device's default"),
    "decode_tables": (DECODE_PATHS, "use decode_tables='resident'"),
    "result_transport": (RESULT_TRANSPORTS, "use result_transport='auto'"),
    "weight_staging": (STAGING_PLACES, "use weight_staging='auto'"),
    "load_format": (LOAD_FORMATS, "use load_format='auto' to load the folder's checkpoint"),
}
_FLAGS = ("kept_ids", "prefix_cache", "graphs")
_NATS = "a positive number of nats"
_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str, str]] = {
    "gpu_memory_fraction": (lambda share: 0.0 < share <= 1.0, "a number above 0, at most 1", "leave gpu_memory_fraction at 0.9"),
    "rank_timeout_s": (lambda seconds: 1.0 <= seconds <= 3600.0, "seconds from 1 to 3600", "leave rank_timeout_s at 30"),
    "hint_share": (lambda share: 0.0 <= share <= 1.0, "a number from 0 to 1", "leave hint_share at 0.5; 0 ignores hints"),
    **{
        name: (lambda nats: 0 < nats < math.inf, _NATS, f"leave {name} out for the dtype's default")
        for name in ("canary_tolerance", "canary_mean_tolerance")
    },
}


def _require(ok: bool, name: str, value: object, limit: str, remedy: str) -> None:
    if not ok:
        raise InvalidConfig(f"{name}={shown(value)} is not allowed", field=name, value=value, limit=limit, remedy=remedy)


@checks_names(InvalidConfig, OTHER_OPTIONS)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine. What is None follows from the device ("auto": a CUDA device if there is one) and the model.

    Units: `max_prefill_tokens` per step; `page_size` in tokens; `num_pages` defaults to what every row could fill, on the CPU at
    most 1 GiB (or one whole context), on a CUDA device what `gpu_memory_fraction` of its memory leaves beside weights, staged
    weights and buffers; `run_ahead` in launches in flight beside the one that is read.
    `load_format` "dummy" takes only the folder's config and makes random weights from `seed`, for benchmarks.
    `hint_share` is how much of the pool cached prefixes of requests that are expected back (`Engine.expect_return`) may hold.
    `graphs` captures decode on a CUDA device; without it the same kernels are launched one by one. `decode_tables` picks the
    resident tables or the per-step rebuilt baseline. `result_transport` says how results leave a CUDA device: "mapped" (launches
    write host memory), "copy", or "auto", which maps where a probe at the start finds that it works. `seed` seeds the seeds of
    requests that bring none. `weight_staging` says where the weights of an update wait on a CUDA device: in its memory ("device"), in
    pinned host memory ("host"), or "auto": on the device where live and staged weights fit. `canary_tolerance` and
    `canary_mean_tolerance` are nats; None follows from the dtype. `tp` is the number of ranks that share the model, one process and one
    device each; a rank that shows no sign of life for `rank_timeout_s`, or hangs in one command ten times as long, ends the engine.
    Raises: InvalidConfig.
    """

    model: str
    dtype: str | None = None
    device: str = "auto"
    max_rows: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    max_model_len: int | None = None
    max_prefill_tokens: int | None = None
    run_ahead: int | None = None
    ring_slots: int = 8
    decode_tables: str = "resident"
    sampling_slots: int = 32
    kept_ids: bool = False
    prefix_cache: bool = True
    hint_share: float = 0.5
    compaction_steps: int = 8
    load_format: str = "auto"
    graphs: bool = True
    gpu_memory_fraction: float = 0.9
    result_transport: str = "auto"
    weight_staging: str = "auto"
    seed: int | None = None
    initial_version: int = 0
    canary_tolerance: float | None = None
    canary_mean_tolerance: float | None = None
    tp: int = 1
    rank_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        model = self.model
        named = isinstance(model, str | os.PathLike) and bool(os.fspath(model))
        _require(named, "model", model, "a path of a model folder", "pass the folder that holds config.json and the weights")
        optional = {field.name for field in fields(self) if field.default is None}
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        present = {name: value for name, value in given.items() if value is not None or name not in optional}
        for name in filter(present.__contains__, _WHOLE):
            low, high = _WHOLE[name]
            whole = isinstance(present[name], int) and not isinstance(present[name], bool) and low <= present[name] <= high
            _require(whole, name, present[name], f"an integer from {low} to {high}", f"set {name} within it")
        for name in filter(present.__contains__, _CHOICES):
            names, remedy = _CHOICES[name]
            known = isinstance(present[name], str) and present[name] in names
            _require(known, name, present[name], f"known: {', '.join(names)}", remedy)
        for name in _FLAGS:
            _require(isinstance(given[name], bool), name, given[name], "True or False", f"set {name} to one of them")
        for name in filter(present.__contains__, _NUMBERS):
            is_in, limit, remedy = _NUMBERS[name]
            number = isinstance(present[name], int | float) and not isinstance(present[name], bool)
            _require(number and is_in(present[name]), name, present[name], limit, remedy)
        device = isinstance(self.device, str) and _DEVICE.fullmatch(self.device) is not None
        _require(device, "device", self.device, "known: auto, cpu, cuda, cuda:N", "use device='auto'")
        ahead = self.run_ahead or 0
        slots = 2 * (ahead + 1)
        _require(self.ring_slots >= slots, "ring_slots", self.ring_slots, f"run_ahead={ahead} needs at least {slots}", "raise ring_slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the options mean for one model on one device: sizes of everything that is allocated once.

    `num_pages` counts usable pages; the store has `RESERVED_PAGES` and the canary's pages beside them. `clears_pages` says whether
    pages are zeroed when they change hands.
    """

    dtype: str
    device: str
    max_rows: int
    max_prefill_tokens: int
    refill_rows: int
    run_ahead: int
    table_rows: int
    page_size: int
    num_pages: int
    clears_pages: bool
    canary_pages: int
    max_model_len: int
    pages_per_row: int
    buckets: tuple[int, ...]
    seed: int
    canary_tolerance: float
    canary_mean_tolerance: float

    @property
    def store_pages(self) -> int:
        """Number of pages the store allocates."""
        return RESERVED_PAGES + self.canary_pages + self.num_pages

    @property
    def pool_tokens(self) -> int:
        """Number of tokens one request may occupy at most: the pool's, plus the last one that needs no KV."""
        return self.num_pages * self.page_size + 1

    def bucket_of(self, rows: int) -> int:
        """Return the smallest bucket that covers rows 0..rows-1."""
        return next(bucket for bucket in self.buckets if bucket >= rows)


def _buckets(max_rows: int, *, smallest: int) -> tuple[int, ...]:
    """Return the row counts that decode runs at.

    On the CPU they are multiples of four: products of such row counts give the same bits for a row in every bucket there.
    """
    top = -(-max_rows // smallest) * smallest
    sizes = {1, 2, 4, 8, 16, top} | set(range(24, min(top, 64) + 1, 8)) | set(range(80, top + 1, 16))
    return tuple(sorted(size for size in sizes if smallest <= size <= top))


QUICK_WEIGHT_BYTES = 2 << 30
"""Models below this take less than a millisecond a step for few rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What the device gives: its name, its kind, and how many bytes keys and values may take at most; `weight_bytes` it reads a step."""

    name: str
    kind: Literal["cpu", "cuda"]
    kv_bytes: int
    weight_bytes: int = 1 << 40


def resolve(config: EngineConfig, device: DeviceLimits, *, model_max_len: int, token_kv_elements: int) -> ResolvedConfig:
    """Work out the sizes for a model with a context of `model_max_len` tokens. Raises: InvalidConfig.

    `token_kv_elements` is how many numbers the keys and values of one token are, all layers.
    """
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise InvalidConfig(
            f"max_model_len={config.max_model_len} is longer than the model's context",
            field="max_model_len",
            value=config.max_model_len,
            limit=f"at most {model_max_len}",
            remedy="lower max_model_len",
        )
    on_cpu = device.kind == "cpu"
    dtype = config.dtype or ("float32" if on_cpu else "bfloat16")
    page_size = config.page_size or (16 if on_cpu else 64)
    max_rows = config.max_rows or (64 if on_cpu else 256)
    # The rebuilt path has waited for a launch when it returns, so that late news would cost and spare nothing. Steps below a millisecond
    # leave the host little time for each.
    late = 0 if on_cpu or config.decode_tables == "rebuilt" else 3 if device.weight_bytes < QUICK_WEIGHT_BYTES else 2
    run_ahead = config.run_ahead if config.run_ahead is not None else late
    max_len = config.max_model_len or min(model_max_len, 32768)
    pages_per_row = -(-max_len // page_size)
    buckets = _buckets(max_rows, smallest=LANE_MULTIPLE if on_cpu else 1)
    exact = dtype == "float32"
    page_bytes = page_size * token_kv_elements * (4 if exact else 2)
    affordable = device.kv_bytes // page_bytes
    canary_pages = -(-min(CANARY_TOKENS, max_len) // page_size)
    if not on_cpu:
        affordable -= RESERVED_PAGES + canary_pages
        needed = config.num_pages or 1
        if affordable < needed:
            raise InvalidConfig(
                f"the model leaves room for {max(affordable, 0)} pages of keys and values on {device.name}",
                field="num_pages",
                value=config.num_pages,
                limit=f"{needed} of {page_bytes:,} bytes are needed",
                remedy="raise gpu_memory_fraction, lower num_pages, max_rows or max_prefill_tokens, or take a device with more memory",
            )
    wanted = max_rows * pages_per_row
    return ResolvedConfig(
        dtype=dtype,
        device=device.name,
        max_rows=max_rows,
        max_prefill_tokens=config.max_prefill_tokens or (512 if on_cpu else 8192),
        # A launch costs as much as some dozens of tokens there, so that few prompts wait for others to come.
        refill_rows=1 if on_cpu else 4,
        run_ahead=run_ahead,
        table_rows=buckets[-1],
        page_size=page_size,
        num_pages=config.num_pages or min(wanted, max(pages_per_row, affordable) if on_cpu else affordable),
        # The CPU's attention reads whole pages and hides scores by adding -inf, which leaves NaN of an earlier owner NaN. The kernels
        # of a CUDA device load no token behind a row's last one.
        clears_pages=on_cpu,
        canary_pages=canary_pages,
        max_model_len=max_len,
        pages_per_row=pages_per_row,
        buckets=buckets,
        seed=config.seed if config.seed is not None else secrets.randbits(64),
        canary_tolerance=config.canary_tolerance or (1e-3 if exact else 0.2),
        canary_mean_tolerance=config.canary_mean_tolerance or (1e-3 if exact else 0.02),
    )
