"""A trainer process with its weights on a device: `python -m tests.gpu.trainer_process ADDRESS FOLDER TRANSPORT PUSHES DEVICE [KILLED_AT]`.

It pushes a checkpoint's weights, a little smaller each time, spoils them as soon as they are staged, and prints its reports as JSON.
With KILLED_AT it kills itself before it sends that bucket.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import rollout
from trainer_bridge import WeightPush

REPOSITORY = Path(__file__).resolve().parents[2]
BUCKET_BYTES = 1 << 16
Report = dict[str, Any]


class Weights(torch.nn.Module):
    """Tensors of a checkpoint as a model's parameters."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return them under the checkpoint's names, which have dots."""
        return iter([(name, torch.nn.Parameter(tensor)) for name, tensor in self.tensors.items()])

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Return them."""
        return iter([parameter for _, parameter in self.named_parameters()])


def kill_before(push: WeightPush, number: int) -> None:
    """Let this process be killed before it sends its bucket of this number."""
    send, sent = push._transport.send, []

    def sending(bucket: Any) -> None:
        sent.append(1)
        if len(sent) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        send(bucket)

    push._transport.send = sending  # type: ignore[method-assign]


def run(address: str, folder: str, transport: str, pushes: int, device: str, killed_at: int = 0) -> list[Report]:
    """Push so often; return the reports."""
    torch.cuda.set_device(device)
    tensors = {name: tensor.to(device) for name, tensor in load_file(f"{folder}/model.safetensors").items()}
    reports = []
    with rollout.connect(address, timeout_s=60) as client:
        push = WeightPush(client, Weights(tensors), transport=transport, bucket_bytes=BUCKET_BYTES)
        push._model = None
        if killed_at:
            kill_before(push, killed_at)
        for _ in range(pushes):
            for tensor in tensors.values():
                tensor.mul_(0.99)
            pending = push.push(list(tensors.items()), canary=None, wait="staged")
            kept = {name: tensor.clone() for name, tensor in tensors.items()}
            for tensor in tensors.values():
                tensor.zero_()
            report = pending.result()
            for name, tensor in kept.items():
                tensors[name].copy_(tensor)
            told = {name: getattr(report, name) for name in ("version", "transport", "changed_tensors", "num_tensors")}
            reports.append({**told, "reason": report.transport_reason})
    return reports


def started(
    address: str | None, folder: Path, transport: str, *, pushes: int, device: str, killed_at: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a trainer process to its end."""
    arguments = [str(address), str(folder), transport, str(pushes), device, str(killed_at)]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gpu.trainer_process", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), *sys.path[1:])), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def trainer(
    address: str | None, folder: Path, transport: str, *, pushes: int = 2, device: str = "cuda:0", **environment: str
) -> list[Report]:
    """Run a trainer process; return the reports of its pushes."""
    done = started(address, folder, transport, pushes=pushes, device=device, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))))
