"""The ranks of a sharded trainer during a push: all take part, one talks to the service, and all end it the same way.

    rank 0       begin --ok?--> gather and stage --ok?--> canaries --ok?--> commit --report--> return
    other ranks        --ok?--> gather           --ok?--> canaries --ok?-->        --report--> return

After each step rank 0 says whether it went well. Where it did not, rank 0 has gone through the gathering all the same, so that
nobody waits in a collective that never comes; the others raise the error that it had. Texts travel as bytes of
JSON, no objects. Invariant: every rank runs the same collectives in the same order, whatever fails on rank 0.
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

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the service."""
        return self.rank == 0

    def _broadcast(self, values: torch.Tensor) -> torch.Tensor:
        backend = dist.get_backend(self._group)
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        moved = values.to(device)
        dist.broadcast(moved, src=dist.get_global_rank(self._group, 0), group=self._group)
        return moved.cpu()

    def _say(self, text: str) -> None:
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._broadcast(torch.tensor([content.numel()], dtype=torch.int64))
        self._broadcast(content)

    def _hear(self) -> str:
        size = int(self._broadcast(torch.zeros(1, dtype=torch.int64))[0])
        return bytes(self._broadcast(torch.zeros(size, dtype=torch.uint8)).numpy()).decode()

    def tell(self, outcome: dict[str, Any] | BaseException) -> None:
        """On rank 0: let every rank know how a step ended."""
        if self.size > 1:
            said = _failure(outcome) if isinstance(outcome, BaseException) else {"outcome": outcome}
            self._say(json.dumps(said))

    def listen(self) -> dict[str, Any]:
        """On another rank: return how the step ended. Blocks: until rank 0 tells. Raises: PushError with what rank 0 failed with."""
        said = json.loads(self._hear())
        if "error" not in said:
            return dict(said["outcome"])
        error = said["error"]
        raised = PushError(f"rank 0 gave the push up: {error['what']}", **{name: error.get(name) for name in ("field", "limit", "remedy")})
        raised.code = error["code"]  # type: ignore[misc]
        raise raised


def _failure(error: BaseException) -> dict[str, Any]:
    texts = {name: getattr(error, name, None) for name in _ERROR_FIELDS}
    if texts["what"] is None:
        texts["what"] = f"{type(error).__name__}: {error}"
    code = getattr(error, "code", None)
    fields = {name: None if text is None else str(text) for name, text in texts.items()}
    return {"error": {"code": code if isinstance(code, str) else PushError.code, **fields}}
