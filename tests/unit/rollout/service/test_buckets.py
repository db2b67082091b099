"""Buckets of weights at the engine's end: what is not as announced is refused, what comes again does no harm."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from areno.errors import ManifestMismatch
from rollout.errors import BucketRefused, InvalidRequest, NoUpdate, TransportUnavailable, WeightUpdateError
from rollout.service.weight_intake import StagedFile, WeightIntake
from rollout.wire.messages import parse_fields
from rollout.wire.weight_handles import WeightsStageBucket
from tests.bucket_pieces import columns
from tests.fakes import TENSORS, FakeEngine
from trainer_bridge.weights.memory import HEAD, MAGIC, PREFIX, SHARED_FOLDER, Segment, file_segment, sealed_segment, start_time

NONE = np.empty(0, np.int64)
NO_CANARIES = (NONE, NONE, np.empty(0, np.float32), [])
FIRST = {"name": "first.weight", "dtype": "float32", "shape": [4, 8], "start": 0, "count": 32, "offset": 0}
SECOND = {"name": "second.weight", "dtype": "float32", "shape": [8, 2], "start": 0, "count": 16, "offset": 128}
VALUES = np.arange(48, dtype=np.float32)
CONTENT = VALUES.view(np.uint8)


def filled(segment: Segment) -> Iterator[Segment]:
    segment.label(0)
    segment.memory[: CONTENT.size] = torch.from_numpy(CONTENT.copy())
    yield segment
    segment.remove()


@pytest.fixture
def in_file() -> Iterator[Segment]:
    yield from filled(file_segment(f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-{os.urandom(8).hex()}-0", 4096))


@pytest.fixture
def sealed() -> Iterator[Segment]:
    yield from filled(sealed_segment(4096))


@pytest.fixture(params=["in_file", "sealed"])
def segment(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def intake(tmp_path: Path) -> WeightIntake:
    intake = WeightIntake(FakeEngine(model="x"), tmp_path)
    intake.begin("u", 1, None, partial=False)
    return intake


def announced(handle: dict[str, Any], **changes: Any) -> WeightsStageBucket:
    fields = {"update_id": "u", "bucket": 0, "size": CONTENT.size, "pieces": [FIRST, SECOND], "handle": handle, **changes}
    fields["pieces"] = columns(fields["pieces"])
    body = parse_fields(WeightsStageBucket, fields)
    assert isinstance(body, WeightsStageBucket)
    return body


def open_files() -> int:
    # What earlier tests left as garbage is not to be closed between two counts.
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def in_frames(content: np.ndarray = CONTENT, **changes: Any) -> tuple[WeightsStageBucket, np.ndarray]:
    return announced({"kind": "frames"}, **{"xxh3": xxhash.xxh3_64_hexdigest(CONTENT), **changes}), content


def finish(intake: WeightIntake) -> StagedFile:
    for _ in range(1000):
        staged = intake.advance()
        if staged is not None:
            return staged
    raise AssertionError("staging never ends")


def staged(intake: WeightIntake, body: WeightsStageBucket, content: np.ndarray | None = None) -> Exception | None:
    intake.stage_bucket(b"c", body, content)
    return finish(intake).error


def weights(intake: WeightIntake) -> dict[str, list[float]]:
    intake.commit("u", None, *NO_CANARIES)
    return {name: tensor.reshape(-1).tolist() for name, tensor in intake._engine._weights.items()}  # type: ignore[attr-defined]


EXPECTED = {"first.weight": VALUES[:32].tolist(), "second.weight": VALUES[32:].tolist()}


def test_a_segment_is_taken_between_steps_and_given_back(intake: WeightIntake, segment: Segment) -> None:
    before = open_files()
    intake.stage_bucket(b"c", announced(segment.handle()), None)
    assert intake.busy and intake.advance() is None, "the first piece is not the end"
    assert finish(intake) == StagedFile(b"c", None)
    assert weights(intake) == EXPECTED
    assert open_files() == before


def test_bytes_in_a_message_are_taken_in_pieces_and_any_order(intake: WeightIntake) -> None:
    half = {**FIRST, "count": 16}, {**FIRST, "start": 16, "count": 16, "offset": 64}
    for number, pieces in ((5, [SECOND, half[1]]), (2, [half[0]])):
        assert staged(intake, *in_frames(bucket=number, pieces=pieces)) is None
    assert weights(intake) == EXPECTED


def test_a_bucket_that_comes_again_is_answered_at_once_whatever_its_segment_holds_by_now(intake: WeightIntake, segment: Segment) -> None:
    assert staged(intake, announced(segment.handle())) is None
    segment.label(2)
    segment.memory.fill_(255)
    assert staged(intake, announced(segment.handle())) is None
    assert weights(intake) == EXPECTED


def test_a_number_that_names_another_bucket_is_refused(intake: WeightIntake) -> None:
    assert staged(intake, *in_frames()) is None
    error = staged(intake, *in_frames(pieces=[FIRST]))
    assert isinstance(error, BucketRefused) and "staged with other tensors" in str(error) and error.remedy


def test_a_segment_that_was_filled_anew_is_refused(intake: WeightIntake, segment: Segment) -> None:
    segment.label(2)
    error = staged(intake, announced(segment.handle()))
    assert isinstance(error, BucketRefused) and "it holds bucket 2 now" in str(error)


def test_a_segment_that_is_filled_anew_during_the_copy_is_refused(intake: WeightIntake, segment: Segment) -> None:
    intake.stage_bucket(b"c", announced(segment.handle()), None)
    assert intake.advance() is None and intake.advance() is None
    segment.label(2)
    assert isinstance(finish(intake).error, BucketRefused)


def test_a_file_that_its_trainer_cuts_short_is_an_error_and_no_signal(intake: WeightIntake, in_file: Segment) -> None:
    path = SHARED_FOLDER / in_file.handle()["segment"]
    intake.stage_bucket(b"c", announced(in_file.handle()), None)
    assert intake.advance() is None
    os.truncate(path, 64 + 100)
    error = finish(intake).error
    assert isinstance(error, BucketRefused) and "it ended at byte 100" in str(error)
    os.truncate(path, 0)
    with pytest.raises(BucketRefused, match="192 bytes were announced"):
        intake.stage_bucket(b"c", announced(in_file.handle()), None)


def test_sealed_memory_is_mapped_once_in_an_update_and_cannot_be_cut_short(intake: WeightIntake, sealed: Segment) -> None:
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(sealed.handle()["descriptor"], size)

    inode = str(os.fstat(sealed.handle()["descriptor"]).st_ino)

    def mappings() -> int:
        # What earlier tests left as garbage goes when it pleases.
        return sum(inode in line.split() for line in Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    for number in (0, 1):
        sealed.label(number)
        assert staged(intake, announced(sealed.handle(), bucket=number)) is None
        assert mappings() == before + 1
    assert weights(intake) == EXPECTED
    assert mappings() == before
    with pytest.raises(NoUpdate):
        intake.stage_bucket(b"c", announced(sealed.handle()), None)
    intake.begin("u", 2, None, partial=False)
    sealed.label(0)
    with pytest.raises(BucketRefused, match="its segment has 4096"):
        intake.stage_bucket(b"c", announced(sealed.handle(), size=4097), None)


def open_memory(*, seals: int) -> int:
    """A descriptor of memory that holds what a segment would, with only these seals."""
    descriptor = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, HEAD.pack(MAGIC, 0, bytes(16)).ljust(64 + CONTENT.size, b"\0"))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def fifo(folder: Path) -> int:
    os.mkfifo(folder / "fifo")
    return os.open(folder / "fifo", os.O_RDWR)


def named_file(folder: Path) -> int:
    (folder / "x").write_bytes(bytes(512))
    return os.open(folder / "x", os.O_RDWR)


def removed_file(folder: Path) -> int:
    descriptor = named_file(folder)
    (folder / "x").unlink()
    return descriptor


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: open_memory(seals=fcntl.F_SEAL_GROW), "not sealed against shrinking"),
        (removed_file, "not sealed against shrinking"),
        (named_file, "no unnamed memory"),
        (fifo, "no unnamed memory"),
        (lambda _: os.open("/dev/null", os.O_RDONLY), "no unnamed memory"),
        (lambda folder: os.open(folder, os.O_RDONLY), "no unnamed memory"),
    ],
)
def test_a_descriptor_of_anything_but_sealed_memory_is_unavailable(
    intake: WeightIntake, make: Callable[[Path], int], said: str, tmp_path: Path
) -> None:
    descriptor = make(tmp_path)
    before = open_files()
    with pytest.raises(TransportUnavailable, match=said):
        intake.stage_bucket(b"c", announced({"kind": "memfd", "process": os.getpid(), "descriptor": descriptor, "nonce": bytes(16)}), None)
    assert open_files() == before
    os.close(descriptor)
    with pytest.raises(TransportUnavailable, match="cannot be opened: No such file"):
        intake.stage_bucket(b"c", announced({"kind": "memfd", "process": os.getpid(), "descriptor": descriptor, "nonce": bytes(16)}), None)


def test_a_segment_of_another_machine_is_unavailable(intake: WeightIntake, segment: Segment) -> None:
    error = staged(intake, announced({**segment.handle(), "nonce": bytes(16)}))
    assert isinstance(error, TransportUnavailable) and "choose another transport" in str(error)


def test_a_file_with_other_rights_or_names_is_unavailable(intake: WeightIntake, in_file: Segment) -> None:
    handle = in_file.handle()
    path = SHARED_FOLDER / handle["segment"]
    with pytest.raises(TransportUnavailable, match="No such file"):
        intake.stage_bucket(b"c", announced({**handle, "segment": "areno-push-1-1-00000000-0"}), None)
    path.chmod(0o622)
    with pytest.raises(TransportUnavailable, match="others may write it"):
        intake.stage_bucket(b"c", announced(handle), None)
    path.chmod(0o600)
    twin = path.with_name(f"{path.name[:-1]}1")
    os.link(path, twin)
    try:
        with pytest.raises(TransportUnavailable, match="2 links"):
            intake.stage_bucket(b"c", announced(handle), None)
    finally:
        twin.unlink()


@pytest.mark.parametrize("segment", ["../x", "/dev/shm/x", "areno-push-1-1-00000000-3", "areno-push-1-1-0000/000-0"])
def test_a_segment_is_a_bare_name_of_ours(segment: str) -> None:
    with pytest.raises(InvalidRequest, match="segment"):
        announced({"kind": "shared", "segment": segment, "nonce": bytes(16)})


@pytest.mark.parametrize("fields", [{"process": 0}, {"process": 2**31}, {"descriptor": -1}, {"descriptor": "9"}, {"process": True}])
def test_sealed_memory_is_named_by_whole_numbers(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        announced({"kind": "memfd", "process": 7, "descriptor": 9, "nonce": bytes(16), **fields})


def test_changed_reordered_and_truncated_bytes_are_refused_and_the_update_goes_on(intake: WeightIntake) -> None:
    flipped, reordered = CONTENT.copy(), np.concatenate([CONTENT[64:], CONTENT[:64]])
    flipped[17] ^= 1
    for content in (flipped, reordered):
        error = staged(intake, *in_frames(content))
        assert isinstance(error, BucketRefused) and "was announced" in str(error)
    with pytest.raises(BucketRefused, match="191 bytes came"):
        intake.stage_bucket(b"c", *in_frames(CONTENT[:-1]))
    with pytest.raises(BucketRefused, match="need one"):
        intake.stage_bucket(b"c", *in_frames(xxh3=None))
    assert staged(intake, *in_frames()) is None
    assert weights(intake) == EXPECTED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": 1}, "its shape makes 32"),
        ({"count": 33}, "its shape makes 32"),
        ({"offset": 128}, "192 bytes were announced"),
        ({"offset": 2}, "multiples of 4"),
        ({"place": 1}, "1 were announced"),
        ({"shape": [2**62, 2**62], "start": 2**62, "count": 2**62}, "192 bytes were announced"),
    ],
)
def test_a_piece_outside_its_tensor_or_its_bucket_is_refused(intake: WeightIntake, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BucketRefused, match=said):
        intake.stage_bucket(b"c", *in_frames(pieces=[{**FIRST, **change}]))
    assert not intake.busy


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": ["first.weight"] * 2}, "columns of one length"),
        ({"places": []}, "columns of one length"),
        ({"counts": [0]}, "greater than or equal to 1"),
        ({"dtypes": ["int8"]}, "'float64', 'float32', 'bfloat16' or 'float16'"),
        ({"shapes": [[1] * 9]}, "at most 8 items"),
        ({"offsets": [True]}, "valid integer"),
    ],
)
def test_columns_that_are_no_pieces_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match="pieces") as refused:
        parse_fields(WeightsStageBucket, {**announced({"kind": "frames"}).model_dump(), "pieces": {**columns([FIRST]), **change}})
    assert said in str(refused.value.limit) and refused.value.remedy


def test_what_the_engine_refuses_reaches_the_caller_of_that_bucket(intake: WeightIntake) -> None:
    assert isinstance(staged(intake, *in_frames(pieces=[{**FIRST, "name": "bogus"}])), ManifestMismatch)


def test_an_abort_answers_what_was_being_staged_and_forgets_the_buckets(intake: WeightIntake, segment: Segment) -> None:
    assert staged(intake, *in_frames(bucket=1)) is None
    before = open_files()
    intake.stage_bucket(b"c", announced(segment.handle()), None)
    assert intake.advance() is None
    intake.abort("u")
    assert isinstance(finish(intake).error, NoUpdate) and open_files() == before, "nothing stays open"
    with pytest.raises(NoUpdate):
        intake.stage_bucket(b"c", *in_frames())
    intake.begin("u", 2, None, partial=False)
    assert staged(intake, *in_frames(bucket=1, pieces=[FIRST])) is None, "the numbers of the former update are free"


def test_bytes_that_wait_are_bounded(intake: WeightIntake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.service.weight_intake.intake.MAX_QUEUED_BYTES", 2 * CONTENT.size)
    for number in (0, 1):
        intake.stage_bucket(b"c", *in_frames(bucket=number))
    with pytest.raises(BucketRefused, match="wait for answers"):
        intake.stage_bucket(b"c", *in_frames(bucket=2))


def test_the_tensors_of_the_fake_are_these() -> None:
    assert {name: list(shape) for name, (_, shape) in TENSORS.items()} == {piece["name"]: piece["shape"] for piece in (FIRST, SECOND)}


class CopyingEngine(FakeEngine):
    """An engine whose device has copied so many launches as `copied` says."""

    def __init__(self) -> None:
        super().__init__(model="x")
        self.launched = self.copied = self.settled = 0

    def launch_slices(self) -> Any:
        """Begin a copy, known by its number."""
        self.launched += 1
        return self.launched

    def slices_copied(self, launched: Any) -> bool:
        """Return whether the device has come so far."""
        return int(launched) <= self.copied

    def settle_slices(self) -> None:
        """Wait for everything."""
        self.settled += 1
        self.copied = self.launched


@pytest.fixture
def copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CopyingEngine, WeightIntake]:
    monkeypatch.setattr("rollout.service.weight_intake.frames.FramesSource.own", True)
    # Settled after each slice it would never be late.
    monkeypatch.setattr("rollout.service.weight_intake.frames.FramesSource.stays", True)
    engine = CopyingEngine()
    intake = WeightIntake(engine, tmp_path)
    intake.begin("u", 1, None, partial=False)
    for number, piece in enumerate((FIRST, SECOND)):
        body, content = in_frames(bucket=number, pieces=[piece])
        intake.stage_bucket(bytes([number]), body, content)
    return engine, intake


def test_a_bucket_is_taken_while_the_device_copies_the_one_before_and_each_is_answered_when_it_is_copied(
    copying: tuple[CopyingEngine, WeightIntake],
) -> None:
    engine, intake = copying
    assert [intake.advance() for _ in range(30)] == [None] * 30
    taken = engine.launched
    assert taken >= 2 and intake.busy and not intake.waits
    with pytest.raises(WeightUpdateError, match="2 files or buckets"):
        intake.commit("u", None, *NO_CANARIES)
    assert engine.settled, "what the device reads from is not given back before"


def test_answers_come_in_order_once_the_device_has_copied(copying: tuple[CopyingEngine, WeightIntake]) -> None:
    engine, intake = copying
    for _ in range(30):
        assert intake.advance() is None
    engine.copied = engine.launched - 1
    assert finish(intake) == StagedFile(b"\0", None)
    assert [intake.advance() for _ in range(5)] == [None] * 5
    engine.copied = engine.launched
    assert finish(intake) == StagedFile(b"\1", None) and not intake.busy
    assert intake.inspected("u") and intake.commit("u", None, *NO_CANARIES).num_tensors == 2
    assert not engine.settled


def test_an_update_that_is_dropped_waits_for_the_device_first(copying: tuple[CopyingEngine, WeightIntake]) -> None:
    engine, intake = copying
    for _ in range(10):
        assert intake.advance() is None
    intake.abort("u")
    assert engine.settled and engine.copied == engine.launched
    ends = [intake.advance() for _ in range(2)]
    assert {end.call_id for end in ends if end is not None} == {b"\0", b"\1"}
    assert all(end is not None and isinstance(end.error, NoUpdate) for end in ends) and not intake.busy
