"""Buckets side by side at the engine's end, in random interleavings, against a model that knows only what a trainer may rely on.

Sources and device are scripted: a source goes on, waits, is copied later or fails where its script says so, and the device copies when
the test lets it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from areno.errors import ManifestMismatch
from rollout.errors import BucketRefused, NoUpdate, WeightUpdateError
from rollout.service.weight_intake import WeightIntake
from rollout.service.weight_intake.intake import MAX_COPYING
from rollout.service.weight_intake.pieces import Pace, Steps, refused
from rollout.wire.messages import parse_fields
from rollout.wire.weight_handles import TensorPiece, WeightsStageBucket
from tests.bucket_pieces import columns
from tests.fakes import FakeEngine

NONE = np.empty(0, np.int64)
NO_CANARIES = (NONE, NONE, np.empty(0, np.float32), [])
PIECE = {"name": "first.weight", "dtype": "float32", "shape": [4, 8], "start": 0, "count": 32, "offset": 0}
SEEDS = [*range(60), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(60, 3000))]


class Device(FakeEngine):
    """An engine whose device copies launches in order, when the test says so. `reads` are sources yet to be read, by launch."""

    def __init__(self) -> None:
        super().__init__(model="x")
        self._pending: list[Source] = []
        self.reads: dict[int, list[Source]] = {}
        self._launches = 0
        self.paces: list[Pace] = []

    @property
    def unread(self) -> set[int]:
        """The sources that the device has not read to their end."""
        return {id(one) for launch in (self._pending, *self.reads.values()) for one in launch}

    def stage_slices(self, slices: Any) -> None:
        self.paces.append(Pace.GO_ON)
        self._pending += [one.values.source for one in slices]

    def launch_slices(self) -> Any:
        self.paces.append(Pace.GO_ON)
        self._launches += 1
        self.reads[self._launches], self._pending = self._pending, []
        return self._launches

    def slices_copied(self, launched: Any) -> bool:
        self.paces.append(Pace.COPIES)
        return all(number > launched for number in self.reads)

    def copy_one(self) -> None:
        """Copy the oldest launch."""
        if self.reads:
            del self.reads[min(self.reads)]

    def settle_slices(self) -> None:
        self.reads.clear()
        self._pending.clear()


@dataclass(frozen=True, slots=True)
class Script:
    """What a bucket does: the paces of its preparation, whether its memory is its own, and before which part it fails, if it does."""

    paces: tuple[Pace, ...]
    own: bool
    fails_at: int | None


@dataclass(eq=False)
class Source:
    """A bucket by script. `ready` says whether what it waits for has come."""

    script: Script
    device: Device
    ready: Callable[[], bool]
    slice_bytes: int = 64
    stays: bool = True
    finished: int = 0
    closed: int = 0
    parts: int = 0

    @property
    def own(self) -> bool:
        return self.script.own

    def _part(self) -> None:
        if self.parts == self.script.fails_at:
            raise refused(0, "its script says so", "none")
        self.parts += 1

    def prepare(self) -> Steps:
        for pace in self.script.paces:
            self._part()
            if pace is Pace.WAIT:
                while not self.ready():
                    self.device.paces.append(Pace.WAIT)
                    yield Pace.WAIT
            else:
                self.device.paces.append(pace)
                yield pace

    def values(self, piece: TensorPiece, first: int, count: int, into: torch.Tensor | None) -> Any:
        assert not self.closed, "a source that was given back is not read"
        self._part()
        values = torch.zeros(count)
        values.source = self  # type: ignore[attr-defined]
        return values

    def finish(self) -> None:
        assert id(self) not in self.device.unread, "what is finished was copied"
        self.finished += 1

    def close(self) -> None:
        self.closed += 1


@dataclass
class Trainer:
    """What is known at the trainer's end: who waits for an answer, and which buckets it was told of."""

    asked: dict[bytes, int] = field(default_factory=dict)
    answers: Counter[bytes] = field(default_factory=Counter)
    sources: dict[int, list[Source]] = field(default_factory=dict)


def announced(update: str, number: int, *, count: int = 32) -> tuple[WeightsStageBucket, np.ndarray]:
    content = np.zeros(count * 4, np.uint8)
    fields = {"update_id": update, "bucket": number, "size": content.size, "pieces": columns([{**PIECE, "count": count}])}
    body = parse_fields(WeightsStageBucket, {**fields, "handle": {"kind": "frames"}, "xxh3": xxhash.xxh3_64_hexdigest(content)})
    assert isinstance(body, WeightsStageBucket)
    return body, content


class Run:
    """One random run; `check` holds after every step."""

    def __init__(self, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random, self.device = random.Random(seed), Device()
        # On a device a bucket's slices are handed over together; here a few at a time, so that there is something between them.
        monkeypatch.setattr("rollout.service.weight_intake.pieces.DEVICE_SLICES", self.random.choice([1, 2, 128]))
        monkeypatch.setattr("rollout.service.weight_intake.intake.stage_pieces", self._on_device)
        self.intake = WeightIntake(self.device, folder)
        monkeypatch.setattr(self.intake, "_source", self._source)
        self.trainer, self.calls, self.updates, self.ready = Trainer(), 0, 0, False

    @staticmethod
    def _on_device(engine: Any, body: Any, source: Any, device: Any) -> Steps:
        from rollout.service.weight_intake.pieces import stage_pieces

        return stage_pieces(engine, body, source, torch.device("meta"))

    def _source(self, body: WeightsStageBucket, content: Any) -> Source:
        draw = self.random
        own = draw.random() < 0.7
        paces = [Pace.GO_ON, Pace.WAIT, *([Pace.COPIES] if own else [])]
        script = Script(tuple(draw.choices(paces, k=draw.randrange(4))), own, draw.choice([None, None, None, draw.randrange(5)]))
        source = Source(script, self.device, lambda: self.ready)
        self.trainer.sources.setdefault(body.bucket, []).append(source)
        return source

    @property
    def update(self) -> str:
        return f"u{self.updates}"

    def begin(self) -> None:
        self.updates += 1
        self.intake.begin(self.update, self.updates, None, partial=False)

    def stage(self, number: int, count: int = 32) -> None:
        self.calls += 1
        call = self.calls.to_bytes(4, "little")
        self.trainer.asked[call] = number
        self.intake.stage_bucket(call, *announced(self.update, number, count=count))

    def advance(self) -> bool:
        """Let the intake do one thing; return whether it answered."""
        self.device.paces.clear()
        finished = {number: sum(one.finished for one in sources) for number, sources in self.trainer.sources.items()}
        end = self.intake.advance()
        if end is None:
            assert self.intake.waits == (set(self.device.paces) == {Pace.WAIT}), "it waits where nothing can be done, and nowhere else"
            return False
        assert not self.intake.waits
        number = self.trainer.asked[end.call_id]
        self.trainer.answers[end.call_id] += 1
        assert self.trainer.answers[end.call_id] == 1, "one answer for a call"
        sources = self.trainer.sources.get(number, [])
        assert not any(id(one) in self.device.unread for one in sources), "the trainer may write the bucket again: nothing reads it"
        if end.error is None:
            assert any(one.finished for one in sources), "staged is what came to its end"
        elif not isinstance(end.error, NoUpdate):
            assert isinstance(end.error, BucketRefused) and end.error.remedy
            assert sum(one.finished for one in sources) == finished.get(number, 0), "what is refused is not staged"
        return True

    def end(self, how: str) -> None:
        """End the update; a commit of it is refused, for tensors are missing."""
        open_sources = [one for sources in self.trainer.sources.values() for one in sources]
        if how == "abort":
            self.intake.abort(self.update)
        else:
            with pytest.raises((WeightUpdateError, ManifestMismatch), match="still being staged" if self.intake.busy else "not complete"):
                self.intake.commit(self.update, None, *NO_CANARIES)
        assert not self.device.unread, "the device reads nothing of an update that is over"
        assert all(one.closed == 1 for one in open_sources)
        while self.intake.busy:
            assert self.advance()
        assert set(self.trainer.answers) == set(self.trainer.asked), "every call has its answer"
        self.trainer = Trainer()

    def check(self) -> None:
        finished = {number for number, sources in self.trainer.sources.items() if any(one.finished for one in sources)}
        assert set(self.intake._staged) <= finished, "staged buckets are those whose source came to its end"
        assert len(self.intake._copying) <= MAX_COPYING
        for number, sources in self.trainer.sources.items():
            under_way = [one for one in sources if not one.closed]
            assert sum(one.parts > 0 for one in under_way) <= 1, f"bucket {number} is staged twice at the same time"
            assert sum(one.finished for one in sources) <= 1

    def step(self) -> None:
        what = self.random.choices(["stage", "again", "other", "advance", "copy", "ready", "end"], weights=[20, 8, 3, 60, 20, 10, 3])[0]
        known = list(self.trainer.sources)
        if what == "stage":
            self.stage(len(known))
        elif what == "again" and known:
            self.stage(self.random.choice(known))
        elif what == "other" and known:
            self.stage(self.random.choice(known), count=16)
        elif what == "advance":
            self.advance()
        elif what == "copy":
            self.device.copy_one()
        elif what == "ready":
            self.ready = not self.ready
        elif what == "end":
            self.end(self.random.choice(["abort", "commit"]))
            self.begin()


@pytest.mark.parametrize("seed", SEEDS)
def test_any_interleaving_answers_each_call_once_and_stages_what_came_to_its_end(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(seed, tmp_path, monkeypatch)
    run.begin()
    for _ in range(200):
        run.step()
        run.check()
    run.ready = True
    for _ in range(20 * run.calls):
        if not run.intake.busy:
            break
        run.device.copy_one()
        run.advance()
        run.check()
    assert not run.intake.busy, "what waits for nothing comes to its end"
    assert set(run.trainer.answers) == set(run.trainer.asked)
    run.end("abort")
