"""Buckets whose bytes came in the message itself, for trainers that share neither memory nor disk with the service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from rollout.service.weight_intake.files import HASH_PIECE_BYTES
from rollout.service.weight_intake.pieces import HOST_SLICE_BYTES, ITEM_BYTES, HostBounce, Pace, Steps, bytes_of, refused
from rollout.wire.weight_handles import TensorPiece, WeightsStageBucket

if TYPE_CHECKING:
    import torch


class FramesSource:
    """One bucket in a message; its XXH3 is checked before anything is taken. Raises: BucketRefused."""

    slice_bytes, stays, own = HOST_SLICE_BYTES, False, False

    def __init__(self, body: WeightsStageBucket, content: np.ndarray | None, bounce: HostBounce) -> None:
        if content is None:
            raise refused(
                body.bucket, "it has no content", "its bytes come with the message", "send them as the array content, empty or not"
            )
        if content.nbytes != body.size:
            raise refused(body.bucket, f"{content.nbytes} bytes came", f"{body.size} were announced")
        if body.xxh3 is None:
            raise refused(body.bucket, "it has no XXH3", "bytes in a message need one", "send the XXH3-64 of the bucket's bytes")
        self._bucket, self._content, self._xxh3, self._bounce = body.bucket, content, body.xxh3, bounce

    def prepare(self) -> Steps:
        """Check the hash. Raises: BucketRefused."""
        digest = xxhash.xxh3_64()
        for at in range(0, self._content.nbytes, HASH_PIECE_BYTES):
            digest.update(self._content[at : at + HASH_PIECE_BYTES].data)
            yield Pace.GO_ON
        if digest.hexdigest() != self._xxh3:
            raise refused(self._bucket, f"its XXH3 is {digest.hexdigest()}", f"{self._xxh3} was announced")

    def values(self, piece: TensorPiece, first: int, count: int, into: torch.Tensor | None) -> torch.Tensor:
        """Return elements of a piece, in `into` or the bounce buffer."""
        item = ITEM_BYTES[piece.dtype]
        at = piece.offset + first * item
        values = self._bounce.elements(piece.dtype, count) if into is None else into
        bytes_of(values)[:] = self._content[at : at + count * item].data
        return values

    def finish(self) -> None:
        """Nothing is left to check."""

    def close(self) -> None:
        """The message's memory goes with this object."""
