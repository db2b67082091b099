"""Hostile messages: golden ones with something wrong, drawn from a seed. Some come out right by chance.

Three ways, mixed: bytes (flipped, cut, doubled, strange ones put in), frames (left out, doubled, exchanged, of another message),
and meaning (a value, a field or an array descriptor replaced by one that a parser may trip over).
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from rollout.wire.codec import HEADER, MAX_FRAMES
from rollout.wire.operations import Op
from tests.contract.golden_frames import GOLDEN, Golden, frames_of

STRANGE_BYTES = [
    b"", b"\0", b"\xff" * 20, b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 600,
    b"\x81\xa1x" * 300, b"\xc7\x01\x00\x00", b"\xd4\xff\x00", b"\x80\x04\x95", b"cposix\nsystem\n(S'true'\ntR.", b"\x93NUMPY\x01\x00",
    b"{{ ''.__class__ }}", b"\xe3" + bytes(8),
]  # fmt: skip
STRANGE_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308, 5e-324, float("nan"), float("inf"), "", "x" * 5000,
    "\0", "../../x", "{{7*7}}", b"", b"\xff" * 17, b"\0" * 16, [], {}, [[]], {"a": {}}, [None] * 50, list(range(300)), "keep", "stop",
]  # fmt: skip


class Mutator:
    """Draws messages; the same seed gives the same ones."""

    def __init__(self, seed: int, golden: Sequence[Golden] = GOLDEN) -> None:
        self._draw = random.Random(seed)
        self._golden = [frames_of(one) for one in golden]

    def messages(self, count: int) -> Iterator[list[bytes]]:
        """Return so many messages."""
        for _ in range(count):
            frames = list(self._draw.choice(self._golden))
            for _ in range(self._draw.choice([1, 1, 1, 2, 4])):
                frames = self._draw.choice([self._bytes, self._bytes, self._frames, self._meaning, self._meaning])(frames)
            yield frames or [b""]

    def _bytes(self, frames: list[bytes]) -> list[bytes]:
        if not frames:
            return frames
        place = self._draw.randrange(len(frames))
        data = bytearray(frames[place])
        at = self._draw.randrange(len(data) + 1)
        how = self._draw.randrange(5)
        if how == 0 and data:
            data[min(at, len(data) - 1)] = self._draw.randrange(256)
        elif how == 1:
            del data[at : at + self._draw.randrange(1, 9)]
        elif how == 2:
            data[at:at] = self._draw.choice(STRANGE_BYTES)
        elif how == 3:
            data[at:at] = data[at : at + self._draw.randrange(1, 200)]
        elif data:
            data[min(at, len(data) - 1)] ^= 1 << self._draw.randrange(8)
        return [*frames[:place], bytes(data), *frames[place + 1 :]]

    def _frames(self, frames: list[bytes]) -> list[bytes]:
        how = self._draw.randrange(5)
        place = self._draw.randrange(len(frames) + 1)
        if how == 0:
            return frames[:place] + frames[place + 1 :]
        if how == 1:
            return [*frames[:place], self._draw.choice(STRANGE_BYTES), *frames[place:]]
        if how == 2:
            return self._draw.sample(frames, len(frames))
        if how == 3:
            return frames[:1] + list(self._draw.choice(self._golden))[1:]
        return (frames * MAX_FRAMES)[: self._draw.randrange(MAX_FRAMES + 4)]

    def _meaning(self, frames: list[bytes]) -> list[bytes]:
        if len(frames) < 2 or len(frames[0]) != HEADER.size:
            return frames
        if self._draw.random() < 0.2:
            return [self._header(frames[0]), *frames[1:]]
        try:
            fields, descriptors = msgpack.unpackb(frames[1])
        except (ValueError, TypeError, msgpack.UnpackException):
            return frames
        if self._draw.random() < 0.75:
            fields = self._replaced(fields)
        else:
            descriptors = self._replaced(descriptors)
        try:
            return [frames[0], msgpack.packb([fields, descriptors]), *frames[2:]]
        except (ValueError, OverflowError):
            return frames

    def _header(self, header: bytes) -> bytes:
        version, op, request_id = HEADER.unpack(header)
        how = self._draw.randrange(3)
        if how == 0:
            version = self._draw.choice([0, 2, 255, 256, 65535])
        elif how == 1:
            op = self._draw.choice([self._draw.randrange(65536), *(one.value for one in Op)])
        else:
            request_id = self._draw.choice([bytes(16), b"\xff" * 16, self._draw.randbytes(16)])
        return struct.pack("<HH16s", version, op, request_id)

    def _replaced(self, value: Any) -> Any:
        """Return a value with something in it replaced, added or left out."""
        if isinstance(value, dict) and (value or self._draw.random() < 0.5):
            changed = dict(value)
            key = self._draw.choice([*changed, "bogus"])
            if key in changed and self._draw.random() < 0.3:
                del changed[key]
            else:
                changed[key] = self._replaced(changed.get(key))
            return changed
        if isinstance(value, list) and value:
            place = self._draw.randrange(len(value))
            return [*value[:place], self._replaced(value[place]), *value[place + 1 :]]
        return self._draw.choice(STRANGE_VALUES)
