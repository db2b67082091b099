"""The public names of the three packages: what is written here is what a user may rely on. A change here is a change to the changelog."""

from __future__ import annotations

import importlib

import pytest

PUBLIC = {
    "areno": """
        ArenoError Canary CheckpointError Engine EngineConfig EngineFailure EngineInfo FinishKind FinishReason Finished InvalidConfig
        InvalidRequest PromptScore Request RequestTooLong SamplingParams Score StepOutput TensorSpec UnsupportedModel UpdateReport
        WeightUpdateError
    """,
    "rollout": """
        AsyncClient AsyncStream CanarySpec CancelResult Client Delta EngineFacts FinishReason Generation GenerationOptions LocalService
        PromptScore RequestFailed RolloutError Score ServiceConfig ServiceInfo Stream UpdateReport UpdateTicket connect connect_async local
    """,
    "rollout.agent": """
        AgentError BadCall Branch BranchKind CallCounts CallReader ChatFormat ChatFormatError Environment Episode EpisodeGroup
        EpisodeLimits EpisodeResult EpisodeRow EpisodeStateError EpisodeStatistics EpisodeStatus EpisodeTask Failure FailureKind
        GroupResult InfrastructureFailure InvalidEpisode Limit NoToolCalls PhaseTimeouts Progress Start Step TokenizerMismatch Tool
        ToolBox ToolCall ToolError ToolLimits ToolResult Turn TurnRecord TurnSampling all_equal_bounded derive_seed group_tasks
        k_done run_episode run_episodes run_group run_groups
    """,
    "trainer_bridge": """
        Batch BridgeError GroupShortfall GroupTask InvalidBatch InvalidOption InvalidSample InvalidState KeptSetsMissing
        LogprobGap PendingPush PolicyLoss PushError PushReport PushWarning RolloutGroup RolloutShortfall RolloutSource
        SampleStatus ServiceOutage SourceClosed SourceStats TrainingSample TransportUnusable TurnSpan UnpushableTensor
        VersionBehind WeightPush WeightsUnchanged after_step_hook collate each_member group_advantages logprob_gap merge_lora
        policy_loss sample_advantages samples_of samples_of_group token_logprobs
    """,
}


def names(package: str) -> list[str]:
    return PUBLIC[package].split()


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_the_public_list_is_the_committed_one(package: str) -> None:
    assert sorted(importlib.import_module(package).__all__) == sorted(names(package))


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_every_public_name_resolves(package: str) -> None:
    module = importlib.import_module(package)
    for name in names(package):
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_completion_lists_the_public_names_before_any_is_used(package: str) -> None:
    assert set(names(package)) <= set(dir(importlib.import_module(package)))


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'") as caught:
        module.Nonsense  # noqa: B018
    assert names(package)[0] in str(caught.value)
