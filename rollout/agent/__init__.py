"""Episodes for agent loops: exact token records, chat rendering, tools, environments, and a runner for many at once.

Names load on first use, so that importing this package loads neither transformers nor tokenizers.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "AgentError": "rollout.agent.errors",
    "BadCall": "rollout.agent.tools",
    "Branch": "rollout.agent.lineage",
    "BranchKind": "rollout.agent.lineage",
    "CallCounts": "rollout.agent.tools",
    "CallReader": "rollout.agent.call_reader",
    "ChatFormat": "rollout.agent.chat",
    "ChatFormatError": "rollout.agent.errors",
    "Environment": "rollout.agent.environment",
    "Episode": "rollout.agent.episode",
    "EpisodeGroup": "rollout.agent.groups",
    "EpisodeLimits": "rollout.agent.limits",
    "EpisodeResult": "rollout.agent.outcomes",
    "EpisodeRow": "rollout.agent.record",
    "EpisodeStateError": "rollout.agent.errors",
    "EpisodeStatistics": "rollout.agent.groups",
    "EpisodeStatus": "rollout.agent.standing",
    "EpisodeTask": "rollout.agent.outcomes",
    "Failure": "rollout.agent.outcomes",
    "FailureKind": "rollout.agent.outcomes",
    "GroupResult": "rollout.agent.groups",
    "InfrastructureFailure": "rollout.agent.errors",
    "InvalidEpisode": "rollout.agent.errors",
    "Limit": "rollout.agent.limits",
    "NoToolCalls": "rollout.agent.tools",
    "PhaseTimeouts": "rollout.agent.outcomes",
    "Progress": "rollout.agent.runner",
    "Start": "rollout.agent.environment",
    "Step": "rollout.agent.environment",
    "TokenizerMismatch": "rollout.agent.errors",
    "Tool": "rollout.agent.tools",
    "ToolBox": "rollout.agent.tools",
    "ToolCall": "rollout.agent.tools",
    "ToolError": "rollout.agent.tools",
    "ToolLimits": "rollout.agent.tools",
    "ToolResult": "rollout.agent.tools",
    "Turn": "rollout.agent.turn",
    "TurnRecord": "rollout.agent.record",
    "TurnSampling": "rollout.agent.turn",
    "all_equal_bounded": "rollout.agent.groups",
    "derive_seed": "rollout.seeds",
    "group_tasks": "rollout.agent.outcomes",
    "k_done": "rollout.agent.groups",
    "run_episode": "rollout.agent.runner",
    "run_episodes": "rollout.agent.runner",
    "run_group": "rollout.agent.groups",
    "run_groups": "rollout.agent.groups",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'rollout.agent' has no attribute {name!r}; known: {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
