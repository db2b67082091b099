"""The rollout service and its client: token ids in, token ids with log-probabilities and weight versions out.

Names load on first use; importing this package loads neither torch nor transformers.

    with rollout.local("path/to/model") as client:
        generation = client.generate([1, 2, 3], max_new_tokens=16)
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "AsyncClient": "rollout.client.client",
    "AsyncStream": "rollout.client.client",
    "CanarySpec": "rollout.client.results",
    "CancelResult": "rollout.client.results",
    "Client": "rollout.client.blocking",
    "Delta": "rollout.client.results",
    "EngineFacts": "rollout.client.results",
    "FinishReason": "rollout.client.results",
    "Generation": "rollout.client.results",
    "GenerationOptions": "rollout.client.parameters",
    "LocalService": "rollout.client.local",
    "PromptScore": "rollout.client.results",
    "RequestFailed": "rollout.errors",
    "RolloutError": "rollout.errors",
    "Score": "rollout.client.results",
    "ServiceConfig": "rollout.config",
    "ServiceInfo": "rollout.client.results",
    "Stream": "rollout.client.blocking",
    "UpdateReport": "rollout.client.results",
    "UpdateTicket": "rollout.client.results",
    "connect": "rollout.client.blocking",
    "connect_async": "rollout.client.client",
    "local": "rollout.client.local",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}; known: {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
