"""Broadcasts that a device receives, without a device: streams, events and the group are fakes that do what the test lets them."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.errors import ManifestMismatch
from areno.interprocess import DriverFailure, ExportedMemory
from areno.weights.slices import DeviceRun
from rollout.errors import BucketRefused, NoUpdate, TransportUnavailable
from rollout.service.weight_intake import StagedFile, WeightIntake
from rollout.service.weight_intake.device_group import BUFFERS, DeviceReceiver
from rollout.service.weight_intake.pieces import Pace
from rollout.wire.messages import parse_fields
from rollout.wire.weight_handles import WeightsStageBucket
from tests.bucket_pieces import columns
from tests.fakes import TENSORS, FakeEngine

NONE = np.empty(0, np.int64)
NO_CANARIES = (NONE, NONE, np.empty(0, np.float32), [])
NAME = b"0123456789abcdef"
HERE = torch.device("cpu")
TENSOR_BYTES = 128


class Group:
    """The trainer's group: broadcasts complete in order, when the trainer sends; `end` lets those under way end without bytes."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.sent = 0
        self.ended, self.aborted = threading.Event(), threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert not self.aborted.is_set(), "a group that was left receives nothing"
        assert options.rootRank == 0
        self.targets += tensors

    def send(self, content: np.ndarray) -> None:
        """Bring the next broadcast, into whatever was launched for it."""
        target = self.targets[self.sent]
        assert target.numel() == content.size, "both sides mean the same bucket"
        target.copy_(torch.from_numpy(content))
        self.sent += 1

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    group = Group()

    class Event:
        number = 0

        def record(self) -> None:
            self.number = len(group.targets)

        def query(self) -> bool:
            return group.sent >= self.number

    class Stream:
        def __init__(self, device: Any) -> None: ...

        def synchronize(self) -> None:
            assert group.ended.wait(30.0)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    yield group
    group.ended.set()
    for thread in threading.enumerate():
        if thread.name == "weight-group":
            thread.join(30.0)
            assert not thread.is_alive()


def announced(number: int, size: int, group: bytes | None = None) -> WeightsStageBucket:
    """A bucket of so many bytes whose last ones are a tensor's."""
    piece = {"name": "first.weight", "dtype": "float32", "shape": [4, 8], "start": 0, "count": 32, "offset": size - TENSOR_BYTES}
    fields = {
        "update_id": "u",
        "bucket": number,
        "size": size,
        "pieces": columns([piece] if size else []),
    }
    body = parse_fields(WeightsStageBucket, {**fields, "handle": {"kind": "group", "group": group}})
    assert isinstance(body, WeightsStageBucket)
    return body


def content_of(number: int, size: int) -> np.ndarray:
    values = np.full(size // 4, -1.0, np.float32)
    values[-TENSOR_BYTES // 4 :] = number
    return values.view(np.uint8)


class LateEngine(FakeEngine):
    """An engine whose device reads what it is handed only when the test lets it, in order. `read` holds what it found."""

    def __init__(self) -> None:
        super().__init__(model="x")
        self._handed: list[Any] = []
        self._launches: deque[tuple[int, list[Any]]] = deque()
        self._launched = 0
        self.read: list[float] = []

    def stage_slices(self, slices: Any) -> None:
        for one in slices:
            if one.name not in TENSORS:
                raise ManifestMismatch(f"tensor {one.name}", field=one.name, remedy="bring the model's tensors")
        self._handed += slices

    def launch_slices(self) -> Any:
        self._launched += 1
        self._launches.append((self._launched, self._handed))
        self._handed = []
        return self._launched

    def slices_copied(self, launched: Any) -> bool:
        return not any(number <= launched for number, _ in self._launches)

    def copy_one(self) -> None:
        if self._launches:
            for one in self._launches.popleft()[1]:
                assert one.values.size == 32 if isinstance(one.values, DeviceRun) else one.values.numel() == 32
                [value] = set(one.tensor.tolist())
                self.read.append(value)

    def settle_slices(self) -> None:
        self.launch_slices()
        while self._launches:
            self.copy_one()


class Link:
    """A group that was joined."""

    def __init__(self, receiver: DeviceReceiver, name: bytes | None) -> None:
        self.source, self.close, self.rest, self.name = receiver.source, receiver.close, receiver.rest, name


def joined(folder: Path, group: Group, *, timeout_s: float = 30.0, name: bytes | None = None) -> tuple[LateEngine, WeightIntake]:
    engine = LateEngine()
    intake = WeightIntake(engine, folder)
    intake.begin("u", 1, None, partial=False)
    intake._group = Link(DeviceReceiver(group, [HERE], engine.open_memory, timeout_s), name)  # type: ignore[assignment]
    return engine, intake


def stage(intake: WeightIntake, number: int, size: int = TENSOR_BYTES, group: bytes | None = None) -> None:
    intake.stage_bucket(number.to_bytes(2, "little"), announced(number, size, group), None)


def commit(engine: LateEngine, intake: WeightIntake) -> None:
    for name, (_, shape) in TENSORS.items():
        engine.stage(name, torch.zeros(shape))
    intake.commit("u", None, *NO_CANARIES)


def finish(engine: LateEngine, intake: WeightIntake) -> StagedFile:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        engine.copy_one()
        end = intake.advance()
        if end is not None:
            return end
        if intake.waits:
            time.sleep(0.001)
    raise AssertionError("staging never ends")


@pytest.mark.parametrize("seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(30, 500))])
def test_every_bucket_is_read_as_it_was_sent_however_broadcasts_copies_and_announcements_follow_each_other(
    seed: int, tmp_path: Path, group: Group
) -> None:
    draw = random.Random(seed)
    engine, intake = joined(tmp_path, group)
    sizes, answered, sent = [], 0, 0
    while answered < 40:
        what = draw.choice(["announce", "again", "send", "copy", "advance", "advance"])
        if what == "announce" and len(sizes) - answered < BUFFERS and len(sizes) < 40:
            sizes.append(draw.choice([TENSOR_BYTES, 256, 1000 * 4, 70 * 2**12, 2**20 if draw.random() < 0.2 else 512]))
            stage(intake, len(sizes) - 1, sizes[-1])
        elif what == "again" and answered < len(sizes):
            # Sent again because its trainer lost the answer; the broadcast comes once.
            number = draw.randrange(len(sizes))
            intake.stage_bucket(b"again", announced(number, sizes[number]), None)
        elif what == "send" and sent < len(sizes):
            group.send(content_of(sent, sizes[sent]))
            sent += 1
        elif what == "copy":
            engine.copy_one()
        elif what == "advance":
            end = intake.advance()
            if end is not None and end.call_id != b"again":
                assert end == StagedFile(answered.to_bytes(2, "little"), None)
                answered += 1
            assert not end or end.error is None
    assert engine.read == list(range(40)) and len(group.targets) == 40
    intake.abort("u")


def test_a_bucket_more_than_there_are_buffers_is_refused_by_name_and_the_others_come(tmp_path: Path, group: Group) -> None:
    engine, intake = joined(tmp_path, group)
    for number in range(BUFFERS):
        stage(intake, number)
    with pytest.raises(BucketRefused, match=f"bucket {BUFFERS} is refused: {BUFFERS} others are not staged yet") as refused:
        stage(intake, BUFFERS)
    assert refused.value.remedy == "wait for answers before more is sent" and len(group.targets) == BUFFERS
    for number in range(BUFFERS):
        group.send(content_of(number, TENSOR_BYTES))
    assert [finish(engine, intake).error for _ in range(BUFFERS)] == [None] * BUFFERS
    stage(intake, BUFFERS)
    group.send(content_of(BUFFERS, TENSOR_BYTES))
    assert finish(engine, intake).error is None and engine.read == list(range(BUFFERS + 1))
    stage(intake, BUFFERS + 1, 0)
    assert finish(engine, intake).error is None, "an empty bucket needs no broadcast"
    assert len(group.targets) == BUFFERS + 1


def test_buffers_grow_with_the_buckets_and_none_that_is_in_use_is_given_up(tmp_path: Path, group: Group) -> None:
    engine, intake = joined(tmp_path, group)
    stage(intake, 0)
    stage(intake, 1, 4096)
    stage(intake, 2, 8192)
    assert [target.numel() for target in group.targets] == [TENSOR_BYTES, 4096, 8192]
    for number, size in enumerate((TENSOR_BYTES, 4096, 8192)):
        group.send(content_of(number, size))
    assert [finish(engine, intake).error for _ in range(3)] == [None] * 3 and engine.read == [0, 1, 2]
    storages = {target.untyped_storage().data_ptr() for target in group.targets}
    for number in range(3, 6):
        stage(intake, number, 100 * 4)
        group.send(content_of(number, 100 * 4))
        assert finish(engine, intake).error is None
    assert {target.untyped_storage().data_ptr() for target in group.targets[4:]} <= storages, "what is large enough is used again"


def test_a_broadcast_that_never_comes_is_refused_in_time_and_others_go_on_meanwhile(tmp_path: Path, group: Group) -> None:
    engine, intake = joined(tmp_path, group, timeout_s=0.3)
    started = time.monotonic()
    stage(intake, 0)
    stage(intake, 1)
    waited = 0
    while (end := intake.advance()) is None:
        waited += intake.waits
        time.sleep(0.002)
        assert time.monotonic() - started < 5.0
    assert (
        isinstance(end.error, BucketRefused) and "nothing within 0.3 s" in str(end.error) and "begin a new update" in str(end.error.remedy)
    )
    assert 0.3 <= time.monotonic() - started < 2.0 and waited, "after a while there is nothing to do but wait"
    assert isinstance(finish(engine, intake).error, BucketRefused)
    intake.abort("u")
    assert not intake.busy and group.aborted.wait(10.0)


def test_memory_that_broadcasts_may_still_write_is_kept_until_the_group_has_ended(tmp_path: Path, group: Group) -> None:
    _, intake = joined(tmp_path, group)
    for number in range(2):
        stage(intake, number)
    assert intake.advance() is None
    held = [buffer.memory for buffer in intake._group.source.__self__._buffers]  # type: ignore[union-attr]
    kept = [weakref.ref(one) for one in held if one is not None]
    del held
    intake.abort("u")
    assert {type(end.error) for _ in range(2) if (end := intake.advance()) is not None} == {NoUpdate}
    group.targets.clear()
    assert group.aborted.wait(10.0)
    gc.collect()
    assert kept and all(one() is not None for one in kept), "the device may still write there"
    group.ended.set()
    deadline = time.monotonic() + 10.0
    while any(one() is not None for one in kept) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(one() is not None for one in kept)
    intake.begin("u", 2, None, partial=False)
    assert intake.busy is False


def refuse(_: Any) -> Any:
    raise DriverFailure("cuIpcGetMemHandle failed")


@pytest.mark.parametrize(
    ("peers", "export", "in_place"),
    [
        (True, lambda memory: ExportedMemory(memory.data_ptr() - 64, memory, b"h" * 64), True),
        (True, refuse, False),
        (False, refuse, False),
    ],
)
def test_ranks_that_cannot_open_the_buffers_are_sent_tensors(
    peers: bool, export: Any, in_place: bool, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: peers)
    monkeypatch.setattr("areno.interprocess.export_memory", export)
    told: list[bytes] = []
    receiver = DeviceReceiver(group, [HERE, HERE], told.append, 30.0)
    body = announced(0, 4096)
    source = receiver.source(body)
    assert next(source.prepare()) is Pace.COPIES
    group.send(content_of(7, 4096))
    assert not list(source.prepare())
    values = source.values(body.pieces.rows[0], 8, 16, None)
    if in_place:
        assert isinstance(values, DeviceRun) and (values.offset, values.size) == (64 + 4096 - TENSOR_BYTES + 32, 16)
        assert told == [b"h" * 64] * BUFFERS and values.handle == told[0], "every buffer's handle is told before one is used"
    else:
        assert isinstance(values, torch.Tensor) and values.tolist() == [7.0] * 16 and not told
    source.finish()
    receiver.close()


def test_a_device_without_memory_refuses_the_bucket_and_takes_smaller_ones(
    tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, intake = joined(tmp_path, group)
    empty, free = torch.empty, 2

    def scarce(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal free
        if arguments[0] > 1024:
            if not free:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate.\nmore")
            free -= 1
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", scarce)
    with pytest.raises(BucketRefused, match="no memory to receive it") as refused:
        stage(intake, 0, 2048)
    assert "bucket_bytes" in str(refused.value.remedy) and not group.targets and not intake.busy
    for number in range(BUFFERS + 1):
        stage(intake, number)
        group.send(content_of(number, TENSOR_BYTES))
        assert finish(engine, intake).error is None


def test_a_group_serves_the_next_update_where_every_bucket_of_this_one_was_staged(tmp_path: Path, group: Group) -> None:
    engine, intake = joined(tmp_path, group, name=NAME)
    for update in (1, 2, 3):
        for number in range(BUFFERS + 2):
            stage(intake, number, group=NAME)
            group.send(content_of(10 * update + number, TENSOR_BYTES))
            assert finish(engine, intake).error is None
        commit(engine, intake)
        assert engine.read == [10 * update + number for number in range(BUFFERS + 2)] and not group.aborted.is_set()
        engine.read.clear()
        intake.begin("u", update + 1, None, partial=False)
    with pytest.raises(TransportUnavailable, match="none is kept by this name"):
        stage(intake, 0, group=b"another trainer.")


def never_sent(intake: WeightIntake, group: Group) -> None:
    """A broadcast that does not come in time."""
    stage(intake, 0, group=NAME)


def unknown_tensor(intake: WeightIntake, group: Group) -> None:
    body = announced(0, TENSOR_BYTES, NAME)
    body.pieces.rows[0] = body.pieces.rows[0]._replace(name="bogus")
    intake.stage_bucket(b"0", body, None)
    group.send(content_of(0, TENSOR_BYTES))


def refused_at_once(intake: WeightIntake, group: Group) -> None:
    """Its trainer broadcasts it before it hears that nobody takes it."""
    body = announced(0, TENSOR_BYTES, NAME)
    body.pieces.rows[0] = body.pieces.rows[0]._replace(start=8)
    with pytest.raises(BucketRefused):
        intake.stage_bucket(b"0", body, None)


@pytest.mark.parametrize("fail", [never_sent, unknown_tensor, refused_at_once])
def test_a_group_of_which_a_bucket_was_refused_is_left_with_its_update_though_that_is_published(
    fail: Any, tmp_path: Path, group: Group
) -> None:
    engine, intake = joined(tmp_path, group, timeout_s=0.1, name=NAME)
    stage(intake, 1, group=NAME)
    group.send(content_of(1, TENSOR_BYTES))
    assert finish(engine, intake).error is None
    fail(intake, group)
    while intake.busy:
        finish(engine, intake)
    commit(engine, intake)
    assert engine.version == 1 and group.aborted.wait(10.0), "what its trainer sent, or never did, is not to meet the next update's buckets"
    intake.begin("u", 2, None, partial=False)
    with pytest.raises(TransportUnavailable, match="none is kept by this name"):
        stage(intake, 0, group=NAME)
