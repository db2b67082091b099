"""What a profiler saw of a device, from either of two formats, and what it says about a window of steps.

Read are chrome traces of torch.profiler (`.json`, `.json.gz`) and SQLite exports of Nsight Systems. Of both the same is kept: copies
by direction, everything that kept the device busy, host calls that wait for it, and the steps, which are the ranges named
`marker` (record_function, or NVTX) or, without any, the graph launches. Counted is what starts within the window. A kernel that
stores into mapped host memory is no copy and does not count as one. Times are in microseconds.

Tables of the export (created only where there is something to put in): CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY (copyKind 1 is host to
device, 2 device to host), _MEMSET, _GRAPH_TRACE (whole graphs, in place of their kernels), _RUNTIME with names in StringIds, and
NVTX_EVENTS. Their times are in nanoseconds.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areno import InvalidConfig

MARKER = "decode_step"
LONG_WAIT = 1.5
"""A wait is long if it takes more than this many steps."""

_SYNCHRONISATIONS = {
    "cudaStreamSynchronize": "stream",
    "cuStreamSynchronize": "stream",
    "cudaEventSynchronize": "event",
    "cuEventSynchronize": "event",
    "cudaDeviceSynchronize": "device",
    "cuCtxSynchronize": "device",
}
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_COPY_KINDS = {1: "htod", 2: "dtoh", 8: "dtod"}
_VERSION = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time; `kind` is the direction of a copy or what a host call waits for."""

    start: float
    end: float
    kind: str = ""


@dataclass(slots=True)
class Trace:
    """One trace. `busy` holds all that ran on the device, copies included; `launches` the graph launches."""

    copies: list[Span] = field(default_factory=list)
    busy: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    markers: list[Span] = field(default_factory=list)
    launches: list[Span] = field(default_factory=list)

    @property
    def step_starts(self) -> list[float]:
        """When the steps started, in order."""
        return sorted(span.start for span in (self.markers or self.launches))

    def call(self, name: str, start: float, end: float) -> None:
        """Take a host call of the CUDA runtime or driver."""
        plain = _VERSION.sub("", name)
        if plain in _SYNCHRONISATIONS:
            self.waits.append(Span(start, end, _SYNCHRONISATIONS[plain]))
        elif plain in _GRAPH_LAUNCHES:
            self.launches.append(Span(start, end))

    def copy(self, kind: str, start: float, end: float) -> None:
        """Take a copy."""
        self.copies.append(Span(start, end, kind))
        self.busy.append(Span(start, end))


def read_trace(path: str | Path, *, marker: str = MARKER) -> Trace:
    """Read a trace of either format. Raises: InvalidConfig where it is neither, or says nothing of a device."""
    path = Path(path)
    if not path.is_file():
        raise _refusal(path, "is no file", "a trace is read from a file", "check the path")
    with path.open("rb") as file:
        head = file.read(16)
    trace = _read_export(path, marker) if head.startswith(b"SQLite format 3") else _read_chrome(path, head, marker)
    if not trace.busy:
        raise _refusal(path, "shows no work of a device", "kernels or copies are needed", "record with CUDA activities on a device")
    return trace


def _refusal(path: Path, what: str, limit: str, remedy: str) -> InvalidConfig:
    return InvalidConfig(f"{path} {what}", field="trace", value=str(path), limit=limit, remedy=remedy)


def _read_chrome(path: Path, head: bytes, marker: str) -> Trace:
    try:
        text = gzip.decompress(path.read_bytes()) if head.startswith(b"\x1f\x8b") else path.read_bytes()
        loaded = json.loads(text)
        events: list[dict[str, Any]] = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
    except (ValueError, KeyError, OSError, EOFError) as error:
        raise _refusal(path, f"cannot be read ({error})", "chrome traces and SQLite exports are read", "export it again") from error
    trace = Trace()
    for event in events:
        if event.get("ph") != "X":
            continue
        category, name, start = event.get("cat", ""), event.get("name", ""), float(event["ts"])
        end = start + float(event.get("dur", 0.0))
        if category == "gpu_memcpy":
            trace.copy(_direction(name), start, end)
        elif category in ("kernel", "gpu_memset"):
            trace.busy.append(Span(start, end))
        elif category in ("cuda_runtime", "cuda_driver"):
            trace.call(name, start, end)
        elif category == "user_annotation" and name == marker:
            trace.markers.append(Span(start, end))
    return trace


def _direction(name: str) -> str:
    """Return the direction that a copy's name says, as in 'Memcpy HtoD (Pinned -> Device)'."""
    found = re.search(r"\b(HtoD|DtoH|DtoD)\b", name)
    return found.group(1).lower() if found else "other"


def _read_export(path: Path, marker: str) -> Trace:
    trace = Trace()
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        prefix = "CUPTI_ACTIVITY_KIND_"
        for name in ("KERNEL", "MEMSET", "GRAPH_TRACE"):
            if prefix + name in tables:
                trace.busy += [Span(*times) for times in _times(connection.execute(f'SELECT start, "end" FROM {prefix}{name}'))]
        if prefix + "MEMCPY" in tables:
            for start, end, kind in _times(connection.execute(f'SELECT start, "end", copyKind FROM {prefix}MEMCPY')):
                trace.copy(_COPY_KINDS.get(kind, "other"), start, end)
        if prefix + "RUNTIME" in tables:
            query = f'SELECT call.start, call."end", StringIds.value FROM {prefix}RUNTIME call JOIN StringIds ON StringIds.id = call.nameId'
            for start, end, name in _times(connection.execute(query)):
                trace.call(name, start, end)
        if "NVTX_EVENTS" in tables:
            query = (
                'SELECT range.start, range."end" FROM NVTX_EVENTS range LEFT JOIN StringIds ON StringIds.id = range.textId '
                'WHERE coalesce(range.text, StringIds.value) = ? AND range."end" IS NOT NULL'
            )
            trace.markers += [Span(*times) for times in _times(connection.execute(query, (marker,)))]
    except sqlite3.DatabaseError as error:
        raise _refusal(path, f"cannot be read ({error})", "an export has the documented tables", "export it again") from error
    finally:
        connection.close()
    return trace


def _times(rows: Iterable[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
    """Turn the first two columns from nanoseconds into microseconds."""
    return ((start / 1e3, end / 1e3, *rest) for start, end, *rest in rows)


def summarise(trace: Trace, *, steps: int, source: str = "trace") -> dict[str, Any]:
    """Return what happened in the middle `steps` steps of a trace: from the start of one to the start of the one behind them.

    Raises: InvalidConfig where there are fewer.
    """
    marks = trace.step_starts
    if len(marks) <= steps:
        raise InvalidConfig(
            f"{source} has {len(marks)} steps",
            field="steps",
            value=steps,
            limit=f"a window of {steps} needs one more behind it",
            remedy="record a longer run, or lower --steps",
        )
    first = (len(marks) - steps) // 2
    begin, end = marks[first], marks[min(first + steps, len(marks) - 1)]
    step_us = (end - begin) / steps
    copies = [span.kind for span in trace.copies if begin <= span.start < end]
    waits = [span for span in trace.waits if begin <= span.start < end]
    kinds = [span.kind for span in waits]
    idle = _gaps(trace.busy, begin, end)
    return {
        "steps": steps,
        "step_ms": step_us / 1e3,
        "dtoh_copies": copies.count("dtoh"),
        "htod_copies": copies.count("htod"),
        "other_copies": len(copies) - copies.count("dtoh") - copies.count("htod"),
        "stream_syncs": kinds.count("stream"),
        "event_syncs": kinds.count("event"),
        "device_syncs": kinds.count("device"),
        "longest_wait_ms": max((span.end - span.start for span in waits), default=0.0) / 1e3,
        "long_waits": sum(span.end - span.start > LONG_WAIT * step_us for span in waits),
        "idle_ms": sum(idle) / 1e3,
        "largest_idle_ms": max(idle, default=0.0) / 1e3,
    }


def _gaps(busy: Sequence[Span], begin: float, end: float) -> list[float]:
    """Return the stretches of [begin, end] in which nothing ran."""
    gaps, reached = [], begin
    for span in sorted(busy, key=lambda span: span.start):
        if span.end <= reached:
            continue
        if span.start >= end:
            break
        if span.start > reached:
            gaps.append(span.start - reached)
        reached = span.end
    if reached < end:
        gaps.append(end - reached)
    return gaps
