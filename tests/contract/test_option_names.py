"""A name that a public call does not have is refused in the package's own error, with the known names and the one that was meant."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import areno
import areno.option_names
import rollout
import rollout.agent
import rollout.option_names
import trainer_bridge
import trainer_bridge.option_names
from areno.errors import InvalidConfig
from rollout.agent.turn import TurnSampling
from tests.hostile_values import check_refusal
from trainer_bridge.adapters.hf_trainer import PushCallback
from trainer_bridge.adapters.trl import EpisodeRollouts, EpisodeWorker, ServiceWeightTransfer

NOBODY: Any = SimpleNamespace(submit=None)
"""Stands where a connection or a client is needed: a refused call asks nothing of it."""

CALLS: dict[str, tuple[Any, tuple[Any, ...], type[Exception]]] = {
    "EngineConfig": (areno.EngineConfig, (), areno.InvalidConfig),
    "SamplingParams": (areno.SamplingParams, (), areno.InvalidRequest),
    "Request": (areno.Request, (), areno.InvalidRequest),
    "ServiceConfig": (rollout.ServiceConfig, (), rollout.RolloutError),
    "CanarySpec": (rollout.CanarySpec, (), rollout.RolloutError),
    "connect": (rollout.connect, (), rollout.RolloutError),
    "connect_async": (rollout.connect_async, (), rollout.RolloutError),
    **{
        f"{kind.__name__}.{name}": (getattr(kind(NOBODY), name), given, rollout.RolloutError)
        for kind in (rollout.Client, rollout.AsyncClient)
        for name, given in {
            "generate": ([1],),
            "stream": ([1],),
            "generate_group": ([1], 2),
            "stream_group": ([1], 2),
            "evaluate": ([[1]],),
            "score": ([1],),
            "cancel": (),
            "tool_wait": (),
            "sleep": (),
            "weights_begin": (),
            "weights_stage_file": (),
            "weights_commit": (),
            "weights_abort": (),
        }.items()
    },
    "Client.weights_stage_bucket": (rollout.Client(NOBODY).weights_stage_bucket, (), rollout.RolloutError),
    "Client.weights_join_group": (rollout.Client(NOBODY).weights_join_group, (), rollout.RolloutError),
    "Episode": (rollout.agent.Episode, (NOBODY,), rollout.RolloutError),
    "EpisodeLimits": (rollout.agent.EpisodeLimits, (), rollout.RolloutError),
    "EpisodeTask": (rollout.agent.EpisodeTask, (), rollout.RolloutError),
    "EpisodeGroup": (rollout.agent.EpisodeGroup, (), rollout.RolloutError),
    "PhaseTimeouts": (rollout.agent.PhaseTimeouts, (), rollout.RolloutError),
    "ToolLimits": (rollout.agent.ToolLimits, (), rollout.RolloutError),
    "TurnSampling": (TurnSampling, (), rollout.RolloutError),
    "TurnSampling.replaced": (lambda **changes: TurnSampling().replaced(changes), (), rollout.RolloutError),
    "run_episodes": (rollout.agent.run_episodes, (NOBODY, []), rollout.RolloutError),
    "run_group": (rollout.agent.run_group, (NOBODY, rollout.agent.EpisodeGroup(make_environment=Any, members=1)), rollout.RolloutError),
    "run_groups": (rollout.agent.run_groups, (NOBODY, []), rollout.RolloutError),
    **{
        call.__name__: (call, (), trainer_bridge.BridgeError)
        for call in (
            trainer_bridge.WeightPush,
            trainer_bridge.RolloutSource,
            trainer_bridge.after_step_hook,
            trainer_bridge.collate,
            trainer_bridge.each_member,
            trainer_bridge.group_advantages,
            trainer_bridge.logprob_gap,
            trainer_bridge.merge_lora,
            trainer_bridge.policy_loss,
            trainer_bridge.sample_advantages,
            trainer_bridge.samples_of,
            trainer_bridge.samples_of_group,
            trainer_bridge.token_logprobs,
            PushCallback,
            EpisodeRollouts,
            EpisodeWorker,
            ServiceWeightTransfer,
        )
    },
    "WeightPush.push": (object.__new__(trainer_bridge.WeightPush).push, (), trainer_bridge.BridgeError),
    "RolloutSource.next": (object.__new__(trainer_bridge.RolloutSource).next, (), trainer_bridge.BridgeError),
    "RolloutSource.next_async": (object.__new__(trainer_bridge.RolloutSource).next_async, (), trainer_bridge.BridgeError),
}


def made(call: Any, *given: Any, **options: Any) -> Any:
    outcome = call(*given, **options)
    return asyncio.run(outcome) if inspect.iscoroutine(outcome) else outcome


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_name_is_refused_by_every_public_call_with_the_known_ones(name: str) -> None:
    call, given, error = CALLS[name]
    with pytest.raises(error, match="unknown option 'qqzzqq'") as refused:
        made(call, *given, qqzzqq=1)
    check_refusal(refused.value, name)
    assert refused.value.field == refused.value.value == "qqzzqq"
    assert "known: " in refused.value.limit and "self" not in refused.value.limit
    assert refused.value.remedy == "leave qqzzqq out"


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("EngineConfig", "max_row", "did you mean max_rows?"),
        ("EngineConfig", "tensor_parallel_size", "did you mean tp?"),
        ("EngineConfig", "gpu_memory_utilization", "did you mean gpu_memory_fraction?"),
        ("EngineConfig", "enforce_eager", "graphs=False"),
        ("ServiceConfig", "max_num_seqs", "did you mean max_rows?"),
        ("ServiceConfig", "leases", "did you mean lease_s?"),
        ("SamplingParams", "max_tokens", "did you mean max_new_tokens?"),
        ("SamplingParams", "stop", "stop_ids"),
        ("SamplingParams", "temprature", "did you mean temperature?"),
        ("Request", "prompt_token_ids", "did you mean prompt_ids?"),
        ("Request", "max_tokens", "sampling=SamplingParams(max_new_tokens=...)"),
        ("Request", "top_k", "sampling=SamplingParams(top_k=...)"),
        ("Client.generate", "max_tokens", "did you mean max_new_tokens?"),
        ("AsyncClient.evaluate", "n", "generate_group"),
        ("AsyncClient.score", "temprature", "did you mean temperature?"),
        ("connect", "timeout", "did you mean timeout_s?"),
        ("TurnSampling", "max_tokens", "did you mean max_new_tokens?"),
        ("EpisodeLimits", "max_turn", "did you mean max_turns?"),
        ("Client.weights_begin", "partail", "did you mean partial?"),
        ("AsyncClient.weights_commit", "digest", "did you mean digests?"),
        ("WeightPush", "bucket_size", "did you mean bucket_bytes?"),
        ("WeightPush", "transprot", "did you mean transport?"),
        ("WeightPush", "mode", "push(mode=...) takes it"),
        ("WeightPush.push", "transport", "WeightPush(client, model, transport=...) takes it"),
        ("WeightPush.push", "global_step", "did you mean trainer_step?"),
        ("RolloutSource", "num_generations", "did you mean group_size?"),
        ("RolloutSource", "max_stalenes", "did you mean max_staleness?"),
        ("policy_loss", "epsilon", "did you mean clip_low?"),
        ("collate", "pad_token_id", "did you mean pad_id?"),
        ("PushCallback", "evry", "did you mean every?"),
    ],
)
def test_a_name_that_another_library_uses_or_that_is_nearly_right_is_told_what_it_is_here(name: str, given: str, words: str) -> None:
    call, values, error = CALLS[name]
    with pytest.raises(error) as refused:
        made(call, *values, **{given: 1})
    assert words in refused.value.remedy  # type: ignore[attr-defined]


def _parameters(value: object) -> list[str]:
    return list(inspect.signature(value).parameters) if callable(value) else []


@pytest.mark.parametrize("kind", [rollout.Client, rollout.AsyncClient], ids=lambda kind: kind.__name__)
def test_every_method_of_a_client_that_has_parameters_checks_their_names(kind: type) -> None:
    methods = {name for name, method in vars(kind).items() if not name.startswith("_") and len(_parameters(method)) > 1}
    assert {f"{kind.__name__}.{name}" for name in methods - {"episode"}} <= CALLS.keys()


def test_every_public_call_of_the_bridge_that_takes_options_checks_their_names() -> None:
    known = {name for name in trainer_bridge.__all__ if callable(getattr(trainer_bridge, name))}
    errors = {name for name in known if isinstance(getattr(trainer_bridge, name), type) and name not in ("WeightPush", "RolloutSource")}
    assert known - errors <= CALLS.keys()


def test_every_name_of_another_library_leads_to_a_name_or_to_words() -> None:
    known = {
        *areno.EngineConfig.__dataclass_fields__,
        *areno.SamplingParams.__dataclass_fields__,
        *areno.Request.__dataclass_fields__,
        *rollout.GenerationOptions.__annotations__,
        *inspect.signature(rollout.connect).parameters,
    }
    bridge = {parameter for call, _, error in CALLS.values() if error is trainer_bridge.BridgeError for parameter in _parameters(call)}
    assert not [here for here in trainer_bridge.option_names.OTHER_OPTIONS.values() if " " not in here and here not in bridge]
    for table in (areno.option_names.OTHER_OPTIONS, areno.option_names.OTHER_PARAMETERS):
        assert not [here for here in table.values() if " " not in here and here not in known]


@pytest.mark.parametrize(("name", "missing"), [("EngineConfig", "model"), ("Request", "request_id"), ("ServiceConfig", "model")])
def test_what_is_missing_or_has_no_name_is_refused_alike(name: str, missing: str) -> None:
    call, _, error = CALLS[name]
    with pytest.raises(error, match=f"{missing} is missing") as refused:
        call()
    check_refusal(refused.value, name)
    with pytest.raises(error, match="without a name") as refused:
        call("a/model")
    check_refusal(refused.value, name)
    assert f"{name}({missing}=...)" in str(refused.value)


@pytest.mark.parametrize(("name", "missing"), [("WeightPush", "client"), ("RolloutSource", "prompts"), ("after_step_hook", "optimizer")])
def test_what_is_missing_or_too_much_is_refused_by_the_bridge_alike(name: str, missing: str) -> None:
    call, _, error = CALLS[name]
    with pytest.raises(error, match=f"{missing} is missing") as refused:
        call()
    check_refusal(refused.value, name)
    with pytest.raises(error, match="without a name") as refused:
        call(1, 2, 3, 4)
    check_refusal(refused.value, name)


def test_a_prompt_under_another_name_is_told_the_name() -> None:
    with pytest.raises(rollout.RolloutError, match=r"did you mean prompt_ids\?"):
        rollout.Client(NOBODY).generate(input_ids=[1])  # type: ignore[call-arg]


def test_what_breaks_inside_a_call_is_no_fault_of_its_names() -> None:
    @areno.option_names.checks_names(InvalidConfig)
    def broken(*, size: int = 1) -> int:
        return len(size)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        broken(size=2)
    assert list(inspect.signature(broken).parameters) == ["size"]


def test_engine_and_service_have_the_same_rule() -> None:
    engines, services = (Path(module.__file__).read_text() for module in (areno.option_names, rollout.option_names))
    assert engines == services.replace("rollout.errors", "areno.errors")
