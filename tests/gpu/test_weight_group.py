"""Weights over NCCL: a trainer on a card of its own, and an engine of one or two ranks on the cards before it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rollout
from tests.fixtures_models import reference_logprobs, tiny_model, write_checkpoint
from tests.gpu.trainer_process import REPOSITORY, started, trainer

pytestmark = pytest.mark.gpu
LEASE_S = 2.0
TRAINER_RANKS = 2
IDS = list(range(3, 40))


def cards(needed: int) -> str:
    """Return the last of so many devices, the trainer's; skip where they are not there."""
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")
    return f"cuda:{needed - 1}"


@pytest.mark.parametrize(("shape", "tp"), [("qwen3", 1), ("qwen3", 2), ("wide", 2)])
def test_every_rank_gets_its_part_while_the_trainer_goes_on(checkpoint: Callable[..., Path], shape: str, tp: int) -> None:
    device, folder = cards(tp + 1), checkpoint(shape)
    with rollout.local(str(folder), device="cuda", dtype="float32", tp=tp, max_rows=4, start_timeout_s=200.0) as client:
        before = client.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True, temperature=0.0)
        reports = trainer(client.address, folder, "group", device=device, pushes=3)
        assert all(report["transport"] == "group" and "nccl" in report["reason"] for report in reports), reports
        assert all(report["changed_tensors"] == report["num_tensors"] for report in reports), "digests are checked by the service"
        assert client.info().version == reports[-1]["version"]
        after = client.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True, temperature=0.0)
        assert len(after.ids) == 8 and not np.array_equal(after.logprobs, before.logprobs)
        [other] = trainer(client.address, folder, "cuda", device=device, pushes=1)
        assert other["changed_tensors"] == other["num_tensors"], "another trainer's first push"


@pytest.mark.parametrize(("tp", "killed_at"), [(1, 4), (2, 1), (2, 9)])
def test_a_trainer_killed_in_a_bucket_leaves_the_old_weights_and_nothing_else(
    checkpoint: Callable[..., Path], tp: int, killed_at: int
) -> None:
    device, folder = cards(tp + 1), checkpoint("wide")
    with rollout.local(str(folder), device="cuda", dtype="float32", tp=tp, max_rows=4, start_timeout_s=200.0, lease_s=LEASE_S) as client:
        asked = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0}
        before, version = client.generate([1, 2, 3], **asked), client.info().version
        done = started(client.address, folder, "group", pushes=1, device=device, killed_at=killed_at)
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
        again = client.generate([1, 2, 3], **asked)
        assert np.array_equal(again.ids, before.ids) and client.info().version == version
        # Until the dead trainer's lease is over the service is busy with its update.
        time.sleep(2 * LEASE_S)
        reports = trainer(client.address, folder, "group", device=device, pushes=1)
        assert "nccl" in reports[0]["reason"] and client.info().version == reports[0]["version"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_trainer_of_two_ranks_sends_what_it_has_gathered(tmp_path: Path, tp: int) -> None:
    cards(tp + TRAINER_RANKS)
    folder = tmp_path / "tiny"
    write_checkpoint(folder, "llama", seed=0)
    with rollout.local(str(folder), device="cuda", dtype="float32", tp=tp, max_rows=4, start_timeout_s=200.0) as client:
        arguments = [str(TRAINER_RANKS), str(tp), str(tmp_path), str(client.address), "group"]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.gpu.sharded_trainer", str(rank), *arguments],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), *sys.path[1:]))},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(TRAINER_RANKS)
        ]
        try:
            ended = [rank.communicate(timeout=150) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0] * TRAINER_RANKS, [said[-2000:] for _, said in ended]
        reports = json.loads(ended[0][0].splitlines()[-1])
        assert all(report["transport"] == "group" and "nccl" in report["reason"] for report in reports), reports
        assert all(report["changed_tensors"] == report["num_tensors"] and report["canary_gap"] < 1e-3 for report in reports)
        model = tiny_model("llama", seed=0)
        model.load_state_dict(load_file(tmp_path / "whole.safetensors"))
        assert np.abs(client.score(IDS).token_logprobs - reference_logprobs(model, IDS)).max() < 1e-3
