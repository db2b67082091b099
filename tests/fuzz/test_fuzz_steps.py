"""What an engine host may say by mistake: the front takes a step whole or not at all, and its books stay in order."""

from __future__ import annotations

import os
import random

import numpy as np

from rollout.errors import HostFailed, RolloutError, WireError
from rollout.wire.codec import Packet, decode, encode
from rollout.wire.operations import HOST_REPLIES, Op
from tests.contract.golden_frames import HOST_ENDING, STEP, Golden
from tests.fuzz.mutations import Mutator
from tests.unit.rollout.service.request_desk import Desk

SEED = int(os.environ.get("FUZZ_SEED", "0"))


def steps_of(desk: Desk, engine_ids: list[int], count: int) -> list[Packet]:
    """Return what the codec lets through of mutated steps that speak of these requests."""
    arrays = {**STEP, "accepted": np.array(engine_ids, np.int64), "request_ids": np.array(engine_ids[:1], np.int64)}
    arrays["prompt_scores"] = np.array([[engine_ids[0], 0, 1, 0]], np.int64)
    fields = {"seq": 1, "version": 0, "refused": [], "finished": [{**HOST_ENDING, "engine_id": engine_ids[1]}]}
    packets = []
    for frames in Mutator(SEED, [Golden("step", Op.STEP, fields, arrays, bytes(16))]).messages(count):
        try:
            packet = decode(frames, HOST_REPLIES)
        except RolloutError:
            continue
        if packet.op is Op.STEP:
            packets.append(packet)
    return packets


def test_a_mutated_step_is_taken_or_refused_and_the_books_stay_in_order() -> None:
    taken = refused = 0
    desk, draw = Desk(), random.Random(SEED)
    for round_number in range(60):
        ids = [desk.record(desk.generate(max_new_tokens=5, prompt_logprobs_from=0)).engine_id for _ in range(3)]
        for packet in steps_of(desk, ids, draw.choice([3, 10])):
            try:
                desk.desk.take_step(packet)
                taken += 1
            except WireError:
                refused += 1
            desk.ledger.check_integrity()
        desk.desk.fail_submitted(HostFailed("the host died"))
        desk.flush()
        assert desk.ledger.live == desk.ledger.deciding == 0, round_number
    assert taken > 30


def test_arrays_that_do_not_fit_together_are_refused_by_name_before_anything_is_taken() -> None:
    for name, value in (
        ("logprobs", np.ones(1, np.float32)),
        ("versions", np.ones(3, np.int64)),
        ("kept_ids", np.ones(7, np.int32)),
        ("prompt_logprobs", np.ones(2, np.float32)),
    ):
        desk = Desk()
        ids = [desk.record(desk.generate(max_new_tokens=5)).engine_id for _ in range(2)]
        arrays = {
            **{
                column: np.ones(2, STEP[column].dtype)
                for column in ("token_ids", "logprobs", "raw_logprobs", "behaviour_logprobs", "versions")
            },
            "accepted": np.array(ids, np.int64),
            "request_ids": np.array(ids, np.int64),
            "kept_counts": np.ones(2, np.int32),
            "kept_ids": np.ones(2, np.int32),
            "prompt_scores": np.array([[ids[0], 0, 1, 0]], np.int64),
            "prompt_logprobs": np.ones(1, np.float32),
            "prompt_raw_logprobs": np.ones(1, np.float32),
        }
        frames = encode(Op.STEP, bytes(16), {"seq": 1, "version": 0}, {**arrays, name: value})
        try:
            desk.desk.take_step(decode([bytes(frame) for frame in frames], HOST_REPLIES))
        except WireError as error:
            assert error.field == name
        else:
            raise AssertionError(name)
        assert desk.ledger.live == 0 and desk.ledger.counters.tokens == 0
