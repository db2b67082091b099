"""Weights that never leave the card: a trainer process and an engine process, one device, by interprocess handles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rollout

REPOSITORY = Path(__file__).resolve().parents[2]
pytest.importorskip("cuda.bindings.driver", reason="needs the package cuda-bindings (extra 'cuda')")

TRAINER = """
import json, sys, torch, rollout
from safetensors.torch import load_file
from areno.weights.digest import digest
from trainer_bridge import WeightPush
address, folder, transport, pushes = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
tensors = {name: tensor.cuda() for name, tensor in load_file(folder + "/model.safetensors").items()}
reports = []
with rollout.connect(address, timeout_s=60) as client:
    class Model(torch.nn.Module):
        def named_parameters(self, *args, **options):
            return iter([(name, torch.nn.Parameter(tensor)) for name, tensor in tensors.items()])
        def parameters(self, *args, **options):
            return iter([parameter for _, parameter in self.named_parameters()])
    push = WeightPush(client, Model(), transport=transport, bucket_bytes=1 << 20)
    push._model = None
    for number in range(pushes):
        for tensor in tensors.values():
            tensor.mul_(0.99)
        torch.cuda.synchronize()
        pending = push.push(list(tensors.items()), canary=None, wait="staged")
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.zero_()
        report = pending.result()
        for name, tensor in kept.items():
            tensors[name].copy_(tensor)
        reports.append({"version": report.version, "transport": report.transport, "reason": report.transport_reason,
                        "changed": report.changed_tensors, "tensors": report.num_tensors})
print(json.dumps(reports))
"""


def trainer(address: str, folder: Path, transport: str, *, pushes: int = 2, **environment: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAINER, address, str(folder), transport, str(pushes)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), *sys.path[1:])), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("dtype", "tp"), [("float32", 1), ("bfloat16", 1), ("float32", 2), ("bfloat16", 2)])
def test_the_trainers_memory_is_copied_on_the_card_and_free_once_staged(checkpoint: Callable[..., Path], dtype: str, tp: int) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} CUDA devices")
    folder = checkpoint("qwen3")
    with rollout.local(str(folder), device="cuda", dtype=dtype, tp=tp, max_rows=4, start_timeout_s=200.0) as client:
        assert client.address is not None
        reports = trainer(client.address, folder, "cuda")
        assert all(report["transport"] == "cuda" and report["changed"] == report["tensors"] for report in reports)
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
