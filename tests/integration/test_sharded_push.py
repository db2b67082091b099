"""Sharded trainers push what both ranks trained: two gloo ranks and a real service, every rank the same outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rollout
from tests.fixtures_models import reference_logprobs, tiny_model, write_checkpoint
from tests.integration.sharded_trainer import FAILURES

IDS = np.random.default_rng(4).integers(3, 250, 30)
REPOSITORY = Path(__file__).resolve().parents[2]
Diary = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(folder, "llama", seed=0)
    with rollout.local(str(folder), dtype="float32", threads=1, max_rows=4) as client:
        yield client


@pytest.fixture(scope="module")
def folder(client: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run both ranks to their end, once for all tests, and return the folder with what they wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.integration.sharded_trainer"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder), client.address], stderr=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, -9], "\n".join(error[-2000:] for error in errors)
    return folder


@pytest.fixture(scope="module")
def diaries(folder: Path) -> tuple[Diary, Diary]:
    first, second = (
        {line.pop("what"): line for line in map(json.loads, (folder / f"rank{rank}.json").read_text().splitlines())} for rank in range(2)
    )
    return first, second


@pytest.mark.parametrize(("kind", "transport"), [("ddp", "file"), ("fsdp2", "memory")])
def test_two_ranks_push_their_common_weights_and_both_get_the_report(diaries: tuple[Diary, Diary], kind: str, transport: str) -> None:
    first, second = diaries
    assert first[kind] == second[kind]
    assert first[kind]["transport"] == transport and first[kind]["canary_gap"] < 1e-4
    assert first[kind]["changed_tensors"] == first[kind]["num_tensors"] > 15


def test_tensors_are_gathered_one_by_one_and_the_model_is_never_whole(diaries: tuple[Diary, Diary]) -> None:
    sizes = [parameter.nbytes for parameter in tiny_model("llama").parameters()]
    for diary in diaries:
        assert max(sizes) <= diary["most"]["bytes"] <= 3 * max(sizes) < sum(sizes)


@pytest.mark.parametrize(
    ("what", "text"), [("no client", "pass rollout.connect()"), ("no transport", "carrier pigeon"), ("a stranger", "client is a str")]
)
def test_a_push_that_rank_0_cannot_make_is_refused_on_both(diaries: tuple[Diary, Diary], what: str, text: str) -> None:
    for diary, start in zip(diaries, ("", "rank 0 gave the push up: ")):
        assert diary[what]["code"] == "option_invalid"
        assert diary[what]["text"].startswith(start) and text in diary[what]["text"]


def test_a_failure_on_rank_0_reaches_both_and_the_next_push_works(diaries: tuple[Diary, Diary]) -> None:
    first, second = diaries
    assert first["refused"]["code"] == second["refused"]["code"] == "push_failed"
    assert "rank 0 gave the push up: the disk is full; 0 bytes are free; free some" in second["refused"]["text"]
    assert first["again"] == second["again"] and first["again"]["version"] == first["fsdp2"]["version"] + 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("step", "ranks"), FAILURES)
def test_a_push_that_fails_on_one_rank_or_on_all_fails_on_all_and_the_next_one_works(
    diaries: tuple[Diary, Diary], kind: str, step: str, ranks: tuple[int, ...]
) -> None:
    what = f"{kind} {step} {''.join(map(str, ranks))}"
    for rank, diary in enumerate(diaries):
        told = diary[what]
        assert "code" in told, "it failed here"
        assert told["text"].startswith(f"rank {ranks[0]} gave the push up: ") == (rank not in ranks)
    first, second = (diary[f"{what}, then"] for diary in diaries)
    assert first == second and first["canary_gap"] < 1e-4


def test_what_a_forward_gathered_before_the_last_step_is_not_pushed(client: Any, folder: Path, diaries: tuple[Diary, Diary]) -> None:
    assert diaries[0]["last"]["canary_gap"] < 1e-4
    model = tiny_model("llama")
    model.load_state_dict(load_file(folder / "fsdp2.safetensors"))
    assert np.abs(client.score(IDS).token_logprobs - reference_logprobs(model, IDS)).max() < 1e-4


def test_a_rank_that_is_killed_ends_the_others_push_and_the_service_serves_what_it_had(
    client: Any, folder: Path, diaries: tuple[Diary, Diary]
) -> None:
    first, second = diaries
    assert "code" in first["killed"] and "killed" not in second
    assert client.info().version == first["last"]["version"]
    client.weights_abort(client.weights_begin(None).update_id)
    model = tiny_model("llama")
    before = reference_logprobs(model, IDS)
    model.load_state_dict(load_file(folder / "fsdp2.safetensors"))
    gap = np.abs(client.score(IDS).token_logprobs - reference_logprobs(model, IDS)).max()
    assert gap < 1e-4 < np.abs(before - reference_logprobs(model, IDS)).max()
    ddp = load_file(folder / "ddp.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in ddp.values())
