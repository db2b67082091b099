"""The weights' way through the control socket: buckets as array frames, for a service that shares neither memory nor disk.

Credit is the number of buckets that are not answered yet; a bucket is small beside the service's message limit and has an
XXH3 of its own. Invariant: the bytes of a bucket are not touched until it is answered, since a lost connection sends it again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import xxhash

from trainer_bridge.weights.bucket import PackedBucket, pack
from trainer_bridge.weights.transport import Bucket, BucketClient, SentCall, reached

DEFAULT_BUCKET_BYTES = 8 * 2**20
CREDITS = 4
# Of a message's limit; the rest is for the announcement of its pieces.
SHARE_OF_MESSAGE = 2


class FramesTransport:
    """A few buckets under way at a time; see the module."""

    name = "frames"

    def __init__(self, client: BucketClient, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, timeout_s: float = 120.0) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._wanted_bytes = self.bucket_bytes = max(bucket_bytes, 4096)
        self.reason = "asked for"
        self._under_way: deque[SentCall] = deque()
        self._update_id = ""
        self._next = 0

    def open(self, info: Any, update_id: str) -> None:
        """Ask the service for its message limit and send an empty bucket. Raises: TransportUnusable."""
        self.bucket_bytes = min(self._wanted_bytes, info.max_message_bytes // SHARE_OF_MESSAGE)
        self._update_id, self._next = update_id, 0
        self._under_way.clear()
        reached("frames", self._probe, "update the service, or choose another transport")

    def _probe(self) -> None:
        self._post(PackedBucket((), 0))
        self.close()

    def send(self, bucket: Bucket) -> None:
        """Send copies of tensors. Blocks: while the credit is used up."""
        for packed in pack(bucket, self.bucket_bytes):
            while len(self._under_way) >= CREDITS:
                self._under_way.popleft().result(self._timeout_s)
            self._post(packed)

    def _post(self, packed: PackedBucket) -> None:
        content = np.zeros(packed.size, np.uint8)
        packed.write(torch.from_numpy(content))
        call = self._client.weights_stage_bucket(
            self._update_id,
            self._next,
            size=packed.size,
            pieces=packed.fields(),
            handle={"kind": "frames"},
            xxh3=xxhash.xxh3_64_hexdigest(content.data),
            content=content,
        )
        self._under_way.append(call)
        self._next += 1

    def close(self) -> None:
        """Wait until everything is staged. Blocks: at most the time-out for each bucket under way."""
        while self._under_way:
            self._under_way.popleft().result(self._timeout_s)

    def abort(self) -> None:
        """Forget what is under way; its answers find nobody."""
        self._under_way.clear()
