"""Hostile messages to a client, and hostile weights files to an engine host: typed errors, and the next one works."""

from __future__ import annotations

import json
import os
import random
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import rollout
from rollout.errors import WeightsFileRefused
from rollout.service.weight_intake import WeightIntake
from rollout.wire.operations import CLIENT_REPLIES, Op
from tests.contract.golden_frames import GOLDEN
from tests.fakes import FakeEngine, ScriptedFront
from tests.fuzz.mutations import Mutator

SEED = int(os.environ.get("FUZZ_SEED", "0"))
MUTATIONS = int(os.environ.get("FUZZ_MUTATIONS", "12000")) // 4


@pytest.fixture
def front(tmp_path: Path) -> Iterator[ScriptedFront]:
    front = ScriptedFront(tmp_path)
    yield front
    front.close()


def test_a_client_survives_whatever_its_service_says(front: ScriptedFront, caplog: pytest.LogCaptureFixture) -> None:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(rollout.connect(front.address, timeout_s=60.0)))
    thread.start()
    front.welcome(front.expect(Op.HELLO))
    thread.join(10)
    (client,) = made
    stream = client.stream([1], max_new_tokens=5)
    request = front.expect(Op.GENERATE)
    goldens = [golden for golden in GOLDEN if golden.op in CLIENT_REPLIES]
    for number, frames in enumerate(Mutator(SEED + 7, goldens).messages(MUTATIONS)):
        front.send_frames(frames)
        if number % 200 == 199:
            # Its heartbeats and acknowledgements are read, and it keeps up.
            client._connection.call(Op.INFO, {}, None, control=False)
            front.expect(Op.INFO, 20.0)
    front.deltas(request.request_id, 0, [11, 12, 13, 14, 15], seq=10**6, kind="length")
    assert list(stream)[-1].finished.ids.tolist() == [11, 12, 13, 14, 15]
    assert "I/O thread broke" not in caplog.text
    client.close()


def changed_header(header: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return a safetensors header with something wrong in it, or with other names."""
    header = json.loads(json.dumps(header))
    name = draw.choice(list(header))
    what = draw.choice(["dtype", "shape", "data_offsets", "name"])
    if what == "name":
        header[draw.choice(["", "\0", "x" * 10_000, "__metadata__"])] = header.pop(name)
    elif isinstance(header[name], dict):
        strange: dict[str, list[Any]] = {
            "dtype": ["F8_E4M3", "BOOL", "U64", "COMPLEX", "F64", "F4", "F6_E2M3", "U16", "XX", 1, None],
            "shape": [[], [0], [2**40, 2**40], [-1], [1] * 70, [4, 8, 1], ["a"], None, [8, 4], [2**63], [0, 2**62]],
            "data_offsets": [[0, 0], [128, 0], [0, 2**63], [1, 129], [], None, [-1, 2]],
        }
        header[name][what] = draw.choice(strange[what])
    return header


def hostile_files(count: int) -> Iterator[bytes]:
    """Return weights files that are cut, flipped or lie about what they hold."""
    draw = random.Random(SEED)
    whole = save({"first.weight": torch.ones(4, 8), "second.weight": torch.full((8, 2), 2.0)})
    size = struct.unpack("<Q", whole[:8])[0]
    header, values = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    for _ in range(count):
        how = draw.randrange(3)
        if how == 0:
            flipped = bytearray(whole)
            for _ in range(draw.randrange(1, 4)):
                flipped[draw.randrange(12 + size)] = draw.randrange(256)
            yield bytes(flipped)
        elif how == 1:
            text = json.dumps(changed_header(header, draw)).encode()
            yield struct.pack("<Q", len(text)) + text + values
        else:
            yield whole[: draw.randrange(len(whole))]


def test_a_weights_file_is_taken_whole_or_refused_by_name(tmp_path: Path) -> None:
    intake, refused = WeightIntake(FakeEngine(model="x"), tmp_path), 0
    for content in hostile_files(400):
        (tmp_path / "x.safetensors").write_bytes(content)
        intake.begin("u", 1, None, partial=False)
        intake.stage_file(b"c", "u", "x.safetensors", size=len(content), xxh3=None)
        staged = None
        while staged is None:
            staged = intake.advance()
        assert (
            staged.error is None or isinstance(staged.error, WeightsFileRefused) or getattr(staged.error, "code", "") == "manifest_mismatch"
        )
        refused += staged.error is not None
        intake.abort("u")
    assert refused > 300
