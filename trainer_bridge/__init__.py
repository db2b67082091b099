"""What a trainer imports: groups of finished episodes in, new weights out.

Names load on first use, so that importing one part does not load the others (or torch before it is needed).
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Batch": "trainer_bridge.batch",
    "LogprobGap": "trainer_bridge.loss",
    "PolicyLoss": "trainer_bridge.loss",
    "collate": "trainer_bridge.batch",
    "group_advantages": "trainer_bridge.batch",
    "logprob_gap": "trainer_bridge.loss",
    "policy_loss": "trainer_bridge.loss",
    "sample_advantages": "trainer_bridge.batch",
    "token_logprobs": "trainer_bridge.loss",
    "samples_of": "trainer_bridge.episodes",
    "samples_of_group": "trainer_bridge.episodes",
    "BridgeError": "trainer_bridge.errors",
    "GroupShortfall": "trainer_bridge.errors",
    "InvalidBatch": "trainer_bridge.errors",
    "InvalidOption": "trainer_bridge.errors",
    "InvalidSample": "trainer_bridge.errors",
    "InvalidState": "trainer_bridge.errors",
    "KeptSetsMissing": "trainer_bridge.errors",
    "PushError": "trainer_bridge.errors",
    "PushWarning": "trainer_bridge.errors",
    "RolloutShortfall": "trainer_bridge.errors",
    "ServiceOutage": "trainer_bridge.errors",
    "SourceClosed": "trainer_bridge.errors",
    "TransportUnusable": "trainer_bridge.errors",
    "UnpushableTensor": "trainer_bridge.errors",
    "VersionBehind": "trainer_bridge.errors",
    "WeightsUnchanged": "trainer_bridge.errors",
    "after_step_hook": "trainer_bridge.hooks",
    "SampleStatus": "trainer_bridge.samples",
    "TrainingSample": "trainer_bridge.samples",
    "TurnSpan": "trainer_bridge.turns",
    "GroupTask": "trainer_bridge.groups",
    "RolloutGroup": "trainer_bridge.groups",
    "RolloutSource": "trainer_bridge.source",
    "SourceStats": "trainer_bridge.options",
    "each_member": "trainer_bridge.groups",
    "merge_lora": "trainer_bridge.weights.lora",
    "PendingPush": "trainer_bridge.weights.report",
    "PushReport": "trainer_bridge.weights.report",
    "WeightPush": "trainer_bridge.weights.push",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'trainer_bridge' has no attribute {name!r}; known: {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
