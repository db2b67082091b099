"""One rank of an FSDP2 trainer with a device of its own: `python -m tests.gpu.sharded_trainer RANK SIZE FIRST FOLDER ADDRESS TRANSPORT`.

Ranks are on the cards from FIRST on (or "cpu"). They make a training step and push, twice; rank 0 talks to the service at ADDRESS, writes
the whole weights to FOLDER/whole.safetensors, and prints its reports as JSON.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rollout
from tests.fixtures_models import tiny_model
from trainer_bridge import WeightPush


def sharded(device: torch.device, size: int) -> torch.nn.Module:
    """Return a model that all ranks train together."""
    model = tiny_model("llama", seed=41).requires_grad_(True).to(device)
    mesh = init_device_mesh(device.type, (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_step(model: torch.nn.Module, device: torch.device, rank: int) -> None:
    """Make one step whose gradient depends on all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.randint(3, 250, (1, 12), generator=torch.Generator().manual_seed(rank)).to(device)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def run(rank: int, size: int, first: str, folder: Path, address: str, transport: str) -> list[dict[str, Any]]:
    """Train and push twice; return the reports."""
    device = torch.device("cpu") if first == "cpu" else torch.device("cuda", int(first) + rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    client = rollout.connect(address, timeout_s=60) if rank == 0 else None
    model = sharded(device, size)
    push = WeightPush(client, model, transport=transport, bucket_bytes=1 << 16)
    reports = []
    for _ in range(2):
        train_step(model, device, rank)
        report = push.push()
        told = {name: getattr(report, name) for name in ("version", "transport", "canary_gap", "changed_tensors", "num_tensors")}
        reports.append({**told, "reason": report.transport_reason})
    whole = {name: tensor.full_tensor().detach().cpu() for name, tensor in model.named_parameters()}  # type: ignore[operator]
    if rank == 0:
        save_file(whole, folder / "whole.safetensors")
    if client is not None:
        client.close()
    dist.destroy_process_group()
    return reports


if __name__ == "__main__":
    own = int(sys.argv[1])
    found = run(own, int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5], sys.argv[6])
    if own == 0:
        print(json.dumps(found), flush=True)
