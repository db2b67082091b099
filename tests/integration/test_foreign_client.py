"""A client that was written from the protocol section alone does everything that a client needs, over an encrypted connection."""

from __future__ import annotations

import ast
import inspect
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from tokenizers import Tokenizer

import tests.foreign_client as foreign
from areno.weights.digest import digest
from rollout.seeds import derive_seed
from tests.bucket_pieces import columns
from tests.fakes import TENSORS, fake_ids, fake_logprobs, fake_service
from tests.foreign_client import ForeignClient
from tests.unit.rollout.agent.byte_tokenizer import files


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    state = tmp_path_factory.mktemp("state") / "s"
    model = tmp_path_factory.mktemp("model")
    for name, content in files().items():
        (model / name).write_bytes(content)
    options = {"state_dir": str(state), "engine_options": {"step_s": 0.002}, "address": "tcp://127.0.0.1:0"}
    with fake_service(model, **options) as client:
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


def mix64(z: int) -> int:
    """As the protocol section has it."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_its_groups_have_the_members_seeds_and_texts_and_its_prompts_are_scored(client: ForeignClient) -> None:
    members = [bytes([number]) * 16 for number in (1, 2, 3)]
    prompt = [40, 41, 42, 43]
    client.generate_group(prompt, members, seed=9, max_new_tokens=30, prompt_logprobs_from=1, stop=["never seen"])
    client.read(lambda: all(client.streams[member].ending for member in members))
    for number, member in enumerate(members):
        stream, seed = client.streams[member], mix64(mix64(9 ^ mix64(2**63 + number)))
        assert seed == derive_seed(9, number)
        assert stream.ending is not None and stream.ending["seed"] == seed and stream.ids == fake_ids(seed, 30).tolist()
        assert stream.prompt_logprobs == fake_logprobs(np.array(prompt[1:]), 0).tolist()
        assert stream.text is not None and stream.ending["prompt_scored"]
    found = client.call(client.data, foreign.TOKENIZER_FILES, {}, want=foreign.TOKENIZER_FILES_RESULT)
    content, at = bytes(found.numbers("content")), 0
    for entry in found.fields["files"]:
        assert content[at : at + entry["size"]] == files()[entry["name"]]
        at += entry["size"]
    tokenizer = Tokenizer.from_str(files()["tokenizer.json"].decode())
    assert client.streams[members[0]].text == tokenizer.decode(client.streams[members[0]].ids, skip_special_tokens=False)


def test_it_pushes_weights_and_tokens_tell_their_version(service: tuple[Any, str], client: ForeignClient) -> None:
    manifest = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in TENSORS.items()}
    ticket = client.call(client.control, foreign.WEIGHTS_BEGIN, {"manifest": manifest}, want=foreign.WEIGHTS_TICKET).fields
    content, pieces = b"", []
    for name, (dtype, shape) in TENSORS.items():
        count = shape[0] * shape[1]
        piece = {"name": name, "dtype": dtype, "shape": list(shape), "start": 0, "count": count, "offset": len(content)}
        pieces.append(piece)
        content += struct.pack(f"<{count}f", *([0.5] * count))
    bucket = {
        "bucket": 0,
        "size": len(content),
        "pieces": columns(pieces),
        "handle": {"kind": "frames"},
        "xxh3": xxhash.xxh3_64_hexdigest(content),
    }
    bytes_of = {"content": ("|u1", [len(content)], list(content))}
    staging = {"update_id": ticket["update_id"], **bucket}
    client.call(client.control, foreign.WEIGHTS_STAGE_BUCKET, staging, bytes_of, want=foreign.DONE)
    report = client.call(client.control, foreign.WEIGHTS_COMMIT, {"update_id": ticket["update_id"]}, want=foreign.WEIGHTS_REPORT).fields
    assert (report["version"], report["num_tensors"], report["num_bytes"]) == (ticket["version"], len(TENSORS), len(content))
    assert service[0].info().version == ticket["version"]
    request_id = client.generate([1], max_new_tokens=5, seed=3)
    client.read(lambda: client.streams[request_id].ending)
    assert client.streams[request_id].versions == [ticket["version"]] * 5


def test_the_digest_of_the_protocol_section_is_the_engines() -> None:
    for tensor in (torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(2, 2, dtype=torch.float64)):
        words = tensor.flatten().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).tolist()
        bits = [word % 2 ** (8 * tensor.element_size()) for word in words]
        assert sum(word * (mix64(place) | 1) for place, word in enumerate(bits)) % 2**64 == digest(tensor)
