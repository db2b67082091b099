"""The binary form of a message: header frame, msgpack body, raw array frames.

    frame 0   header   <u16 protocol version> <u16 operation> <16 bytes request id>, little-endian, 20 bytes
    frame 1   body     msgpack [fields, [[name, dtype, [dim, ...]], ...]]
    frame 2.. arrays   raw C-order little-endian bytes, one frame for each descriptor, in that order

Bytes from a socket are hostile. The order of checks is: number of frames, header size, protocol version, operation
of this socket, body size, msgpack limits, array descriptors against the operation's table, byte counts, and then
the fields. Nothing is allocated from a number that a peer wrote: arrays are views of the frames that arrived.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np

from rollout.errors import InvalidRequest, ProtocolMismatch, UnknownOperation, WireError, plain_text, shown
from rollout.wire.arrays import ARRAYS, ArraySpec
from rollout.wire.fields import Message
from rollout.wire.messages import MAX_BODY_BYTES, MODELS, SMALL_BODY_BYTES, parse_fields
from rollout.wire.operations import Op

PROTOCOL_VERSION = 1
HEADER = struct.Struct("<HH16s")
NO_REQUEST = bytes(16)
MAX_STRING = 2**20
MAX_ITEMS = 200_000
MAX_DEPTH = 8
# Lists and maps of one body, all levels together: an empty one is a byte on the wire and sixty here.
MAX_CONTAINERS = 400_000
MAX_FRAMES = 18
_OPS = {op.value: op for op in Op}
_ITEM_BYTES = {dtype: np.dtype(dtype).itemsize for specs in ARRAYS.values() for spec in specs.values() for dtype in spec.dtypes}
_REQUIRED = {op: frozenset(name for name, spec in specs.items() if spec.required) for op, specs in ARRAYS.items()}
_NOTHING: frozenset[str] = frozenset()
# Most of what lies in a message, in which nothing else does.
_LEAVES = frozenset({int, str, float, bool, bytes, type(None)})
# Byte orders of a dtype that are little-endian on this machine.
_LITTLE = ("<", "|", "=") if sys.byteorder == "little" else ("<", "|")

Frame = bytes | memoryview
Arrays = Mapping[str, np.ndarray]


# Named tuples, the cheapest of frozen values: some are made for every message.
class Header(NamedTuple):
    """The first frame, read."""

    version: int
    op: int
    request_id: bytes


class Packet(NamedTuple):
    """A message that passed every check; arrays are read-only views of the received frames."""

    op: Op
    request_id: bytes
    body: Message
    arrays: Arrays
    num_bytes: int


def _encode_error(fields: Mapping[str, object], cause: Exception, culprit: str | None = None) -> InvalidRequest:
    for name, value in fields.items():
        try:
            if name == culprit:
                raise cause
            msgpack.packb(value)
        except (TypeError, ValueError, OverflowError) as error:
            return InvalidRequest(
                f"{name}={plain_text(shown(value, 80))} cannot be sent: {error}",
                field=name,
                value=shown(value, 80),
                limit="fields are None, bool, int below 2**64, float, str, bytes, list and dict with str keys",
                remedy=f"convert {name} first",
            )
    return InvalidRequest(f"a message cannot be sent: {cause}", limit="fields are plain values", remedy="convert them first")


def _nested_in(levels: Iterable[object]) -> list[dict[object, object] | list[object]]:
    """Return the maps and lists that lie in these."""
    return [
        item
        for one in levels
        for item in (one.values() if isinstance(one, dict) else cast(list[object], one))
        if type(item) not in _LEAVES and isinstance(item, (dict, list))
    ]


def _has_text_keys(value: dict[object, object] | list[object]) -> bool:
    """Return whether all maps within have strings for keys, as the reader wants; what is nested deeper is the reader's to refuse."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if not all(isinstance(key, str) for one in level if isinstance(one, dict) for key in one):
            return False
        level = _nested_in(level)
        if not level:
            break
    return True


def encode(op: Op, request_id: bytes, fields: Mapping[str, object], arrays: Arrays | None = None) -> list[Frame]:
    """Return the frames of one message. Raises: InvalidRequest for a value that has no binary form."""
    descriptors: list[list[object]] = []
    frames: list[Frame] = [HEADER.pack(PROTOCOL_VERSION, op, request_id), b""]
    for name, array in (arrays or {}).items():
        dtype = array.dtype
        # Most are in their form already, which is found sooner than made.
        as_is = array.flags.c_contiguous and dtype.byteorder in _LITTLE and array.ndim
        packed = array if as_is else np.ascontiguousarray(array, dtype=dtype.newbyteorder("<"))
        descriptors.append([name, packed.dtype.str, list(packed.shape)])
        frames.append(_bytes_of(array, packed) if packed.size else b"")
    for name, value in fields.items():
        if isinstance(value, (dict, list)) and not _has_text_keys(value):
            raise _encode_error(fields, TypeError("keys are strings"), name)
    try:
        frames[1] = msgpack.packb([fields, descriptors], use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise _encode_error(fields, error) from None
    return frames


def _bytes_of(array: np.ndarray, packed: np.ndarray) -> Frame:
    """Return an array's bytes; the object itself where it is a view of all of one, so that it can be sent without a copy."""
    base = array.base
    if isinstance(base, bytes) and len(base) == array.nbytes and array.dtype == packed.dtype:
        return base
    return packed.data.cast("B")


def read_header(frame: bytes) -> Header:
    """Return the header's parts; the version is not judged here. Raises: WireError."""
    if len(frame) != HEADER.size:
        raise WireError(
            f"the header frame has {len(frame)} bytes", limit=f"it has {HEADER.size}", remedy="see the protocol in rollout/README.md"
        )
    return Header(*HEADER.unpack(frame))


def _depth_over(value: list[object] | dict[str, object], limit: int) -> bool:
    """Return whether more than `limit` levels of lists and maps are nested in this one, itself included."""
    level: Sequence[object] = [value]
    for _ in range(limit):
        level = _nested_in(level)
        if not level:
            return False
    return True


class _ContainerCount:
    """Stops the unpacking of a body that consists of too many lists and maps."""

    def __init__(self) -> None:
        self._left = MAX_CONTAINERS

    def __call__(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many lists and maps")
        return value


def _unpack(frame: bytes, op: Op) -> tuple[dict[str, object], list[object]]:
    limit = MAX_BODY_BYTES[op]
    if len(frame) > limit:
        raise WireError(
            f"the body of {op.name} has {len(frame)} bytes",
            field="body",
            value=len(frame),
            limit=f"at most {limit}",
            remedy="send bulk data as array frames",
        )
    # A small body holds few of them whatever it says.
    count = _ContainerCount() if len(frame) > SMALL_BODY_BYTES else None
    try:
        value = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_STRING,
            max_bin_len=MAX_STRING,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
            list_hook=count,
            object_hook=count,
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(
            f"the body is not msgpack within limits ({type(error).__name__})", limit="see the limits in rollout/README.md"
        ) from None
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], dict) and isinstance(value[1], list)):
        raise WireError("the body is not [fields, array descriptors]", remedy="see the protocol in rollout/README.md")
    # Descriptors are looked at one by one: what is nested in them is none.
    if _depth_over(value[0], MAX_DEPTH - 1):
        raise WireError("the body is nested too deeply", limit=f"at most {MAX_DEPTH} levels")
    if not all(isinstance(key, str) for key in value[0]):
        raise WireError("a field name is not a string", remedy="see the protocol in rollout/README.md")
    return value[0], value[1]


def _is_count(dim: object) -> bool:
    return type(dim) is int and 0 <= dim < 2**40


def _array(descriptor: object, frame: bytes, specs: Mapping[str, ArraySpec], op: Op) -> tuple[str, np.ndarray]:
    if not (isinstance(descriptor, list) and len(descriptor) == 3 and isinstance(descriptor[0], str) and isinstance(descriptor[2], list)):
        raise WireError("an array descriptor is not [name, dtype, shape]", remedy="see the protocol in rollout/README.md")
    name, dtype, shape = descriptor
    spec = specs.get(name)
    if spec is None:
        raise WireError(
            f"{op.name} has no array {name[:80]!r}",
            field=name[:80],
            limit=f"known arrays: {', '.join(specs) or 'none'}",
            remedy="leave it out",
        )
    if dtype not in spec.dtypes:
        raise WireError(
            f"array {name} has dtype {str(dtype)[:16]!r}", field=name, limit=f"allowed: {', '.join(spec.dtypes)}", remedy="convert it first"
        )
    if len(shape) != 1 + len(spec.row) or not _is_count(shape[0]) or not all(map(_is_count, shape[1:])) or tuple(shape[1:]) != spec.row:
        raise WireError(
            f"array {name} has shape {str(shape)[:80]}", field=name, limit=f"it is [n{''.join(f', {dim}' for dim in spec.row)}]"
        )
    if shape[0] > spec.most:
        raise WireError(
            f"array {name} has {shape[0]} entries", field=name, value=shape[0], limit=f"at most {spec.most}", remedy=f"shorten {name}"
        )
    expected = shape[0] * spec.row_entries * _ITEM_BYTES[dtype]
    if len(frame) != expected:
        raise WireError(
            f"array {name} has {len(frame)} bytes", field=name, limit=f"its dtype and shape make {expected}", remedy="send whole arrays"
        )
    array = np.frombuffer(frame, dtype=dtype)
    return name, array.reshape(shape) if spec.row else array


def _arrays(descriptors: Sequence[object], frames: Sequence[bytes], op: Op) -> dict[str, np.ndarray]:
    if len(descriptors) != len(frames):
        raise WireError(f"{len(descriptors)} array descriptors and {len(frames)} array frames", limit="one frame for each descriptor")
    specs = ARRAYS.get(op, {})
    arrays: dict[str, np.ndarray] = {}
    for descriptor, frame in zip(descriptors, frames):
        name, array = _array(descriptor, frame, specs, op)
        if name in arrays:
            raise WireError(f"array {name} comes twice", field=name, remedy="send each array once")
        arrays[name] = array
    if not arrays.keys() >= _REQUIRED.get(op, _NOTHING):
        missing = [name for name, spec in specs.items() if spec.required and name not in arrays]
        raise WireError(f"{op.name} lacks array {missing[0]}", field=missing[0], limit=f"needed: {', '.join(missing)}")
    return arrays


def decode(frames: Sequence[bytes], allowed: Collection[Op]) -> Packet:
    """Return the checked message of these frames.

    Raises: ProtocolMismatch, UnknownOperation, WireError for bytes that are no message of this socket;
    InvalidRequest for a message whose fields are unknown, of the wrong type, or out of their domain.
    """
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"a message of {len(frames)} frames", limit=f"2 to {MAX_FRAMES}", remedy="see the protocol in rollout/README.md")
    header = read_header(frames[0])
    if header.version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"protocol version {header.version}",
            field="version",
            value=header.version,
            limit=f"this side speaks version {PROTOCOL_VERSION}",
            remedy="install the same areno-rollout version on both sides",
        )
    op = _OPS.get(header.op)
    if op is None or op not in allowed:
        raise UnknownOperation(
            f"operation {header.op} is not taken here",
            field="operation",
            value=header.op,
            limit=f"known: {', '.join(f'{known.name}={known.value}' for known in sorted(allowed))}",
            remedy="weight and pause operations go to the control socket, all others to the data socket",
        )
    fields, descriptors = _unpack(frames[1], op)
    arrays = _arrays(descriptors, frames[2:], op)
    body = parse_fields(MODELS[op], fields)
    return Packet(op=op, request_id=header.request_id, body=body, arrays=arrays, num_bytes=sum(map(len, frames)))
