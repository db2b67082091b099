"""The names that an agent loop may rely on."""

from __future__ import annotations

import pytest

import rollout.agent

NAMES = """
    AgentError BadCall CallCounts CallReader ChatFormat ChatFormatError Environment Episode EpisodeLimits EpisodeResult EpisodeRow
    EpisodeStateError EpisodeStatus EpisodeTask Failure FailureKind InvalidEpisode Limit NoToolCalls PhaseTimeouts Progress Start
    Step TokenizerMismatch Tool ToolBox ToolCall ToolError ToolLimits ToolResult Turn TurnRecord TurnSampling derive_seed
    group_tasks run_episode run_episodes
"""
PUBLIC = NAMES.split()


def test_the_public_list_is_the_committed_one_and_every_name_resolves() -> None:
    assert sorted(rollout.agent.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(rollout.agent, name).__name__ == name


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Epsiode'; known: .*Episode"):
        rollout.agent.Epsiode  # noqa: B018
