"""One rank of a sharded trainer, as a program: `python -m tests.integration.sharded_trainer RANK FOLDER ADDRESS`.

Rank 0 talks to the service at ADDRESS. Pushes that rank 0 cannot make are tried, then a DDP model is pushed, then an FSDP2 model
four times: well, with a failure on rank 0, well again, and with rank 1 killed before its part. Before the last one, pushes that
fail in each of their steps on one rank or on both are tried with either model, each followed by one that goes well.
Each rank writes what its pushes gave to FOLDER/rank<RANK>.json, line by line, and rank 0 the whole weights of each model to FOLDER;
the test compares.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import weakref
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
from trainer_bridge import PushError, WeightPush
from trainer_bridge.weights import sources

torch.set_num_threads(1)
WORLD = 2
SEEDS = {"ddp": 31, "fsdp2": 32}
# Where a push fails, and on which ranks. A forward of a sharded model is a collective, which all enter or none.
FAILURES = [(step, ranks) for step in ("options", "tensors", "gathering", "canary", "interrupt") for ranks in ((0,), (1,), (0, 1))]


def sharded(kind: str) -> torch.nn.Module:
    """Return a model that both ranks train together."""
    model = tiny_model("llama", seed=SEEDS[kind]).requires_grad_(True)
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_step(model: torch.nn.Module, rank: int, *, looks: bool = False) -> None:
    """Make one step of plain gradient descent whose gradient depends on both ranks; `looks` runs a forward before the weights change."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.randint(3, 250, (1, 12), generator=torch.Generator().manual_seed(rank))
    model(input_ids=ids, labels=ids).loss.backward()
    if looks:
        with torch.no_grad():
            model(input_ids=ids)
    optimizer.step()
    optimizer.zero_grad()


def save_whole(model: torch.nn.Module, path: Path, rank: int) -> None:
    """Write the whole weights, which every rank helps to gather."""
    whole = {
        name.removeprefix("module."): (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        for name, tensor in model.named_parameters()
    }
    if rank == 0:
        save_file(whole, path)


def watch_gathering() -> list[int]:
    """Note how many bytes of gathered tensors are alive at most."""
    alive, most, gather = [0], [0], sources.whole

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        result = gather(tensor)
        size = result.nbytes
        alive[0] += size
        most[0] = max(most[0], alive[0])

        def gone() -> None:
            alive[0] -= size

        weakref.finalize(result.untyped_storage(), gone)
        return result

    sources.whole = watched
    return most


def failing_at(number: int, error: BaseException, gather: Any) -> Any:
    """Return a gathering that fails once, after its collective."""
    counts = itertools.count(1)

    def failing(tensor: torch.Tensor) -> torch.Tensor:
        result = gather(tensor)
        if next(counts) == number:
            raise error
        return result

    return failing


class Rank:
    """This rank, its diary and its client."""

    def __init__(self, rank: int, folder: Path, address: str) -> None:
        self.rank, self.folder = rank, folder
        self.client = rollout.connect(address) if rank == 0 else None

    def note(self, what: str, **values: Any) -> None:
        """Write a line that outlives a kill."""
        with (self.folder / f"rank{self.rank}.json").open("a") as file:
            file.write(json.dumps({"what": what, **values}) + "\n")

    def make(self, what: str, client: Any, model: torch.nn.Module, **options: Any) -> None:
        """Make a push that is refused on rank 0 and write down what each rank hears."""
        try:
            WeightPush(client, model, **options)
        except Exception as error:
            self.note(what, code=getattr(error, "code", type(error).__name__), text=str(error)[:300])

    def push(self, what: str, push: WeightPush, **given: Any) -> None:
        """Push and write down what came of it."""
        try:
            report = push.push(**given)
        except (Exception, KeyboardInterrupt) as error:
            self.note(what, code=getattr(error, "code", type(error).__name__), text=str(error)[:300])
        else:
            fields = {name: getattr(report, name) for name in ("version", "canary_gap", "num_tensors", "changed_tensors", "transport")}
            self.note(what, **fields)

    def run(self) -> None:
        """Go through everything; see the module."""
        model = sharded("ddp")
        self.make("no client", None, model)
        self.make("no transport", self.client, model, transport="carrier pigeon")
        self.make("a stranger", self.client and "ipc://a/socket", model)
        push = WeightPush(self.client, model, transport="file")
        train_step(model, self.rank)
        self.push("ddp", push)
        save_whole(model, self.folder / "ddp.safetensors", self.rank)
        self.fail_everywhere("ddp", model)

        model = sharded("fsdp2")
        most = watch_gathering()
        push = WeightPush(self.client, model, transport="memory", bucket_bytes=8192)
        train_step(model, self.rank)
        self.push("fsdp2", push)
        self.note("most", bytes=most[0])
        train_step(model, self.rank)
        if self.rank == 0:
            self.fail_once(push)
        self.push("refused", push)
        self.push("again", push)
        self.fail_everywhere("fsdp2", model)
        train_step(model, self.rank, looks=True)
        self.push("last", push)
        save_whole(model, self.folder / "fsdp2.safetensors", self.rank)
        dist.barrier()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.push("killed", push)

    def fail_everywhere(self, kind: str, model: torch.nn.Module) -> None:
        """Push with a failure in every step on one rank or on both, and then well, each time."""
        push = WeightPush(self.client, model, transport="memory", allow_unchanged=True)
        for step, ranks in FAILURES:
            what = f"{kind} {step} {''.join(map(str, ranks))}"
            given: dict[str, Any] = {"canary": lambda ids: [-1.0] * (len(ids) - 1)} if step == "canary" else {}
            gather = sources.whole
            if self.rank in ranks:
                if step == "options":
                    given["mode"] = "at night"
                elif step == "tensors":
                    given["named_parameters"] = {"a": 1}
                elif step == "canary":
                    given["canary"] = lambda ids: [-1.0]
                else:
                    sources.whole = failing_at(5, KeyboardInterrupt() if step == "interrupt" else MemoryError("out of memory"), gather)
            self.push(what, push, **given)
            sources.whole = gather
            self.push(f"{what}, then", push)

    @staticmethod
    def fail_once(push: WeightPush) -> None:
        """Let the next bucket fail as a full disk would."""
        send = push._transport.send

        def failing(bucket: Any) -> None:
            push._transport.send = send  # type: ignore[method-assign]
            raise PushError("the disk is full", field="weights_dir", limit="0 bytes are free", remedy="free some")

        push._transport.send = failing  # type: ignore[method-assign]


def main() -> None:
    """Run one rank; after the other was killed there is no group to leave in order."""
    rank, folder, address = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    one = Rank(rank, folder, address)
    one.run()
    if one.client is not None:
        one.client.close()
    os._exit(0)


if __name__ == "__main__":
    main()
