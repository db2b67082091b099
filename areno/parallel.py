"""The ranks of one tensor-parallel engine as a group, and their collectives.

Every rank holds a share of each layer and of the vocabulary (`models/shards.py`), runs the same commands in the same order, and
meets the others in sums and gathers: NCCL between CUDA devices, gloo between processes on the CPU. The group is its own, whatever
else its process does with torch.distributed, and only tensors travel in it.

Invariant: sums have the same bits on every rank. On the CPU they are added in the order of the ranks, so that a row's bits do not
depend on its place; a process that waits for a rank that is gone gets a typed error within the group's time-out.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areno.errors import EngineFailure, InvalidConfig
from areno.loopback import close_ports, listen_by, prove_ranks, wait_for_all

BACKENDS = ("gloo", "nccl")
MAX_CAUSE = 500
_PREFIX = "areno-tp"
_CLOSE_S = 5.0
# Ranks watch over each other themselves (`ranks/watch.py`). The library's own watch would end the whole process where a group is given up.
_NCCL_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


@dataclass(slots=True)
class CollectiveCounts:
    """How many collectives a rank took part in, and their bytes: of the sum's tensor, of all that a gather brings together.

    They count when a collective is issued; one in a captured graph counts once, however often the graph runs.
    """

    all_reduces: int = 0
    all_reduce_bytes: int = 0
    all_gathers: int = 0
    all_gather_bytes: int = 0
    broadcasts: int = 0
    broadcast_bytes: int = 0

    @property
    def collectives(self) -> int:
        """All of them together."""
        return self.all_reduces + self.all_gathers + self.broadcasts


class TPGroup:
    """One rank's end of the group. One thread calls the collectives; `abort` may come from another one.

    Every rank must call the same collectives with the same shapes in the same order. Those of CUDA tensors are launched on the
    current stream, return at once and may be captured.
    """

    __slots__ = ("_aborting", "_backend", "_stop", "_store", "counts", "device", "rank", "size")

    def __init__(self, rank: int, size: int, device: torch.device, backend: Any, store: Any) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._backend, self._store = backend, store
        self._aborting: threading.Thread | None = None
        self._stop: torch.Tensor | None = None
        self.counts = CollectiveCounts()

    @staticmethod
    def single(device: torch.device | None = None) -> TPGroup:
        """Return the group of an engine with one rank, whose collectives do nothing."""
        return TPGroup(0, 1, device or torch.device("cpu"), None, None)

    @staticmethod
    def connect(
        *,
        rank: int,
        size: int,
        init_method: str,
        backend: str,
        timeout_s: float = 60.0,
        device: torch.device | None = None,
        given_up: threading.Event | None = None,
    ) -> TPGroup:
        """Meet the other ranks of this host at `init_method`: a store as file:///folder, made if need be, or tcp://host:port,
        which rank 0 opens.

        `device` is the rank's; with NCCL by default the device of its own number. `given_up`, once set, ends waits in a folder.
        Blocks: until all are there, at most `timeout_s`. Raises: InvalidConfig, EngineFailure.
        """
        import torch.distributed as dist

        if backend not in BACKENDS or not dist.is_available() or (backend == "nccl" and not dist.is_nccl_available()):
            raise InvalidConfig(
                f"backend={backend!r} is not there",
                field="tp",
                value=size,
                limit=f"known: {', '.join(BACKENDS)}; NCCL needs a torch built for CUDA",
                remedy="use device='cpu', or a torch with CUDA",
            )
        device = device or (torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu"))
        if size == 1:
            return TPGroup.single(device)
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            store = _open_store(init_method, rank, size, timeout, given_up)
            group = _backend_group(backend, dist.PrefixStore(_PREFIX, store), rank, size, timeout, device)
        except RuntimeError as error:
            raise _lost(f"rank {rank} of {size} did not meet the others at {init_method}", error) from error
        return TPGroup(rank, size, device, group, store)

    @property
    def stop_word(self) -> torch.Tensor:
        """A word that kernels look at while they wait for other ranks: nonzero once the group is given up. Shapes: int32 [1], pinned."""
        if self._stop is None:
            self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        return self._stop

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a contiguous tensor by its sum over the ranks. Mutates: `tensor`, which is returned. Raises: EngineFailure."""
        if self.size == 1:
            return tensor
        self.counts.all_reduces += 1
        self.counts.all_reduce_bytes += tensor.nbytes
        if tensor.device.type == "cpu":
            parts = self._gather(tensor, tensor.new_empty((self.size, *tensor.shape)))
            torch.add(parts[0], parts[1], out=tensor)
            for part in parts[2:]:
                tensor += part
            return tensor
        import torch.distributed as dist

        options = on_this_stream(dist.AllreduceOptions())
        self._wait("sum", lambda: self._backend.allreduce([tensor], options))
        return tensor

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return every rank's tensor in the ranks' order. Shapes: [...] to [size, ...]. Mutates: `out`. Raises: EngineFailure."""
        if self.size == 1:
            return tensor[None] if out is None else out.copy_(tensor[None])
        out = tensor.new_empty((self.size, *tensor.shape)) if out is None else out
        self.counts.all_gathers += 1
        self.counts.all_gather_bytes += out.nbytes
        return self._gather(tensor, out)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace a contiguous tensor by that of rank `source`. Mutates: `tensor`, which is returned. Raises: EngineFailure."""
        if self.size == 1:
            return tensor
        import torch.distributed as dist

        self.counts.broadcasts += 1
        self.counts.broadcast_bytes += tensor.nbytes
        options = on_this_stream(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = source, 0
        self._wait("broadcast", lambda: self._backend.broadcast([tensor], options))
        return tensor

    def gather_words(self, words: list[int]) -> list[list[int]]:
        """Return every rank's list of signed 64-bit integers; all lists have one length. Blocks: for the other ranks."""
        given = torch.tensor(words, dtype=torch.int64, device=self.device)
        rows: list[list[int]] = self.all_gather(given).tolist()
        return rows

    def abort(self) -> None:
        """End collectives that wait for a lost rank, as far as the backend can; the group is of no use afterwards. Repeatable.

        Returns at once: NCCL tells its kernels to end, then waits until no captured step names the group.
        """
        if self._stop is not None:
            self._stop.fill_(1)
        # Not read under a lock: the thread that waits inside a collective holds on to the backend itself.
        backend = self._backend
        if backend is None or self._aborting is not None:
            return
        self._aborting = threading.Thread(target=_abort, args=(backend,), name="group-abort", daemon=True)
        with contextlib.suppress(RuntimeError):
            self._aborting.start()

    def close(self) -> None:
        """Leave the group; collectives are not possible afterwards. Blocks: at most some seconds, while captured steps name it."""
        self.abort()
        # The library's object goes with the thread that ends it, since its own threads may take their time as well.
        self._backend = self._store = None
        if self._aborting is not None and self._aborting.ident is not None:
            self._aborting.join(_CLOSE_S)

    def _gather(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        from torch.distributed.distributed_c10d import AllgatherOptions

        assert tensor.is_contiguous() and out.is_contiguous(), "collectives take contiguous tensors"
        if tensor.device.type == "cpu":
            self._wait("gather", lambda: self._backend.allgather([list(out.unbind())], [tensor]))
        else:
            options = on_this_stream(AllgatherOptions())
            self._wait("gather", lambda: self._backend._allgather_base(out.view(-1), tensor.view(-1), options))
        return out

    def _wait(self, what: str, start: Callable[[], Any]) -> None:
        try:
            work = start()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise _lost(f"a {what} of rank {self.rank} of {self.size} failed", error) from error


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()


@contextlib.contextmanager
def _defaults_in_environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set what the environment does not say for the length of a block: NCCL's group reads its options there, once."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def on_this_stream(options: Any) -> Any:
    """Ask for a collective on the current stream, where the library has the choice."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _lost(what: str, error: BaseException) -> EngineFailure:
    return EngineFailure(
        what,
        field="tp",
        limit=f"{type(error).__name__}: {str(error)[:MAX_CAUSE]}",
        remedy="a rank has died or hangs; start the engine again",
    )


def _open_store(init_method: str, rank: int, size: int, timeout: datetime.timedelta, given_up: threading.Event | None) -> Any:
    scheme, _, place = init_method.partition("://")
    if scheme == "file":
        from areno.folder_store import FolderStore

        return FolderStore(Path(place), timeout, given_up)
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal():
        raise InvalidConfig(
            f"init_method={init_method!r} is no store",
            field="init_method",
            value=init_method,
            limit="known: file:///folder and tcp://host:port",
            remedy="use file:///folder",
        )
    import torch.distributed as dist

    return dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout)


def nccl_group(store: Any, rank: int, size: int, timeout: datetime.timedelta, device: torch.device) -> Any:
    """Return a group of NCCL whose ranks have met, and who watch over each other themselves: nothing ends the process for them.

    Blocks: until all ranks are there. Raises: RuntimeError.
    """
    import torch.distributed as dist

    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with torch.cuda.device(device), _defaults_in_environment(_NCCL_DEFAULTS):
        group = nccl(store, rank, size, options)
        # The communicator is made by the first collective, which must not be a captured one.
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
    return group


def _backend_group(backend: str, store: Any, rank: int, size: int, timeout: datetime.timedelta, device: torch.device) -> Any:
    import torch.distributed as dist

    if backend == "nccl":
        return nccl_group(store, rank, size, timeout, device)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    wait_for_all(store, rank, size)
    opened, ports = listen_by(lambda: gloo.create_device(hostname="127.0.0.1"))
    options._devices, options._timeout = [opened], timeout
    group = gloo(store, rank, size, options)
    prove_ranks(group, store, rank, size, timeout)
    close_ports(ports)
    return group
