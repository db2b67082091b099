"""Who gets in: the gate's answers to libzmq, for what it may be asked and for what nobody asks."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from rollout.wire.curve import new_key_pair
from rollout.wire.gate import Gate, LocalPeer, local_peer, principal_of

KEY, STRANGER = new_key_pair(), new_key_pair()


def raw(key: str) -> bytes:
    return z85.decode(key.encode())


def gate() -> Gate:
    gate = Gate()
    gate.allow_keys(b"areno.data", lambda key: key == KEY.public)
    gate.allow_plain(b"local", lambda peer: peer is not None and peer.pid == 7)
    return gate


def ask(domain: bytes, mechanism: bytes, *credentials: bytes, address: bytes = b"127.0.0.1") -> list[bytes]:
    return [b"1.0", b"q", domain, address, b"", mechanism, *credentials]


def test_a_key_of_the_list_gets_in_under_its_own_name_and_a_number_of_its_own() -> None:
    one = gate()
    users = [one.judge(ask(b"areno.data", b"CURVE", raw(KEY.public)))[4].decode() for _ in range(2)]
    assert users == [f"{KEY.public}#1", f"{KEY.public}#2"]
    assert principal_of(users[0]) == KEY.public


def test_a_local_process_is_judged_by_what_the_kernel_says() -> None:
    assert local_peer(b"localhost:1000:100:7") == LocalPeer(1000, 100, 7)
    assert gate().judge(ask(b"local", b"NULL", address=b"localhost:1000:100:7"))[2:5] == [b"200", b"OK", b"local:1000#1"]
    assert gate().judge(ask(b"local", b"NULL", address=b"localhost:1000:100:8"))[2] == b"400"
    assert local_peer(b"localhost:1:2:" + b"9" * 30) is None


def test_nobody_else_gets_in() -> None:
    good = ask(b"areno.data", b"CURVE", raw(KEY.public))
    refused = [
        ask(b"areno.data", b"CURVE", raw(STRANGER.public)),
        ask(b"areno.control", b"CURVE", raw(KEY.public)),
        ask(b"areno.data", b"NULL"),
        ask(b"areno.data", b"PLAIN", b"user", b"word"),
        ask(b"local", b"CURVE", raw(KEY.public)),
        ask(b"local", b"NULL"),
        [*good, b"more"],
        [b"2.0", *good[1:]],
        good[:5],
        [],
    ]
    one = gate()
    for question in refused:
        assert one.judge(question)[2] == b"400", question
    assert one.refused == len(refused)


def test_a_closed_domain_lets_nobody_in() -> None:
    one = gate()
    one.close(b"areno.data")
    assert one.judge(ask(b"areno.data", b"CURVE", raw(KEY.public)))[2] == b"400"


@given(st.lists(st.binary(max_size=300), max_size=12))
def test_any_question_gets_one_answer_of_six_short_frames(question: list[bytes]) -> None:
    answer = gate().judge(question)
    assert len(answer) == 6 and answer[2] == b"400"
    assert all(len(frame) <= 255 for frame in answer)


def test_no_change_of_a_good_question_lets_a_stranger_in() -> None:
    draw, one = random.Random(0), gate()
    for _ in range(3000):
        question = [bytearray(frame) for frame in ask(b"areno.data", b"CURVE", raw(STRANGER.public))]
        frame = draw.choice([part for part in question if part])
        frame[draw.randrange(len(frame))] = draw.randrange(256)
        assert one.judge([bytes(part) for part in question])[2] == b"400"
