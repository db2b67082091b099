"""Entries of the log as bytes: numbers, text and raw arrays, in the order of their dataclass's fields. Never pickled objects.

`pack` and `unpack` know every type of `operations.Entry` and nothing else. A type whose fields are not all described here fails
when this module is imported. Both ends run the same code (`identity.py`), so there are no versions of single entries. No torch.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from areno import commands
from areno.decode.deltas import PAGE_OP, ROW_OP, DeltaSlot
from areno.errors import EngineFailure
from areno.ranks import operations as ops
from areno.sampling.slot_content import SlotContent
from areno.sampling.variant import Variant

T = TypeVar("T")
_INT, _FLOAT, _COUNT = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<I")
_ARRAY_HEAD = struct.Struct("<BB")
_PLAIN = (np.bool_, np.uint8, np.int32, np.int64, np.uint64, np.float32, np.float64)
_DTYPES: tuple[np.dtype[Any], ...] = (*map(np.dtype, _PLAIN), ROW_OP, PAGE_OP)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def broken_log(what: str) -> EngineFailure:
    """Return the error of bytes that are no entry."""
    return EngineFailure(
        f"the command log is broken: {what}",
        field="tp",
        limit="every rank runs the same code over one log",
        remedy="restart the engine, and report it if it comes again",
    )


class _Reader:
    """Bytes and how far they are read."""

    __slots__ = ("at", "body")

    def __init__(self, body: bytes) -> None:
        self.body, self.at = body, 0

    def take(self, size: int) -> int:
        """Return where the next `size` bytes begin, and pass them. Raises: EngineFailure."""
        begin = self.at
        if size < 0 or begin + size > len(self.body):
            raise broken_log(f"an entry of {len(self.body)} bytes ends before byte {begin + size}")
        self.at = begin + size
        return begin

    def number(self, form: struct.Struct) -> Any:
        """Return the next number."""
        return form.unpack_from(self.body, self.take(form.size))[0]


@dataclass(frozen=True, slots=True)
class _Field(Generic[T]):
    """How one kind of value is written and read."""

    put: Callable[[list[bytes], T], None]
    get: Callable[[_Reader], T]


def _put_array(parts: list[bytes], value: np.ndarray) -> None:
    code = _CODES.get(value.dtype)
    assert code is not None, f"arrays of {value.dtype} have no code in the log"
    parts.append(_ARRAY_HEAD.pack(code, value.ndim) + struct.pack(f"<{value.ndim}I", *value.shape))
    parts.append(value.tobytes())


def _get_array(reader: _Reader) -> np.ndarray:
    code, ndim = _ARRAY_HEAD.unpack_from(reader.body, reader.take(_ARRAY_HEAD.size))
    if code >= len(_DTYPES) or ndim > 4:
        raise broken_log(f"no array has code {code} and {ndim} dimensions")
    dims = struct.unpack_from(f"<{ndim}I", reader.body, reader.take(4 * ndim))
    dtype, count = _DTYPES[code], math.prod(dims)
    begin = reader.take(dtype.itemsize * count)
    return np.frombuffer(reader.body, dtype, count, begin).reshape(dims).copy()


def _put_text(parts: list[bytes], value: str) -> None:
    encoded = value.encode()
    parts.append(_COUNT.pack(len(encoded)) + encoded)


def _get_text(reader: _Reader) -> str:
    size = reader.number(_COUNT)
    begin = reader.take(size)
    return reader.body[begin : begin + size].decode()


_Integer: _Field[int] = _Field(lambda parts, value: parts.append(_INT.pack(value)), lambda reader: reader.number(_INT))
_Real: _Field[float] = _Field(lambda parts, value: parts.append(_FLOAT.pack(value)), lambda reader: reader.number(_FLOAT))
_Bool: _Field[bool] = _Field(lambda parts, value: parts.append(b"\1" if value else b"\0"), lambda reader: reader.body[reader.take(1)] != 0)
_Array: _Field[np.ndarray] = _Field(_put_array, _get_array)
_Text: _Field[str] = _Field(_put_text, _get_text)


def _many(inner: _Field[T]) -> _Field[tuple[T, ...]]:
    def put(parts: list[bytes], values: tuple[T, ...]) -> None:
        parts.append(_COUNT.pack(len(values)))
        for value in values:
            inner.put(parts, value)

    return _Field(put, lambda reader: tuple(inner.get(reader) for _ in range(reader.number(_COUNT))))


def _pair(first: _Field[Any], second: _Field[Any]) -> _Field[tuple[Any, Any]]:
    def put(parts: list[bytes], value: tuple[Any, Any]) -> None:
        first.put(parts, value[0])
        second.put(parts, value[1])

    return _Field(put, lambda reader: (first.get(reader), second.get(reader)))


def _record(kind: type[T], **fields: _Field[Any]) -> _Field[T]:
    names = [one.name for one in dataclasses.fields(kind)]  # type: ignore[arg-type]
    assert names == list(fields), f"the log describes {list(fields)} of {kind.__name__}, which has {names}"
    described = tuple(fields.items())

    def put(parts: list[bytes], value: T) -> None:
        for name, one in described:
            one.put(parts, getattr(value, name))

    return _Field(put, lambda reader: kind(**{name: one.get(reader) for name, one in described}))


_VARIANT = _record(Variant, noise=_Bool, temperature=_Bool, stop_mask=_Bool, slots=_Bool, filters=_Bool, wide=_Bool, kept=_Bool, sums=_Bool)
_CONTENT = _record(
    SlotContent,
    forced_ids=_Array,
    bias_ids=_Array,
    bias_values=_Array,
    repetition=_Real,
    presence=_Real,
    frequency=_Real,
    prompt_ids=_Array,
    output_ids=_Array,
)
_SLOT = _record(DeltaSlot, rows=_Array, pages=_Array, contents=_many(_pair(_Integer, _CONTENT)))
_CHUNK = _record(
    commands.PrefillChunk,
    ids=_Array,
    start=_Integer,
    pages=_Array,
    rows=_many(_Integer),
    score_from=_Integer,
    score_targets=_Array,
    temperature=_Real,
    seat=_Integer,
    generation=_Integer,
)
_LANES: dict[str, _Field[Any]] = {"seats": _Array, "generations": _Array, "variant": _VARIANT}

_ENTRIES: dict[type, _Field[Any]] = {
    commands.ApplyDelta: _record(commands.ApplyDelta, slot=_SLOT),
    commands.ClearPages: _record(commands.ClearPages, pages=_Array),
    commands.CopyPages: _record(commands.CopyPages, sources=_Array, targets=_Array, tokens=_Array),
    commands.PrefillLaunch: _record(commands.PrefillLaunch, chunks=_many(_CHUNK), fork_sources=_Array, fork_targets=_Array, **_LANES),
    commands.DecodeLaunch: _record(commands.DecodeLaunch, bucket=_Integer, longest=_Integer, **_LANES),
    ops.Build: _record(ops.Build, config=_Text, resolved=_Text),
    ops.ScoreIds: _record(ops.ScoreIds, ids=_Array, temperature=_Real),
    ops.OpenUpdate: _record(ops.OpenUpdate, manifest=_Text, version=_Integer, partial=_Bool),
    ops.StagePiece: _record(
        ops.StagePiece, name=_Text, dtype=_Text, shape=_Array, start=_Integer, count=_Integer, slot=_Integer, whole=_Bool
    ),
    ops.StageRun: _record(
        ops.StageRun, name=_Text, dtype=_Text, shape=_Array, start=_Integer, count=_Integer, handle=_Text, offset=_Integer
    ),
    ops.OpenMemory: _record(ops.OpenMemory, handle=_Text),
    ops.LaunchSlices: _record(ops.LaunchSlices),
    ops.CopyRuns: _record(ops.CopyRuns),
    ops.InspectUpdate: _record(ops.InspectUpdate),
    ops.VerifyUpdate: _record(ops.VerifyUpdate, digests=_Text),
    ops.SwapUpdate: _record(ops.SwapUpdate),
    ops.MeasureCanaries: _record(ops.MeasureCanaries, counts=_Array, ids=_Array, logprobs=_Array, temperatures=_Array),
    ops.PublishUpdate: _record(ops.PublishUpdate, version=_Integer),
    ops.AbortUpdate: _record(ops.AbortUpdate),
    ops.TakeDigests: _record(ops.TakeDigests),
    ops.GatherTensor: _record(ops.GatherTensor, name=_Text),
    ops.ReleaseKV: _record(ops.ReleaseKV),
    ops.MoveOutWeights: _record(ops.MoveOutWeights),
    ops.WakeUp: _record(ops.WakeUp),
    ops.WarmUp: _record(ops.WarmUp),
    ops.CheckState: _record(ops.CheckState, number=_Integer),
    ops.Stop: _record(ops.Stop),
}
assert set(get_args(ops.Entry)) == set(_ENTRIES), "the log must describe every entry"
_KINDS = tuple(_ENTRIES)
_KIND_OF = {kind: number for number, kind in enumerate(_KINDS, 1)}


def pack(entry: ops.Entry) -> tuple[int, bytes]:
    """Return an entry's kind, from 1, and its bytes."""
    parts: list[bytes] = []
    _ENTRIES[type(entry)].put(parts, entry)
    return _KIND_OF[type(entry)], b"".join(parts)


def unpack(kind: int, body: bytes) -> ops.Entry:
    """Return the entry of a kind and its bytes; arrays are copies of their own. Raises: EngineFailure."""
    if not 1 <= kind <= len(_KINDS):
        raise broken_log(f"no entry has kind {kind}")
    reader = _Reader(body)
    entry: ops.Entry = _ENTRIES[_KINDS[kind - 1]].get(reader)
    if reader.at != len(body):
        raise broken_log(f"{len(body) - reader.at} bytes are left of a {type(entry).__name__}")
    return entry
