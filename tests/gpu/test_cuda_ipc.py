"""Weights that never leave the card: a trainer process and an engine process, one device, by interprocess handles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rollout
from tests.gpu.trainer_process import trainer

pytest.importorskip("cuda.bindings.driver", reason="needs the package cuda-bindings (extra 'cuda')")


@pytest.mark.parametrize(("dtype", "tp"), [("float32", 1), ("bfloat16", 1), ("float32", 2), ("bfloat16", 2)])
def test_the_trainers_memory_is_copied_on_the_card_and_free_once_staged(checkpoint: Callable[..., Path], dtype: str, tp: int) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} CUDA devices")
    folder = checkpoint("qwen3")
    with rollout.local(str(folder), device="cuda", dtype=dtype, tp=tp, max_rows=4, start_timeout_s=200.0) as client:
        reports = trainer(client.address, folder, "cuda")
        assert all(report["transport"] == "cuda" and report["changed_tensors"] == report["num_tensors"] for report in reports)
        assert client.info().version == reports[-1]["version"]
        assert len(client.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True).ids) == 4


def test_memory_that_no_other_process_can_open_bounces_and_the_report_says_so(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3")
    with rollout.local(str(folder), device="cuda", dtype="float32", max_rows=4, start_timeout_s=200.0) as client:
        reports = trainer(client.address, folder, "cuda", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        assert all("bounced" in str(report["reason"]) for report in reports)


@pytest.mark.parametrize(("transport", "taken"), [("auto", "cuda"), ("memory", "memory"), ("group", "group"), ("frames", "frames")])
def test_the_other_transports_serve_a_device_too(checkpoint: Callable[..., Path], transport: str, taken: str) -> None:
    folder = checkpoint("qwen3")
    with rollout.local(str(folder), device="cuda", dtype="bfloat16", max_rows=4, start_timeout_s=200.0) as client:
        [report] = trainer(client.address, folder, transport, pushes=1)
        assert report["transport"] == taken
        if taken == "group":
            assert "gloo" in str(report["reason"]), "NCCL is refused where trainer and engine share the device"
