"""A group is taken whole or not at all, goes to the engine in one message, and its members end one by one."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.seeds import derive_seed
from rollout.wire.operations import Op
from rollout.wire.security import new_token
from tests.unit.rollout.service.request_desk import Desk, ending

# Three ids of four bytes, which a request holds to its end.
PROMPT_BYTES = 12
REFUSAL = {"code": "invalid_request", "what": "no", "field": "top_p"}


def members(count: int) -> list[bytes]:
    return [new_token() for _ in range(count)]


def test_members_go_in_one_message_with_seeds_of_their_own() -> None:
    desk, ids = Desk(), members(3)
    desk.group(ids, seed=11, top_k=5)
    [submit] = desk.link.of(Op.SUBMIT)
    engine_ids = [desk.record(one).engine_id for one in ids]
    assert submit.engine_ids == engine_ids and submit.grouped
    assert submit.seeds == [derive_seed(11, member) for member in range(3)] == [desk.record(one).seed for one in ids]
    assert submit.params.top_k == 5
    alone = desk.generate(seed=11)
    single = desk.link.of(Op.SUBMIT)[1]
    assert not single.grouped and single.seeds == [11] and single.engine_ids == [desk.record(alone).engine_id]


def test_a_service_with_a_seed_draws_the_same_group_seed_again() -> None:
    seeds = []
    for _ in range(2):
        desk = Desk(seed=3)
        desk.group(members(2))
        seeds.append(desk.link.of(Op.SUBMIT)[0].seeds)
    assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1]


def test_the_same_group_attaches_and_ends_are_gone_one_by_one() -> None:
    desk, ids = Desk(), members(2)
    desk.group(ids, seed=1)
    first, second = (desk.record(one).engine_id for one in ids)
    desk.step([(first, 7), (second, 8)], accepted=[first, second], finished=[ending(first, 1)])
    desk.group(ids, seed=1)
    assert desk.ledger.counters.attached == 2 and len(desk.link.of(Op.SUBMIT)) == 1
    desk.streams.drop(desk.record(ids[0]))
    desk.ledger.acknowledge(desk.session.number, ids[0])
    desk.group(ids, seed=1)
    assert desk.errors() == [(ids[0], "gone", "request_id")] and desk.ledger.counters.attached == 3
    message = desk.group([ids[1], new_token()], seed=1)
    assert desk.errors()[-1] == (message, "conflict", "request_id"), "one taken id refuses the whole message"
    assert len(desk.link.of(Op.SUBMIT)) == 1


def test_a_group_that_the_engine_refuses_is_refused_for_every_member() -> None:
    desk, ids = Desk(), members(3)
    desk.group(ids, stop=["x"])
    desk.step(refused=[{"engine_id": desk.record(one).engine_id, "error": REFUSAL} for one in ids])
    assert desk.errors() == [(one, "invalid_request", "top_p") for one in ids]
    assert desk.ledger.records() == [] and desk.desk.num_watched == 0
    assert desk.ledger.counters.refused == 3


def test_a_group_without_room_for_all_takes_none() -> None:
    desk, ids = Desk(max_requests=4), members(3)
    desk.generate()
    desk.generate()
    message = desk.group(ids)
    assert desk.errors() == [(message, "busy", None)] and len(desk.ledger.records()) == 2
    assert desk.ledger.counters.refused == 3


@pytest.mark.parametrize("count", [0, 2])
def test_a_group_without_members_or_with_one_twice_is_refused(count: int) -> None:
    desk = Desk()
    message = desk.group([bytes(range(16))] * count)
    assert desk.errors() == [(message, "invalid_request", "n")] and desk.ledger.records() == []


def test_members_that_wait_can_be_cancelled_one_by_one_and_the_rest_goes_together() -> None:
    desk, ids = Desk(), members(3)
    desk.group(ids, min_version=4, seed=2)
    assert desk.link.of(Op.SUBMIT) == [] and desk.desk.num_held == 3
    desk.cancel(ids[0])
    assert desk.replies[-1][2] == {"cancelled": True, "state": "waiting"}
    desk.admission.version = 4
    desk.desk.submit_held()
    [submit] = desk.link.of(Op.SUBMIT)
    assert submit.seeds == [derive_seed(2, 1), derive_seed(2, 2)] and desk.desk.num_held == 0
    engine_ids = [desk.record(one).engine_id for one in ids[1:]]
    desk.step(accepted=engine_ids)
    desk.cancel(ids[1])
    assert [body.engine_id for body in desk.link.of(Op.KILL)] == engine_ids[:1]
    desk.step(finished=[ending(engine_ids[0], 0, "cancelled"), ending(engine_ids[1], 0)])
    assert [desk.reader.endings[one].kind for one in ids] == ["cancelled", "cancelled", "length"]


def test_a_group_whose_members_all_left_while_it_waited_is_forgotten() -> None:
    desk, ids = Desk(), members(2)
    desk.group(ids, min_version=4)
    for one in ids:
        desk.cancel(one)
    desk.admission.version = 4
    desk.desk.submit_held()
    assert desk.link.of(Op.SUBMIT) == []


@pytest.mark.parametrize(
    ("ids", "values"), [([3], []), ([], [1.0]), ([3, 4], [1.0]), ([3, 3], [1.0, 2.0])], ids=["no values", "no ids", "fewer", "repeated"]
)
def test_biases_that_do_not_pair_up_are_refused_by_name(ids: list[int], values: list[float]) -> None:
    desk = Desk()
    biases = {"bias_ids": np.array(ids, np.int32), "bias_values": np.array(values, np.float64)}
    request_id = desk.generate(biases=biases)
    assert desk.errors() == [(request_id, "invalid_request", "logit_bias")]


def test_a_request_reserves_what_it_may_come_to_hold() -> None:
    desk = Desk()
    for fields, expected in (
        ({"max_new_tokens": 10}, 10 * 24),
        ({"max_new_tokens": 10, "prior_output_tokens": 2}, 8 * 24),
        ({"max_new_tokens": 10, "return_kept_ids": True}, 10 * (24 + 8 + 4 * 64)),
        ({"max_new_tokens": 10, "prompt_logprobs_from": 1}, 10 * 24 + 2 * 8),
        ({"max_new_tokens": 10, "prior_output_tokens": 2, "stop": ["x"]}, 8 * 24 + 10 * 16),
        ({"max_new_tokens": 2**40}, 1000 * 24),
        ({"max_new_tokens": -5, "prior_output_tokens": -(2**62), "prompt_logprobs_from": -(2**62)}, 3 * 8),
    ):
        before = desk.ledger.reserved_bytes
        desk.generate(**fields)  # type: ignore[arg-type]
        assert desk.ledger.reserved_bytes - before == expected + PROMPT_BYTES


def test_prompts_that_wait_are_reserved_and_refuse_more_until_they_are_gone() -> None:
    desk = Desk(max_record_bytes=10_000)
    desk.admission.ready, desk.admission.max_model_len = False, None
    prompt = list(range(600))
    held = [desk.generate(prompt=prompt, max_new_tokens=1) for _ in range(5)]
    assert [code for _, code, _ in desk.errors()] == ["busy"], "the fifth of 2,400 bytes does not fit"
    for request_id in held[:4]:
        desk.cancel(request_id)
        desk.flush()
    assert desk.ledger.reserved_bytes == 0
    desk.generate(prompt=prompt, max_new_tokens=1)
    assert len(desk.errors()) == 1


def test_members_share_their_prompts_bytes_and_the_last_one_that_waits_answers_for_all_of_them() -> None:
    desk, ids = Desk(), members(3)
    desk.admission.ready = False
    desk.group(ids, max_new_tokens=1)
    assert desk.ledger.reserved_bytes == 3 * (24 + PROMPT_BYTES // 3)
    for request_id in ids[:2]:
        desk.cancel(request_id)
    desk.flush()
    assert desk.record(ids[2]).reserved_bytes == 24 + PROMPT_BYTES
    assert desk.ledger.reserved_bytes == 24 + PROMPT_BYTES
    desk.cancel(ids[2])
    desk.flush()
    assert desk.ledger.reserved_bytes == 0


def test_a_prompt_beyond_the_context_is_refused_at_the_door() -> None:
    desk = Desk()
    request_id = desk.generate(prompt=[1] * 1001, max_new_tokens=5)
    assert desk.errors() == [(request_id, "request_too_long", "max_new_tokens")]
    assert not desk.link.sent
