"""The seam between a push and what carries its bytes, and the choice among what works.

`push.WeightPush` opens one transport for each update, sends it buckets of tensors and closes it; the engine's end is the
service's weight intake. None of them pickles. Invariant: when `close` returns, every tensor that was sent is staged; after
`abort` nothing of the update is left on this side.

    cuda      the trainer's own device memory, by interprocess handles: one copy on the card
    memory    segments of shared memory used in turn: one copy here, one there, at the same time
    file      safetensors files on a disk that both see
    frames    messages over the control socket, for a service that shares nothing with the trainer
    group     broadcasts in a process group of trainer rank 0 and the engine host; only where it is asked for
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from trainer_bridge.errors import InvalidOption, TransportUnusable

TRANSPORTS = ("auto", "cuda", "memory", "file", "frames", "group")
# What a service says that cannot be reached this way; one of an older version does not know the operation.
UNREACHED = ("transport_unavailable", "unknown_operation", "weights_file_refused")
Bucket = Mapping[str, torch.Tensor]
_PARTS = ("name", "reason", "bucket_bytes", "open", "send", "close", "abort")


class SentCall(Protocol):
    """A call under way."""

    def result(self, timeout_s: float | None = None) -> Any: ...


class BucketClient(Protocol):
    """What transports need of the service's blocking client."""

    def weights_stage_file(self, update_id: str, path: str, *, size: int, xxh3: str | None, timeout_s: float | None = None) -> None: ...

    def weights_stage_bucket(
        self,
        update_id: str,
        bucket: int,
        *,
        size: int,
        pieces: Mapping[str, Any],
        handle: Mapping[str, Any],
        xxh3: str | None = None,
        content: Any = None,
    ) -> SentCall: ...

    def weights_join_group(
        self,
        update_id: str,
        *,
        host: str,
        port: int,
        backend: str,
        timeout_s: float,
        device: bytes | None = None,
        group: bytes | None = None,
    ) -> SentCall: ...


class Transport(Protocol):
    """Carries the tensors of one update after the other. `name` and `reason` go into the report, `bucket_bytes` sizes the buckets.

    `open` raises TransportUnusable where trainer or service cannot use it; `send` returns when the tensors may be changed or
    freed, which is before they are staged; `close` when all are staged; `abort` never raises.
    """

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def bucket_bytes(self) -> int: ...

    def open(self, info: Any, update_id: str) -> None: ...

    def send(self, bucket: Bucket) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def unusable(transport: str, why: str, remedy: str, *, value: object = None) -> TransportUnusable:
    """Return the error for a transport that cannot be used between this trainer and this service."""
    return TransportUnusable(
        f"transport {transport!r} cannot be used", field="transport", value=transport if value is None else value, limit=why, remedy=remedy
    )


def reached(transport: str, call: Callable[[], Any], remedy: str) -> None:
    """Make a first call by a transport. Raises: TransportUnusable where the service says that it cannot be reached so."""
    try:
        call()
    except Exception as error:
        if getattr(error, "code", None) not in UNREACHED:
            raise
        raise unusable(transport, str(error), remedy) from error


class AutoTransport:
    """The first of several transports that opens; the others' reasons are told."""

    def __init__(self, candidates: Sequence[Transport]) -> None:
        self._candidates = tuple(candidates)
        self._chosen: Transport | None = None
        self._reason = "not opened yet"

    def _open_one(self) -> Transport:
        assert self._chosen is not None, "a transport is opened first"
        return self._chosen

    @property
    def name(self) -> str:
        """The chosen one's."""
        return "auto" if self._chosen is None else self._chosen.name

    @property
    def reason(self) -> str:
        """Why this one: what spoke against those before it, and what the chosen one has to say."""
        added = "" if self._chosen is None else self._chosen.reason.removeprefix("asked for")
        return self._reason + added

    @property
    def bucket_bytes(self) -> int:
        """The chosen one's."""
        return self._open_one().bucket_bytes

    def open(self, info: Any, update_id: str) -> None:
        """Open the first that works. Raises: TransportUnusable naming what speaks against each."""
        self._chosen = None
        against: list[str] = []
        for transport in self._candidates:
            try:
                transport.open(info, update_id)
            except TransportUnusable as error:
                transport.abort()
                against.append(f"{transport.name}: {error.limit}")
                continue
            except BaseException:
                transport.abort()
                raise
            self._chosen = transport
            self._reason = f"fastest that works{'; not ' + '; not '.join(against) if against else ''}"
            return
        raise unusable("auto", "; ".join(against), "see what is said of each, and choose one by transport=NAME")

    def send(self, bucket: Bucket) -> None:
        """Send by the chosen one."""
        self._open_one().send(bucket)

    def close(self) -> None:
        """Close the chosen one."""
        self._open_one().close()

    def abort(self) -> None:
        """Abort the chosen one."""
        if self._chosen is not None:
            self._chosen.abort()


def _checked(transport: Transport) -> Transport:
    """Return an object that has what a push uses of a transport. Raises: InvalidOption, before an update is open."""
    # Without asking: before `open` a transport may have no size to tell.
    lacking = [part for part in _PARTS if inspect.getattr_static(transport, part, None) is None]
    if lacking:
        raise InvalidOption(
            f"transport is a {type(transport).__name__} without {', '.join(lacking)}",
            field="transport",
            value=type(transport).__name__,
            limit=f"known: {', '.join(TRANSPORTS)}, or an object with {', '.join(_PARTS)}",
            remedy="leave it at 'auto', which takes the fastest that works and reports which",
        )
    return transport


def make_transport(
    choice: str | Transport, client: BucketClient, *, bucket_bytes: int | None, timeout_s: float, device: torch.device
) -> Transport:
    """Return the transport of this name. `device` is where the trainer's weights are. Raises: InvalidOption."""
    from trainer_bridge.weights.cuda_ipc import CudaIpcTransport
    from trainer_bridge.weights.file import FileTransport
    from trainer_bridge.weights.frames import FramesTransport
    from trainer_bridge.weights.memory import DEVICE_BUCKET_BYTES, SharedMemoryTransport
    from trainer_bridge.weights.process_group import ProcessGroupTransport

    if not isinstance(choice, str):
        return _checked(choice)
    size: dict[str, Any] = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    shared: dict[str, Any] = ({"bucket_bytes": DEVICE_BUCKET_BYTES, "pinned": True} if device.type == "cuda" else {}) | size
    on_device = device if device.type == "cuda" else None
    makers: dict[str, Callable[[], Transport]] = {
        "cuda": lambda: CudaIpcTransport(client, device=device, timeout_s=timeout_s, **size),
        "memory": lambda: SharedMemoryTransport(client, timeout_s=timeout_s, **shared),
        "file": lambda: FileTransport(client, timeout_s=timeout_s, probe=choice == "auto", **size),
        "frames": lambda: FramesTransport(client, timeout_s=timeout_s, **size),
        "group": lambda: ProcessGroupTransport(client, device=on_device, timeout_s=timeout_s, **size),
    }
    if choice == "auto":
        return AutoTransport([make() for name, make in makers.items() if name != "group"])
    if choice not in makers:
        raise InvalidOption(
            f"transport={choice!r}",
            field="transport",
            value=choice,
            limit=f"known: {', '.join(TRANSPORTS)}",
            remedy="leave it at 'auto', which takes the fastest that works and reports which",
        )
    return makers[choice]()
