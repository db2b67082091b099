"""Transports on the trainer's side: packing, segments, credit, and the choice among them."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from rollout.errors import BucketRefused, TransportUnavailable
from tests.unit.trainer_bridge.fakes import FakeWeightService, TinyNet
from trainer_bridge.errors import InvalidOption, TransportUnusable
from trainer_bridge.weights import memory
from trainer_bridge.weights.bucket import ALIGNMENT, pack
from trainer_bridge.weights.frames import CREDITS, FramesTransport
from trainer_bridge.weights.memory import (
    SHARED_FOLDER,
    SharedMemoryTransport,
    file_segment,
    remove_segments_of_the_dead,
    sealed_segment,
    start_time,
)
from trainer_bridge.weights.push import WeightPush
from trainer_bridge.weights.transport import make_transport

INFO = SimpleNamespace(
    max_message_bytes=2**20, engine=SimpleNamespace(num_parameters=10_000, dtype="float32", device="cpu"), weights_dir="/nowhere"
)


class Call:
    """A call that ends when it is waited for."""

    def __init__(self, service: BucketTaker, error: Exception | None) -> None:
        self._service, self._error = service, error

    def result(self, timeout_s: float | None = None) -> None:
        if self in self._service.open:
            self._service.open.remove(self)
        if self._error is not None:
            raise self._error


class BucketTaker:
    """A service that reads buckets when they are announced, and keeps what it read."""

    def __init__(self, refuse: Callable[[int], Exception | None] = lambda bucket: None) -> None:
        self.refuse = refuse
        self.open: list[Call] = []
        self.most_open = 0
        self.buckets: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def weights_stage_bucket(self, update_id: str, bucket: int, **fields: Any) -> Call:
        self.buckets.append(bucket)
        error = self.refuse(bucket)
        if error is None:
            self._read(bucket, **fields)
        call = Call(self, error)
        self.open.append(call)
        self.most_open = max(self.most_open, len(self.open))
        return call

    def _read(self, bucket: int, *, size: int, pieces: Any, handle: Any, xxh3: str | None = None, content: Any = None) -> None:
        if handle["kind"] in ("shared", "memfd"):
            sealed = handle["kind"] == "memfd"
            path = f"/proc/{handle['process']}/fd/{handle['descriptor']}" if sealed else SHARED_FOLDER / handle["segment"]
            whole = Path(path).read_bytes()
            magic, number, nonce = memory.HEAD.unpack(whole[: memory.HEAD.size])
            assert (magic, number, nonce) == (memory.MAGIC, bucket, handle["nonce"])
            data = whole[memory.HEAD_BYTES :][:size]
        else:
            data = bytes(content)
            assert xxh3 == xxhash.xxh3_64_hexdigest(data)
        named = [pieces[column] for column in ("names", "dtypes", "shapes", "starts", "counts", "offsets")]
        for name, dtype, shape, start, count, offset in zip(*named, strict=True):
            values = np.frombuffer(data, np.dtype(dtype), count, offset)
            target = self.tensors.setdefault(name, torch.full(shape, torch.nan))
            target.reshape(-1)[start : start + count] = torch.from_numpy(values.copy())


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        f"t{index}": torch.randn(shape, generator=generator) for index, shape in enumerate([(3,), (40, 50), (), (7, 11), (5000,), (2, 2)])
    }


@pytest.mark.parametrize("capacity", [64, 100, 4096, 10_000, 10**6])
def test_packing_covers_every_element_once_within_the_capacity_and_aligned(capacity: int) -> None:
    given = tensors()
    found: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name in given}
    for bucket in pack(given, capacity):
        assert 0 < bucket.size <= capacity
        ends = 0
        for piece in bucket.pieces:
            assert piece.offset % ALIGNMENT == 0 and piece.offset >= ends
            ends = piece.offset + piece.values.nbytes
            found[piece.name].append((piece.start, piece.values))
        assert ends == bucket.size
    for name, tensor in given.items():
        assert torch.equal(torch.cat([values for _, values in found[name]]), tensor.reshape(-1)), name
        if tensor.nbytes <= capacity:
            assert len(found[name]) == 1, "what fits stays whole"
    assert [bucket.fields() for bucket in pack(given, capacity)] == [bucket.fields() for bucket in pack(given, capacity)]


@pytest.mark.parametrize("seed", range(40))
def test_buckets_of_any_tensors_hold_their_bytes_and_touch_none_beside(seed: int) -> None:
    draw = random.Random(seed)
    forms = [lambda one: one, lambda one: torch.stack([one, one], -1)[..., 0], lambda one: one.expand(2, *one.shape), lambda one: one.mT]
    given: dict[str, torch.Tensor] = {}
    for number in range(draw.randrange(8)):
        shape = [draw.choice([0, 1, 2, 7, 33]) for _ in range(draw.randrange(4))]
        values = torch.randn(shape).to(draw.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
        given[str(number)] = draw.choice(forms[: 4 if len(shape) > 1 else 3])(values).requires_grad_(draw.random() < 0.2)
    capacity = draw.choice([8, 64, 100, 4096, 10**6])
    found = {name: torch.empty(tensor.numel(), dtype=tensor.dtype) for name, tensor in given.items()}
    left = {name: tensor.numel() for name, tensor in given.items()}
    for bucket in pack(given, capacity):
        memory = torch.full((bucket.size + 8,), 0xAA, dtype=torch.uint8)
        bucket.write(memory)
        assert bucket.size <= capacity and (memory[bucket.size :] == 0xAA).all()
        for piece in bucket.pieces:
            written = memory[piece.offset : piece.offset + piece.values.nbytes].view(piece.values.dtype)
            found[piece.name][piece.start : piece.start + written.numel()] = written
            left[piece.name] -= written.numel()
    assert not any(left.values())
    assert all(torch.equal(found[name], tensor.detach().reshape(-1)) for name, tensor in given.items())


@pytest.mark.parametrize("make", [SharedMemoryTransport, FramesTransport])
@pytest.mark.parametrize("bucket_bytes", [4096, 10_000])
def test_every_tensor_arrives_and_the_buckets_are_numbered(make: Any, bucket_bytes: int) -> None:
    service, given = BucketTaker(), tensors()
    transport = make(service, bucket_bytes=bucket_bytes)
    for _ in range(2):
        service.buckets.clear()
        transport.open(INFO, "u")
        for name, tensor in given.items():
            transport.send({name: tensor})
            tensor.data = tensor.clone()
        transport.close()
        assert service.buckets == list(range(len(service.buckets))) and len(service.buckets) > 4
        assert not service.open
        assert service.tensors.keys() == given.keys() and all(torch.equal(service.tensors[name], given[name]) for name in given)
    assert service.most_open == (2 if make is SharedMemoryTransport else CREDITS)
    transport.abort()


def test_what_the_service_says_of_a_bucket_is_raised(make: Any = SharedMemoryTransport) -> None:
    error = BucketRefused("bucket 2 is refused")
    service = BucketTaker(lambda bucket: error if bucket == 2 else None)
    for transport in (SharedMemoryTransport(service, bucket_bytes=4096), FramesTransport(service, bucket_bytes=4096)):
        transport.open(INFO, "u")
        with pytest.raises(BucketRefused, match="bucket 2"):
            transport.send(tensors())
            transport.close()
        transport.abort()


def segments() -> set[str]:
    return {path.name for path in SHARED_FOLDER.glob(f"{memory.PREFIX}{os.getpid()}-*")}


def memory_files() -> set[int]:
    """Every sealed segment that this process holds open, by its inode."""
    gc.collect()
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and "memfd:areno-push" in os.readlink(path)]
    return {path.stat().st_ino for path in links}


@pytest.mark.parametrize(("kind", "held"), [("memfd", memory_files), ("shared", segments)])
def test_segments_live_as_long_as_the_transport_and_go_with_an_abort(
    kind: str, held: Callable[[], set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "shared":
        monkeypatch.delattr(os, "memfd_create")
    before = held()
    transport = SharedMemoryTransport(BucketTaker())
    transport.open(INFO, "u")
    first = held() - before
    assert len(first) == 2 and (kind == "memfd" or all((SHARED_FOLDER / name).stat().st_mode & 0o777 == 0o600 for name in first))
    assert transport.bucket_bytes == 45_000, "no larger than the whole model"
    transport.close()
    transport.open(INFO, "v")
    assert held() - before == first
    transport.abort()
    assert held() == before
    transport.open(INFO, "w")
    assert len(held() - before) == 2
    del transport
    assert held() == before


def test_a_service_that_cannot_reach_sealed_memory_gets_files_and_the_report_says_so() -> None:
    class Elsewhere(BucketTaker):
        def _read(self, bucket: int, *, handle: Any, **fields: Any) -> None:
            if handle["kind"] == "memfd":
                raise TransportUnavailable("the descriptor leads nowhere")
            super()._read(bucket, handle=handle, **fields)

    service, before = Elsewhere(), memory_files()
    transport = SharedMemoryTransport(service, bucket_bytes=4096)
    transport.open(INFO, "u")
    assert transport.reason.startswith("asked for; by files in /dev/shm, not by sealed memory: the descriptor leads nowhere")
    assert memory_files() == before and len(segments()) >= 2
    transport.send(tensors())
    transport.close()
    assert all(torch.equal(service.tensors[name], value) for name, value in tensors().items())
    transport.abort()


def test_too_little_shared_memory_is_an_error_by_name_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportUnusable, match=r"4160 bytes are needed in .*No space left on device; enlarge .*--shm-size") as refused:
        file_segment("areno-push-1-1-00000000-0", 4096, tmp_path)
    assert refused.value.field == "transport" and list(tmp_path.iterdir()) == []
    before = memory_files()
    with pytest.raises(TransportUnusable, match="4160 bytes of sealed memory: No space left on device"):
        sealed_segment(4096)
    assert memory_files() == before


def test_only_segments_of_dead_trainers_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    pid, started = os.getpid(), start_time(os.getpid())
    assert started is not None and start_time(dead.pid) is None
    kept = [f"areno-push-{pid}-{started}-00000000-0", "areno-push-x", "other", f"areno-push-{dead.pid}-1-00000000-7"]
    gone = [f"areno-push-{dead.pid}-5-00000000-0", f"areno-push-{pid}-{started + 1}-00000000-1"]
    for name in (*kept, *gone):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / f"areno-push-{dead.pid}-6-00000000-0").symlink_to(tmp_path / "other")
    remove_segments_of_the_dead(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, f"areno-push-{dead.pid}-6-00000000-0"}


def test_auto_takes_the_first_that_works_and_says_why_not_the_others(tmp_path: Path) -> None:
    service, before = FakeWeightService(tmp_path), segments()
    report = WeightPush(service, TinyNet()).push()
    assert report.transport == "file"
    assert report.transport_reason.startswith("fastest that works; not cuda: the trainer's weights are on cpu")
    assert "; not memory: a dictionary has no memory of others" in report.transport_reason
    with pytest.raises(TransportUnusable, match=r"cuda: .* on cpu.*; memory: .*; file: .*; frames: .*; see what is said of each"):
        WeightPush(FakeWeightService(tmp_path / "gone"), TinyNet()).push()
    assert segments() <= before


def test_an_asked_transport_is_not_replaced_and_an_unknown_one_lists_the_known(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path)
    with pytest.raises(TransportUnusable, match="transport 'memory' cannot be used; a dictionary"):
        WeightPush(service, TinyNet(), transport="memory").push()
    assert service.calls == ["begin", "abort"]
    with pytest.raises(InvalidOption, match="known: auto, cuda, memory, file, frames, group"):
        WeightPush(service, TinyNet(), transport="nvlink")


def test_errors_that_say_nothing_of_the_transport_are_not_taken_for_its_fault() -> None:
    service = BucketTaker(lambda bucket: ConnectionError("the service is gone"))
    transport = make_transport("auto", service, bucket_bytes=None, timeout_s=1.0, device=torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ConnectionError, match="gone"):
        transport.open(INFO, "u")
    transport.abort()
    unavailable = BucketTaker(lambda bucket: TransportUnavailable("elsewhere"))
    with pytest.raises(TransportUnusable, match="transport 'frames'"):
        FramesTransport(unavailable).open(INFO, "u")  # type: ignore[arg-type]
