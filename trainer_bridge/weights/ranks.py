"""The ranks of a sharded trainer during a push: all take part, one talks to the service, and all end it the same way.

    rank 0       options --ok?--> begin --ok?--> gather and stage --ok?--> canaries --ok?--> commit --report--> return
    other ranks  options --ok?-->       --ok?--> gather           --ok?--> canaries --ok?-->        --report--> return

After each step all hear whether it went well on each of them. A rank on which it did not has gone through the gathering all the same,
so that nobody waits in a collective that never comes; the others raise the error that the first such rank had. Texts travel as
bytes of JSON, no objects. Invariant: every rank runs the same collectives in the same order, whatever fails on one or all of them.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from trainer_bridge.errors import InvalidOption, PushError

OUR_DEFAULT = "auto"
_ERROR_FIELDS = ("what", "field", "limit", "remedy")


class Ranks:
    """The processes that push together. Without a process group it is this one alone, and nothing is said."""

    def __init__(self, process_group: Any = OUR_DEFAULT) -> None:
        if isinstance(process_group, str) and process_group != OUR_DEFAULT:
            raise InvalidOption(
                f"process_group={process_group!r}",
                field="process_group",
                value=process_group,
                limit="'auto', a torch.distributed process group, or None for this process alone",
                remedy="leave it out: every rank of the default group then calls push()",
            )
        if process_group == OUR_DEFAULT:
            process_group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self._group = process_group
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        if self.rank < 0:
            raise InvalidOption(
                "this process is no rank of process_group",
                field="process_group",
                value="a group of other processes",
                limit="the ranks that push together",
                remedy="make and call a WeightPush on the ranks of the group alone",
            )

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the service."""
        return self.rank == 0

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor where the group's collectives take it."""
        backend = dist.get_backend(self._group)
        return values.to(torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu"))

    def _broadcast(self, values: torch.Tensor, speaker: int) -> torch.Tensor:
        moved = self._placed(values)
        dist.broadcast(moved, src=dist.get_global_rank(self._group, speaker), group=self._group)
        return moved.cpu()

    def _first_failed(self, *, failed: bool) -> int | None:
        """Return the first rank on which a step failed, None where it went well on all."""
        first = self._placed(torch.tensor([self.rank if failed else self.size], dtype=torch.int64))
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
        return int(first[0]) if int(first[0]) < self.size else None

    def _said(self, speaker: int, said: dict[str, Any]) -> dict[str, Any]:
        """Return what one rank says, on every rank."""
        content = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        size = int(self._broadcast(torch.tensor([content.numel()], dtype=torch.int64), speaker)[0])
        heard = self._broadcast(content if self.rank == speaker else torch.zeros(size, dtype=torch.uint8), speaker)
        return dict(json.loads(bytes(heard.numpy()).decode()))

    def agree(self, outcome: dict[str, Any] | BaseException) -> dict[str, Any]:
        """Let all ranks know how a step ended on each; return what rank 0 has of it. A rank that failed raises its own error itself.

        Blocks: until all ranks are here. Raises: PushError with what another rank failed with.
        """
        failed = isinstance(outcome, BaseException)
        if self.size == 1:
            return {} if failed else outcome  # type: ignore[return-value]
        first = self._first_failed(failed=failed)
        said = self._said(first or 0, _failure(outcome) if isinstance(outcome, BaseException) else {"outcome": outcome})
        if first is None:
            return dict(said["outcome"])
        if failed:
            return {}
        error = said["error"]
        what = f"rank {first} gave the push up: {error['what']}"
        raised = PushError(what, **{name: error.get(name) for name in ("field", "limit", "remedy")})
        raised.code = error["code"]  # type: ignore[misc]
        raise raised


def _failure(error: BaseException) -> dict[str, Any]:
    texts = {name: getattr(error, name, None) for name in _ERROR_FIELDS}
    if texts["what"] is None:
        texts["what"] = f"{type(error).__name__}: {error}"
    code = getattr(error, "code", None)
    fields = {name: None if text is None else str(text) for name, text in texts.items()}
    return {"error": {"code": code if isinstance(code, str) else PushError.code, **fields}}
