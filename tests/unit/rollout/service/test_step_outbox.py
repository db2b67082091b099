"""The host's outbox joins steps while the front lags, stops the host at a bound, and loses nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from areno.step_output import Finished, FinishKind, FinishReason, PromptScore, StepOutput
from rollout.errors import InternalError
from rollout.service.step_outbox import MAX_UNDER_WAY, TOKEN_BYTES, StepOutbox
from rollout.wire.codec import decode
from rollout.wire.host_messages import Step
from rollout.wire.operations import HOST_REPLIES, Op
from rollout.wire.transport import Peer, Sent

CREDIT = 2**20


class ListPeer:
    """A link that keeps what it takes."""

    def __init__(self) -> None:
        self.room = 10**9
        self.packets: list[Any] = []

    def send(self, frames: list[Any]) -> Sent:
        if not self.room:
            return Sent.FULL
        self.room -= 1
        self.packets.append(decode([bytes(frame) for frame in frames], HOST_REPLIES))
        return Sent.OK


def step(ids: list[int]) -> StepOutput:
    count = len(ids)
    floats = np.zeros(count, np.float32)
    return StepOutput(
        request_ids=np.full(count, 7, np.int64),
        token_ids=np.array(ids, np.int32),
        logprobs=floats,
        raw_logprobs=floats,
        behaviour_logprobs=floats,
        versions=np.zeros(count, np.int64),
    )


def outbox_of(peer: ListPeer) -> StepOutbox:
    return StepOutbox(cast(Peer, peer), CREDIT)


def received(peer: ListPeer) -> list[int]:
    return [token for packet in peer.packets if packet.op is Op.STEP for token in packet.arrays["token_ids"].tolist()]


def test_without_acknowledgements_later_steps_join_into_one_message() -> None:
    peer = ListPeer()
    outbox = outbox_of(peer)
    for token in range(100):
        outbox.add(step([token]))
        outbox.flush(0)
    assert len(peer.packets) == MAX_UNDER_WAY
    last = cast(Step, peer.packets[-1].body)
    outbox.acknowledge(last.seq)
    outbox.flush(0)
    assert len(peer.packets) == MAX_UNDER_WAY + 1
    assert received(peer) == list(range(100))


@pytest.mark.parametrize("tokens", [1, 4096])
def test_bytes_that_the_front_has_not_acknowledged_stop_the_host_until_it_catches_up(tokens: int) -> None:
    """Whether they wait here, as with many small messages, or in the socket."""
    peer = ListPeer()
    outbox = outbox_of(peer)
    while not outbox.full:
        outbox.add(step([1] * tokens))
        outbox.flush(0)
    assert CREDIT <= outbox.num_bytes < CREDIT + TOKEN_BYTES * tokens
    assert len(peer.packets) <= MAX_UNDER_WAY
    for seq in range(1, MAX_UNDER_WAY + 2):
        outbox.acknowledge(seq)
        outbox.flush(0)
    assert not outbox.full and outbox.num_bytes == 0
    assert TOKEN_BYTES * len(received(peer)) >= CREDIT


def test_the_bytes_counted_are_those_of_the_frames() -> None:
    """Kept sets and endings too: a step whose tokens are few may be large."""
    peer = ListPeer()
    outbox = outbox_of(peer)
    kept = replace(step([3, 4]), kept_counts=np.array([500, 500], np.int32), kept_ids=np.arange(1000, dtype=np.int32))
    score = PromptScore(request_id=7, start=5, logprobs=np.zeros(300, np.float32), raw_logprobs=np.zeros(300, np.float32), version=2)
    outbox.add(replace(kept, prompt_scores=(score,)))
    outbox.flush(0)
    [packet] = peer.packets
    assert outbox.num_bytes == sum(array.nbytes for name, array in packet.arrays.items() if name != "prompt_scores")
    ending = Finished(request_id=7, reason=FinishReason(kind=FinishKind.LENGTH), prompt_tokens=3, output_tokens=9, cached_tokens=0, seed=1)
    outbox.add(StepOutput.empty((ending,) * 10_000))
    assert outbox.full, "endings that nobody takes are bytes as well"


def test_a_full_socket_is_tried_again_and_keeps_the_order() -> None:
    peer = ListPeer()
    outbox = outbox_of(peer)
    peer.room = 0
    outbox.accept(7)
    outbox.add(step([1]))
    outbox.flush(0)
    outbox.reply(Op.DONE, bytes(16), {})
    outbox.add(step([2]))
    outbox.flush(0)
    assert outbox.wants_room
    peer.room = 100
    outbox.flush(0)
    assert [packet.op for packet in peer.packets] == [Op.STEP, Op.DONE, Op.STEP]
    assert received(peer) == [1, 2]
    assert peer.packets[0].arrays["accepted"].tolist() == [7]
    assert not outbox.wants_room


def test_a_refusal_carries_the_engine_error_and_a_stranger_becomes_an_internal_error() -> None:
    peer = ListPeer()
    outbox = outbox_of(peer)
    outbox.refuse(9, ValueError("odd"))
    outbox.flush(3)
    body = cast(Step, peer.packets[0].body)
    assert body.version == 3
    assert (body.refused[0].engine_id, body.refused[0].error.code, body.refused[0].error.what) == (9, "internal_error", "ValueError: odd")


def test_kept_sets_and_scored_prompts_of_joined_steps_stay_with_their_tokens() -> None:
    peer = ListPeer()
    outbox = outbox_of(peer)
    kept = replace(step([3, 4]), kept_counts=np.array([2, 1], np.int32), kept_ids=np.array([3, 8, 4], np.int32))
    floats = np.array([-1.0, -2.0], np.float32)
    score = PromptScore(request_id=7, start=5, logprobs=floats, raw_logprobs=2 * floats, version=2)
    for output in (step([1]), kept, replace(StepOutput.empty(), prompt_scores=(score,)), step([5])):
        outbox.add(output)
    outbox.flush(0)
    arrays = peer.packets[0].arrays
    assert arrays["token_ids"].tolist() == [1, 3, 4, 5]
    assert arrays["kept_counts"].tolist() == [0, 2, 1, 0] and arrays["kept_ids"].tolist() == [3, 8, 4]
    assert arrays["prompt_scores"].tolist() == [[7, 5, 2, 2]] and arrays["prompt_raw_logprobs"].tolist() == [-2, -4]
    outbox.add(step([6]))
    outbox.flush(0)
    assert not {"kept_counts", "prompt_scores"} & set(peer.packets[1].arrays), "a step without them has no such arrays"


def test_a_score_alone_is_news_and_counts_against_the_bound() -> None:
    peer = ListPeer()
    outbox = outbox_of(peer)
    floats = np.zeros(CREDIT // 8, np.float32)
    outbox.add(
        replace(StepOutput.empty(), prompt_scores=(PromptScore(request_id=7, start=1, logprobs=floats, raw_logprobs=floats, version=0),))
    )
    assert outbox.full
    outbox.flush(0)
    outbox.acknowledge(1)
    assert not outbox.full and len(peer.packets) == 1


def test_the_answer_to_a_score_counts_against_the_bound_until_a_step_behind_it_is_acknowledged() -> None:
    peer = ListPeer()
    outbox = outbox_of(peer)
    floats = np.zeros(CREDIT // 8, np.float32)
    outbox.reply(Op.DONE, bytes(16), {})
    assert outbox.num_bytes == 0
    outbox.reply(Op.SCORED, bytes(16), {"version": 0}, {"token_logprobs": floats, "raw_logprobs": floats})
    assert outbox.full and outbox.num_bytes == CREDIT
    outbox.flush(0)
    outbox.flush(0)
    assert [packet.op for packet in peer.packets] == [Op.DONE, Op.SCORED, Op.STEP], "an empty step asks for the acknowledgement, once"
    assert outbox.full
    outbox.acknowledge(cast(Step, peer.packets[-1].body).seq)
    assert outbox.num_bytes == 0


def test_an_ending_says_where_the_cache_was_rebuilt() -> None:
    peer = ListPeer()
    outbox = outbox_of(peer)
    reason = FinishReason(kind=FinishKind.LENGTH)
    ended = Finished(request_id=7, reason=reason, prompt_tokens=3, output_tokens=9, cached_tokens=0, seed=1, kv_rebuilt_at=(5, 9))
    outbox.add(StepOutput.empty((ended,)))
    outbox.flush(0)
    assert cast(Step, peer.packets[0].body).finished[0].kv_rebuilt_at == [5, 9]


@pytest.mark.parametrize("value", [{1}, 2**64, object(), {2: 3}, np.int64(4), "\ud800", 1j])
def test_what_has_no_binary_form_is_the_hosts_fault_and_leaves_the_rest_as_it_is(value: object) -> None:
    peer = ListPeer()
    outbox = outbox_of(peer)
    outbox.add(step([1]))
    with pytest.raises(InternalError, match=r"STATS_RESULT cannot be sent: engine=.*") as refused:
        outbox.reply(Op.STATS_RESULT, bytes(16), {"values": {}, "engine": {"waiting": value}})
    assert refused.value.code == "internal_error" and refused.value.field == "engine"
    outbox.flush(0)
    assert received(peer) == [1]
