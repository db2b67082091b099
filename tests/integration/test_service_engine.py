"""The service around the real engine, and the command line that starts and asks it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import rollout
from areno.weights.digest import digest
from rollout.errors import CanaryMismatch, InvalidRequest
from tests.fixtures_models import checkpoint_tensors, reference_logprobs, write_checkpoint

PARTS = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    **dict.fromkeys(PARTS),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(folder, "llama", seed=0)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A client of a service that the command line started, and its state folder, where its log is too."""
    state = tmp_path_factory.mktemp("state")
    command = [
        sys.executable,
        "-m",
        "rollout",
        "serve",
        "--model",
        str(model),
        "--max-rows",
        "8",
        "--run-ahead",
        "1",
        "--threads",
        "1",
        "--json",
    ]
    with (state / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"ARENO_STATE_DIR": str(state)})
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        assert (ready["event"], ready["version"]) == ("ready", 0)
        with rollout.connect(ready["address"]) as client:
            yield client, state
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert json.loads(rest.splitlines()[-1]) == {"event": "stopped"}


def command_line(state: Path, *arguments: str) -> tuple[int, str]:
    environment = os.environ | {"ARENO_STATE_DIR": str(state)}
    done = subprocess.run(
        [sys.executable, "-m", "rollout", *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_generations_have_the_reference_logprobs(served: Any, model: Path) -> None:
    client, _ = served
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(client.generate, [1, 5, index], max_new_tokens=24, temperature=0.7, seed=index) for index in range(12)]
        generations = [future.result(60) for future in futures]
    for generation in generations:
        ids = np.concatenate([generation.prompt_ids, generation.ids])
        expected = reference_logprobs(model, ids, temperature=0.7)[len(generation.prompt_ids) - 1 :]
        assert np.abs(generation.logprobs - expected).max() < 1e-4
        assert generation.prompt_ids.tolist()[:2] == [1, 5]
        assert generation.prompt_tokens == 3
    again = client.generate([1, 5, 3], max_new_tokens=24, temperature=0.7, seed=3)
    assert again.ids.tolist() == generations[3].ids.tolist()
    score = client.score(np.concatenate([again.prompt_ids, again.ids]), temperature=0.7)
    assert np.abs(score.token_logprobs[2:] - again.logprobs).max() < 1e-4


def test_a_forced_end_id_keeps_its_true_logprob_and_masks_show_in_the_behaviour(served: Any, model: Path) -> None:
    client, _ = served
    generation = client.generate([1, 5], max_new_tokens=6, forced_ids=[9, 2])
    assert generation.ids.tolist() == [9, 2]
    assert (generation.finish_reason.kind, generation.finish_reason.stop_id) == ("stop", 2)
    assert np.abs(generation.logprobs - reference_logprobs(model, np.array([1, 5, 9, 2]))[1:]).max() < 1e-4
    assert all(value != 0.0 for value in generation.logprobs.tolist())


def test_the_engine_refuses_by_name_through_the_service(served: Any) -> None:
    client, _ = served
    neighbour = client.stream([7], max_new_tokens=40, seed=1, ignore_eos=True)
    for arguments, field in (
        ({"prompt_ids": [256]}, "prompt_ids"),
        ({"stop_ids": [-1]}, "stop_ids"),
        ({"max_new_tokens": 600}, "max_new_tokens"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            client.generate(**{"prompt_ids": [1], **arguments})
        assert refused.value.field == field
    disturbed = [token for delta in neighbour for token in delta.ids.tolist()]
    alone = client.generate([7], max_new_tokens=40, seed=1, ignore_eos=True)
    assert disturbed == alone.ids.tolist()


def test_weights_pushed_from_a_file_are_proven_and_served(served: Any, tmp_path: Path) -> None:
    client, _ = served
    other = tmp_path / "other"
    write_checkpoint(other, "llama", seed=1)
    tensors = checkpoint_tensors(other)
    manifest = {name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)} for name, tensor in tensors.items()}
    path = Path(client.info().weights_dir) / "step-1.safetensors"
    save_file(tensors, path)
    ids = [3, 1, 4, 1, 5, 9]
    good = [rollout.CanarySpec(ids=ids, expected_logprobs=reference_logprobs(other, np.array(ids)))]
    wrong = [rollout.CanarySpec(ids=ids, expected_logprobs=np.zeros(5, np.float32))]
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    before = client.info().version
    running = client.stream([2], max_new_tokens=400, seed=4, ignore_eos=True, forced_ids=[5] * 400)
    next(running)
    with pytest.raises(CanaryMismatch, match="canaries differ"):
        _push(client, manifest, path, digests, wrong)
    assert client.score(ids).version == before
    report = _push(client, manifest, path, digests, good)
    assert report.canary_gap is not None
    assert report.canary_gap < 1e-3
    assert report.changed_tensors == len(tensors)
    generation = client.generate([1, 5], max_new_tokens=10, seed=2)
    assert set(generation.versions.tolist()) == {report.version}
    expected = reference_logprobs(other, np.concatenate([generation.prompt_ids, generation.ids]))[1:]
    assert np.abs(generation.logprobs - expected).max() < 1e-4
    kept = list(running)[-1].finished
    assert len(kept.ids) == 400
    assert set(kept.versions.tolist()) <= {before, report.version}


def _push(client: Any, manifest: Any, path: Path, digests: Any, canaries: Any) -> rollout.UpdateReport:
    ticket = client.weights_begin(manifest)
    client.weights_stage_file(ticket.update_id, str(path), size=path.stat().st_size)
    return client.weights_commit(ticket.update_id, digests=digests, canaries=canaries)  # type: ignore[no-any-return]


def test_the_tokenizer_comes_with_the_service(served: Any, model: Path) -> None:
    client, _ = served
    files = client.tokenizer_files()
    assert set(files) >= {"tokenizer.json", "chat_template.jinja", "config.json"}
    assert files["tokenizer.json"] == (model / "tokenizer.json").read_bytes()
    assert client.tokenizer().encode("b").ids == [1]
    assert len(client.info().tokenizer_digest) == 64


def test_the_command_line_finds_and_shows_the_running_service(served: Any) -> None:
    client, state = served
    status, out = command_line(state, "info", "--json")
    assert (status, json.loads(out)["incarnation"]) == (0, client.info().incarnation)
    status, out = command_line(state, "stats")
    assert status == 0
    assert "engine.decode_launches" in out


def test_the_command_line_refuses_an_occupied_address_and_an_absent_service(served: Any, model: Path, tmp_path: Path) -> None:
    client, state = served
    status, out = command_line(state, "serve", "--model", str(model))
    assert status == 1
    assert client.address in out
    status, out = command_line(tmp_path, "info", "--json")
    assert (status, json.loads(out)["error"]["code"]) == (1, "no_service")


def test_check_reports_every_part_with_remedies(served: Any) -> None:
    client, state = served
    status, out = command_line(state, "check", "--json")
    report = json.loads(out)
    names = {finding["name"]: finding for finding in report["findings"]}
    assert set(names) == {
        "python", "torch", "cpu threads", "cuda", "mapped memory", "packages", "zmq ipc", "encryption", "state folder", "disk",
        "shared memory", "running services",
    }  # fmt: skip
    assert client.address in names["running services"]["value"]
    assert (status == 0) == report["ok"]
    assert all(finding["remedy"] for finding in report["findings"] if finding["ok"] is False)
    assert names["torch"]["value"].startswith(torch.__version__.split("+")[0])


def test_serve_prints_a_snippet_that_works(served: Any) -> None:
    _, state = served
    snippet = "\n".join(line.strip() for line in (state / "log").read_text().splitlines() if line.startswith("    "))
    assert "rollout.connect()" in snippet
    environment = os.environ | {"ARENO_STATE_DIR": str(state)}
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert done.stdout.startswith("[")
