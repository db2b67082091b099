"""An inference engine for RL rollouts: token ids in, token ids and true log-probabilities out.

Names load on first use, so that importing a light part (`areno.weights.digest`) does not load the engine.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ArenoError": "areno.errors",
    "CheckpointError": "areno.errors",
    "EngineFailure": "areno.errors",
    "InvalidConfig": "areno.errors",
    "InvalidRequest": "areno.errors",
    "RequestTooLong": "areno.errors",
    "UnsupportedModel": "areno.errors",
    "WeightUpdateError": "areno.errors",
    "EngineConfig": "areno.config",
    "Engine": "areno.engine",
    "EngineInfo": "areno.info",
    "Score": "areno.score",
    "Canary": "areno.weights.canary",
    "TensorSpec": "areno.weights.names",
    "UpdateReport": "areno.weights.report",
    "FinishKind": "areno.step_output",
    "FinishReason": "areno.step_output",
    "Finished": "areno.step_output",
    "PromptScore": "areno.step_output",
    "Request": "areno.request",
    "SamplingParams": "areno.request",
    "StepOutput": "areno.step_output",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'areno' has no attribute {name!r}; known: {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
