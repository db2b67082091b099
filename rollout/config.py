"""The service's options: one frozen value, validated when made, written to and read from JSON.

`rollout serve`, `rollout.local` and the front share it; the engine's own options pass through to the engine, which
validates them. The engine class can be replaced only through a JSON file, which is how tests run a scripted one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.errors import InvalidConfig, shown
from rollout.option_names import OTHER_OPTIONS, checks_names, unknown_name
from rollout.state import StateFolder, default_state_dir

_TEXT = re.compile("[^\0\ud800-\udfff]+")
MAX_SECONDS = 1e6
MAX_THREADS = 4096
LOG_FORMATS = ("text", "json")
DEFAULT_ENGINE = "rollout.service.engine_host:load_engine"
# Options that go to the engine under their own names when they are given.
ENGINE_OPTIONS = (
    "dtype",
    "device",
    "max_rows",
    "page_size",
    "num_pages",
    "max_model_len",
    "max_prefill_tokens",
    "run_ahead",
    "ring_slots",
    "decode_tables",
    "sampling_slots",
    "kept_ids",
    "prefix_cache",
    "hint_share",
    "load_format",
    "graphs",
    "gpu_memory_fraction",
    "result_transport",
    "weight_staging",
    "canary_tolerance",
    "canary_mean_tolerance",
    "seed",
    "tp",
    "rank_timeout_s",
)


def default_threads() -> int:
    """Return the engine's CPU threads when none are asked for: half of the usable cores, the rest is for trainer and agent loop.

    Two processes that both take every core slow each other down many times over, because each waits for its sleeping threads.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _refuse(name: str, value: object, limit: str) -> InvalidConfig:
    return InvalidConfig(f"{name}={shown(value)} is refused", field=name, value=value, limit=f"allowed: {limit}", remedy=f"change {name}")


def _survives_json(value: object) -> bool:
    """Whether the engine host's process, which is given JSON, would read the same value."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


@checks_names(InvalidConfig, OTHER_OPTIONS)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """How a service runs.

    Units: seconds and bytes as named. `lease_s` is how long a silent client keeps its requests; `flush_interval_s` the
    least time between two messages to one client; `credit_bytes` how much a client may leave unacknowledged, and
    `host_credit_bytes` the front, before the engine host stops stepping;
    `max_record_bytes` bounds prompts and results of all live requests together, `max_client_record_bytes` and
    `max_client_requests` what one client has of them. An engine host that owes something and is silent for `host_timeout_s`,
    or not ready after `host_start_timeout_s`, is killed and replaced; `max_restarts` is how many deaths within a minute of service are
    followed by a new host, the time spent loading not counted; a request without progress for `stall_s` is named in
    the log. `drain_s` is how long requests may end after a first SIGTERM. `metrics_port` serves the numbers to Prometheus on
    loopback. `threads` are the engine's CPU threads; None means half of the usable cores, at least one, which leaves the
    other half to a trainer and an agent loop beside it. `keep_last` names a file in which the newest pushed weights are kept,
    and taken up from when the engine host has to be started again.
    Raises: InvalidConfig naming field, value, limit and remedy.
    """

    model: str
    address: str | None = None
    state_dir: str | None = None
    weights_dir: str | None = None
    keep_last: str | None = None
    insecure: bool = False
    dtype: str | None = None
    device: str | None = None
    max_rows: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    max_model_len: int | None = None
    max_prefill_tokens: int | None = None
    run_ahead: int | None = None
    ring_slots: int | None = None
    decode_tables: str | None = None
    sampling_slots: int | None = None
    kept_ids: bool | None = None
    prefix_cache: bool | None = None
    hint_share: float | None = None
    load_format: str | None = None
    graphs: bool | None = None
    gpu_memory_fraction: float | None = None
    result_transport: str | None = None
    weight_staging: str | None = None
    canary_tolerance: float | None = None
    canary_mean_tolerance: float | None = None
    seed: int | None = None
    tp: int | None = None
    rank_timeout_s: float | None = None
    threads: int | None = None
    lease_s: float = 30.0
    flush_interval_s: float = 0.002
    credit_bytes: int = 8 * 2**20
    host_credit_bytes: int = 16 * 2**20
    max_message_bytes: int = 64 * 2**20
    max_record_bytes: int = 2**30
    max_requests: int = 16_384
    max_client_record_bytes: int | None = None
    max_client_requests: int | None = None
    max_restarts: int = 3
    host_timeout_s: float = 120.0
    host_start_timeout_s: float = 1800.0
    stall_s: float = 60.0
    drain_s: float = 10.0
    metrics_port: int | None = None
    log_format: str = "text"
    watch_parent: bool = False
    engine: str = DEFAULT_ENGINE
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise _refuse("model", self.model, "a path of a model folder")
        for name in ("address", "state_dir", "weights_dir", "keep_last"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and _TEXT.fullmatch(value)):
                raise _refuse(name, value, "a text that UTF-8 can hold, or None for the default")
        for name in ("lease_s", "flush_interval_s", "host_timeout_s", "host_start_timeout_s", "stall_s", "drain_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
                raise _refuse(name, value, "0.2 seconds or more" if name == "lease_s" else f"0 to {MAX_SECONDS:g} seconds")
        for name in ("lease_s", "host_timeout_s", "host_start_timeout_s", "stall_s"):
            if getattr(self, name) < 0.2:
                raise _refuse(name, getattr(self, name), "0.2 seconds or more")
        for name, low in (
            ("credit_bytes", 2**16),
            ("host_credit_bytes", 2**16),
            ("max_message_bytes", 2**20),
            ("max_record_bytes", 2**16),
            ("max_requests", 1),
            ("max_client_record_bytes", 2**16),
            ("max_client_requests", 1),
            ("max_restarts", 0),
        ):
            value = getattr(self, name)
            if value is None and name.startswith("max_client_"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 2**62:
                raise _refuse(name, value, f"an integer from {low} to 2**62")
        for name in ("insecure", "watch_parent"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "True or False")
        if self.threads is not None and (
            isinstance(self.threads, bool) or not isinstance(self.threads, int) or not 1 <= self.threads <= MAX_THREADS
        ):
            raise _refuse("threads", self.threads, f"an integer from 1 to {MAX_THREADS}")
        if self.keep_last is not None and not Path(self.keep_last).absolute().parent.is_dir():
            raise _refuse("keep_last", self.keep_last, "a file in a folder that exists")
        if self.metrics_port is not None and not (type(self.metrics_port) is int and 0 <= self.metrics_port < 2**16):
            raise _refuse("metrics_port", self.metrics_port, "a port of 0 (a free one) to 65535")
        if not isinstance(self.log_format, str) or self.log_format not in LOG_FORMATS:
            raise _refuse("log_format", self.log_format, " or ".join(LOG_FORMATS))
        if not isinstance(self.engine, str) or self.engine.count(":") != 1:
            raise _refuse("engine", self.engine, "module:name")
        for name in ENGINE_OPTIONS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (bool, int, float, str)) and _survives_json(value)):
                raise _refuse(name, value, "a plain number, a text, True or False, or None for the engine's default")
        options = self.engine_options
        if not isinstance(options, Mapping) or not _survives_json(dict(options)):
            raise _refuse("engine_options", options, "a mapping of option names to plain numbers, texts, lists and mappings")

    @property
    def state(self) -> StateFolder:
        """The state folder that applies."""
        return StateFolder(Path(self.state_dir).absolute() if self.state_dir else default_state_dir())

    def resolved(self) -> ServiceConfig:
        """Return the config with address, threads, state folder and weights folder filled in."""
        state = self.state
        address = self.address or state.default_address()
        # One folder for each service: pushes remove their own old files.
        weights = state.root / "weights" / hashlib.sha256(address.encode()).hexdigest()[:16]
        return dataclasses.replace(
            self,
            model=str(Path(self.model).absolute()),
            threads=self.threads or default_threads(),
            state_dir=str(state.root),
            address=address,
            keep_last=None if self.keep_last is None else str(Path(self.keep_last).absolute()),
            weights_dir=str(Path(self.weights_dir).absolute() if self.weights_dir else weights),
        )

    def engine_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the engine."""
        given = {name: getattr(self, name) for name in ENGINE_OPTIONS if getattr(self, name) is not None}
        return {"model": self.model, **given, **self.engine_options}

    def to_json(self) -> str:
        """Return the form that `from_json` reads."""
        return json.dumps({item.name: getattr(self, item.name) for item in dataclasses.fields(self)}, indent=1, default=dict)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ServiceConfig:
        """Make a config from untyped fields. Raises: InvalidConfig; an unknown name lists the known ones."""
        known = [item.name for item in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise unknown_name(name, known, error=InvalidConfig, others=OTHER_OPTIONS)
        return cls(**fields)

    @classmethod
    def from_json(cls, text: str) -> ServiceConfig:
        """Read a config. Raises: InvalidConfig."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise InvalidConfig(
                f"the config is not JSON: {error}", field="config", remedy="write it with ServiceConfig.to_json()"
            ) from None
        if not isinstance(fields, dict):
            raise InvalidConfig("the config is not a JSON object", field="config", remedy="write it with ServiceConfig.to_json()")
        return cls.from_fields(fields)
