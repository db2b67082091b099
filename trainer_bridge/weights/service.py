"""The service as a push sees it: the calls of its blocking client, and the facts that every rank must know."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trainer_bridge.errors import InvalidOption, PushError
from trainer_bridge.weights.names import DTYPES
from trainer_bridge.weights.transport import BucketClient


class WeightClient(BucketClient, Protocol):
    """What a push needs of the service's blocking client."""

    def info(self) -> Any: ...

    def weights_begin(
        self, manifest: Mapping[str, Any] | None, *, trainer_step: int | None, restore: int | None, partial: bool, timeout_s: float | None
    ) -> Any: ...

    def weights_commit(
        self, update_id: str, *, digests: Mapping[str, int] | None, canaries: Sequence[Any] = (), mode: str, drain_s: float
    ) -> Any: ...

    def weights_abort(self, update_id: str, *, timeout_s: float | None) -> None: ...


def checked_client(client: WeightClient | None) -> WeightClient:
    """Return rank 0's client. Raises: InvalidOption for what cannot push: none, an async one, a stranger."""
    if client is None:
        raise InvalidOption(
            "this rank has no client", field="client", value=None, limit="rank 0 talks to the service", remedy="pass rollout.connect()"
        )
    kind = type(client).__name__
    if inspect.iscoroutinefunction(getattr(client, "info", None)):
        raise InvalidOption(
            f"client is an {kind}",
            field="client",
            value=kind,
            limit="a push blocks its caller, so it needs the blocking client",
            remedy="pass rollout.connect(), or the client whose .aio this one is",
        )
    if not callable(getattr(client, "weights_begin", None)):
        raise InvalidOption(
            f"client is a {kind}",
            field="client",
            value=kind,
            limit="a blocking client of the service",
            remedy="pass rollout.connect(address), or the client of `with rollout.local(...) as client`",
        )
    return client


def service_facts(info: Any) -> dict[str, Any]:
    """Return version, dtype and limits of a service as plain values. Raises: PushError, InvalidOption."""
    engine = info.engine
    if engine is None:
        raise PushError(
            "the service has no running engine",
            field="engine",
            value=None,
            limit="a push needs its limits",
            remedy="wait until info().engine is there",
        )
    name = str(engine.dtype)
    if name not in DTYPES:
        raise InvalidOption(
            f"the service serves {name}", field="dtype", value=name, limit=f"known: {', '.join(DTYPES)}", remedy="serve --dtype float32"
        )
    return {"version": info.version, "dtype": name, "num_valid_ids": engine.num_valid_ids, "max_model_len": engine.max_model_len}
