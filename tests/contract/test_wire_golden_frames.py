"""Every operation has its bytes written down, and its bytes are read back as what they say."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.wire.arrays import ARRAYS
from rollout.wire.codec import decode
from rollout.wire.messages import MODELS
from rollout.wire.operations import CLIENT_REPLIES, CONTROL_REQUESTS, DATA_REQUESTS, HOST_REPLIES, HOST_REQUESTS, Op
from tests.contract.golden_frames import GOLDEN, Golden, frames_of, written

EVERYTHING = DATA_REQUESTS | CONTROL_REQUESTS | CLIENT_REPLIES | HOST_REQUESTS | HOST_REPLIES


HOW = "add it to GOLDEN, write the bytes with `python -m tests.contract.golden_frames`, and name it in rollout/README.md"


def test_every_operation_every_field_and_every_array_is_in_some_golden_message() -> None:
    assert {golden.op for golden in GOLDEN} == set(Op), HOW
    for op in Op:
        own = [golden for golden in GOLDEN if golden.op is op]
        assert {name for golden in own for name in golden.fields} == set(MODELS[op].model_fields), f"{op.name}: {HOW}"
        assert {name for golden in own for name in golden.arrays} == set(ARRAYS.get(op, {})), f"{op.name}: {HOW}"
    assert len({golden.name for golden in GOLDEN}) == len(GOLDEN)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_a_message_has_the_bytes_that_are_written_down_and_is_read_back(golden: Golden) -> None:
    frames = frames_of(golden)
    assert [frame.hex() for frame in frames] == written()[golden.name]
    packet = decode(frames, EVERYTHING)
    assert (packet.op, packet.request_id) == (golden.op, golden.request_id)
    assert packet.body.model_dump(exclude_unset=True) == golden.fields
    assert set(packet.arrays) == set(golden.arrays)
    for name, array in golden.arrays.items():
        assert packet.arrays[name].dtype.itemsize == array.dtype.itemsize
        np.testing.assert_array_equal(packet.arrays[name], array)


def test_nothing_else_is_written_down() -> None:
    assert set(written()) == {golden.name for golden in GOLDEN}
