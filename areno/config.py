"""The engine's options: what the user says (`EngineConfig`) and what follows from it (`ResolvedConfig`).

Both are frozen. Options are checked when made; what depends on the model or on free memory is resolved once by
`resolve`, before anything is allocated. No torch here.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, fields

from areno.errors import InvalidConfig

DTYPES = ("float32", "bfloat16")
DECODE_PATHS = ("resident", "rebuilt")
MAX_RUN_AHEAD = 3
LANE_MULTIPLE = 4
ZERO_PAGE = 0
SINK_PAGE = 1
RESERVED_PAGES = 2
CANARY_TOKENS = 64
GROW_TOKENS = 64
DEFAULT_KV_BYTES = 1 << 30


def _require(ok: bool, name: str, value: object, limit: str, remedy: str) -> None:
    if not ok:
        raise InvalidConfig(f"{name}={value!r} is not allowed", field=name, value=value, limit=limit, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    Units: `max_prefill_tokens` per step; `page_size` in tokens; `num_pages` defaults to what every row could fill, at most 1 GiB
    (or one whole context); `run_ahead` in launches whose results are withheld.
    `decode_tables` picks the resident tables or the per-step rebuilt baseline. `seed` seeds the seeds of requests
    that bring none. `canary_tolerance` and `canary_mean_tolerance` are nats; None follows from the dtype.
    Raises: InvalidConfig.
    """

    model: str
    dtype: str | None = None
    device: str = "cpu"
    max_rows: int = 64
    page_size: int | None = None
    num_pages: int | None = None
    max_model_len: int | None = None
    max_prefill_tokens: int = 512
    run_ahead: int = 0
    ring_slots: int = 8
    decode_tables: str = "resident"
    sampling_slots: int = 32
    kept_ids: bool = False
    prefix_cache: bool = True
    compaction_steps: int = 8
    seed: int | None = None
    initial_version: int = 0
    canary_tolerance: float | None = None
    canary_mean_tolerance: float | None = None

    def __post_init__(self) -> None:
        integers = {
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
        }
        optional = {field.name for field in fields(self) if field.default is None}
        for name, (low, high) in integers.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            _require(whole and low <= value <= high, name, value, f"an integer from {low} to {high}", f"set {name} within it")
        _require(
            self.dtype in (None, *DTYPES), "dtype", self.dtype, f"known: {', '.join(DTYPES)}", "leave dtype out for the device's default"
        )
        _require(
            self.decode_tables in DECODE_PATHS,
            "decode_tables",
            self.decode_tables,
            f"known: {', '.join(DECODE_PATHS)}",
            "use decode_tables='resident'",
        )
        _require(self.device == "cpu", "device", self.device, "this version runs on the CPU", "use device='cpu'")
        slots_needed = 2 * (self.run_ahead + 1)
        _require(
            self.ring_slots >= slots_needed,
            "ring_slots",
            self.ring_slots,
            f"run_ahead={self.run_ahead} needs at least {slots_needed}",
            "raise ring_slots",
        )
        for name in ("canary_tolerance", "canary_mean_tolerance"):
            value = getattr(self, name)
            _require(
                value is None or (math.isfinite(value) and value > 0),
                name,
                value,
                "a positive number of nats",
                f"leave {name} out for the dtype's default",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the options mean for one model: sizes of everything that is allocated once.

    `num_pages` counts usable pages; the store has `RESERVED_PAGES` and the canary's pages beside them.
    """

    dtype: str
    max_rows: int
    table_rows: int
    page_size: int
    num_pages: int
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


def _buckets(max_rows: int) -> tuple[int, ...]:
    """Return multiples of four: products of such row counts give the same bits for a row in every bucket on the CPU."""
    top = -(-max_rows // LANE_MULTIPLE) * LANE_MULTIPLE
    sizes = {4, 8, 16, top} | set(range(24, min(top, 64) + 1, 8)) | set(range(80, top + 1, 16))
    return tuple(sorted(size for size in sizes if size <= top))


def resolve(config: EngineConfig, *, model_max_len: int, token_kv_bytes: int) -> ResolvedConfig:
    """Work out the sizes for a model with a context of `model_max_len` tokens. Raises: InvalidConfig.

    Units: `token_kv_bytes` is what the keys and values of one token take in fp32, all layers.
    """
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise InvalidConfig(
            f"max_model_len={config.max_model_len} is longer than the model's context",
            field="max_model_len",
            value=config.max_model_len,
            limit=f"at most {model_max_len}",
            remedy="lower max_model_len",
        )
    dtype = config.dtype or "float32"
    page_size = config.page_size or 16
    max_len = config.max_model_len or min(model_max_len, 32768)
    pages_per_row = -(-max_len // page_size)
    buckets = _buckets(config.max_rows)
    exact = dtype == "float32"
    page_bytes = page_size * token_kv_bytes // (1 if exact else 2)
    affordable = DEFAULT_KV_BYTES // page_bytes
    return ResolvedConfig(
        dtype=dtype,
        max_rows=config.max_rows,
        table_rows=buckets[-1],
        page_size=page_size,
        num_pages=config.num_pages or min(config.max_rows * pages_per_row, max(pages_per_row, affordable)),
        canary_pages=-(-min(CANARY_TOKENS, max_len) // page_size),
        max_model_len=max_len,
        pages_per_row=pages_per_row,
        buckets=buckets,
        seed=config.seed if config.seed is not None else secrets.randbits(64),
        canary_tolerance=config.canary_tolerance or (1e-3 if exact else 0.2),
        canary_mean_tolerance=config.canary_mean_tolerance or (1e-3 if exact else 0.02),
    )
