"""The names that an agent loop may rely on."""

from __future__ import annotations

import pytest

import rollout.agent

NAMES = """
    AgentError BadCall Branch BranchKind CallCounts CallReader ChatFormat ChatFormatError Environment Episode EpisodeGroup
    EpisodeLimits EpisodeResult EpisodeRow EpisodeStateError EpisodeStatistics EpisodeStatus EpisodeTask Failure FailureKind
    GroupResult InfrastructureFailure InvalidEpisode Limit NoToolCalls PhaseTimeouts Progress Start Step TokenizerMismatch Tool
    ToolBox ToolCall ToolError ToolLimits ToolResult Turn TurnRecord TurnSampling all_equal_bounded derive_seed group_tasks k_done
    run_episode run_episodes run_group run_groups
"""
PUBLIC = NAMES.split()


def test_the_public_list_is_the_committed_one_and_every_name_resolves() -> None:
    assert sorted(rollout.agent.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(rollout.agent, name).__name__ == name


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Epsiode'; known: .*Episode"):
        rollout.agent.Epsiode  # noqa: B018
