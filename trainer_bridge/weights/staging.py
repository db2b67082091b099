"""The tensors of a push on their way into a transport: gathered, cast, checked, fingerprinted, in buckets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from areno.weights.digest import digest
from trainer_bridge.weights.names import serving_tensors
from trainer_bridge.weights.transport import Transport


@dataclass(slots=True)
class Sent:
    """What went out in one push so far: the digest of every tensor, the bytes, and where the time went."""

    digests: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    prepare_s: float = 0.0
    staging_s: float = 0.0


def stage_all(transport: Transport, tensors: Iterable[tuple[str, torch.Tensor]], sent: Sent, *, dtype: torch.dtype) -> None:
    """Send every tensor as the service stores it. Blocks: until all are staged. Mutates: `sent`. Raises: PushError and its kind."""
    last = time.monotonic()
    serving = serving_tensors(tensors, dtype=dtype)
    for bucket in in_buckets(_with_digests(serving, sent.digests), transport.bucket_bytes):
        sent.num_bytes += sum(tensor.nbytes for tensor in bucket.values())
        ready = time.monotonic()
        transport.send(bucket)
        sent.prepare_s += ready - last
        last = time.monotonic()
        sent.staging_s += last - ready
    transport.close()
    sent.staging_s += time.monotonic() - last


def _with_digests(tensors: Iterable[tuple[str, torch.Tensor]], digests: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        digests[name] = digest(tensor)
        yield name, tensor


def in_buckets(tensors: Iterable[tuple[str, torch.Tensor]], most_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tensors in buckets of at most `most_bytes`; a larger one is a bucket of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket
