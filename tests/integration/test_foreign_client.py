"""A client that was written from the protocol section alone does everything that a client needs, over an encrypted connection."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.foreign_client as foreign
from tests.fakes import fake_ids, fake_logprobs, fake_service
from tests.foreign_client import ForeignClient


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    state = tmp_path_factory.mktemp("state") / "s"
    options = {"state_dir": str(state), "engine_options": {"step_s": 0.002}, "address": "tcp://127.0.0.1:0"}
    with fake_service(tmp_path_factory.mktemp("model"), **options) as client:
        yield client, str(state / "keys" / "local.key")


@pytest.fixture
def client(service: tuple[Any, str]) -> Iterator[ForeignClient]:
    client = ForeignClient(service[0].address, service[1])
    yield client
    client.close()


def test_the_foreign_client_has_nothing_of_ours() -> None:
    tree = ast.parse(Path(inspect.getfile(foreign)).read_text())
    names = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"__future__", "dataclasses", "json", "math", "os", "pathlib", "struct", "time", "typing", "msgpack", "zmq"}


def test_it_generates_streams_and_acknowledges(service: tuple[Any, str], client: ForeignClient) -> None:
    one, other = client.generate([1, 2, 3], max_new_tokens=40, seed=3), client.generate([4], max_new_tokens=7, seed=4)
    client.read(lambda: all(client.streams[request_id].ending for request_id in (one, other)))
    for request_id, seed, count in ((one, 3, 40), (other, 4, 7)):
        stream = client.streams[request_id]
        assert stream.ids == fake_ids(seed, count).tolist()
        assert stream.logprobs == fake_logprobs(fake_ids(seed, count), 0).tolist()
        assert stream.versions == [0] * count and stream.ending is not None
        assert (stream.ending["kind"], stream.ending["seed"]) == ("length", seed)
    client.send(client.data, foreign.ATTACH, {}, {"request_ids": foreign.rows_of_ids([one]), "offsets": ("<i8", [1], [0])})
    client.read(lambda: client.errors)
    assert (client.errors[0].request_id, client.errors[0].fields["code"]) == (one, "gone")
    assert service[0].stats()["unacknowledged_endings"] == 0


def test_it_cancels_and_keeps_what_was_sampled(client: ForeignClient) -> None:
    request_id = client.generate([1], max_new_tokens=50_000, seed=5)
    client.read(lambda: len(client.streams[request_id].ids) >= 10)
    result = client.call(client.data, foreign.CANCEL, {"target": request_id}, want=foreign.CANCEL_RESULT)
    assert result.fields["cancelled"] is True
    client.read(lambda: client.streams[request_id].ending)
    stream = client.streams[request_id]
    assert stream.ending is not None and stream.ending["kind"] == "cancelled"
    assert stream.ids == fake_ids(5, len(stream.ids)).tolist()
    again = client.call(client.data, foreign.CANCEL, {"target": request_id}, want=foreign.CANCEL_RESULT)
    assert (again.fields["cancelled"], again.fields["state"]) in ((False, "gone"), (False, "cancelled"))


def test_it_goes_on_where_it_was_after_a_lost_connection(client: ForeignClient) -> None:
    request_id = client.generate([1], max_new_tokens=400, seed=6)
    client.read(lambda: len(client.streams[request_id].ids) >= 20)
    client.lose_connection()
    before = client.session["session"]
    client.connect()
    assert client.session["session"] == before
    client.attach([request_id])
    client.read(lambda: client.streams[request_id].ending)
    assert client.streams[request_id].ids == fake_ids(6, 400).tolist()
    assert client.streams[request_id].repeated == 0


def test_it_scores_asks_and_pauses(service: tuple[Any, str], client: ForeignClient) -> None:
    scored = client.call(client.data, foreign.SCORE, {"temperature": 1.0}, {"ids": ("<i4", [3], [1, 2, 3])}, want=foreign.SCORED)
    assert len(scored.numbers("token_logprobs")) == 2
    assert client.call(client.data, foreign.INFO, {}, want=foreign.INFO_RESULT).fields["protocol_version"] == 1
    client.call(client.control, foreign.PAUSE, {}, want=foreign.DONE)
    assert service[0].stats()["paused"]
    client.call(client.control, foreign.RESUME, {}, want=foreign.DONE)


def test_a_refusal_names_the_field_and_nothing_else_happens(client: ForeignClient) -> None:
    request_id = client.generate([1], temperature=-1.0)
    client.read(lambda: client.errors)
    error = client.errors[0]
    assert (error.request_id, error.fields["code"], error.fields["field"]) == (request_id, "invalid_request", "temperature")
    assert error.fields["limit"] and error.fields["remedy"]
