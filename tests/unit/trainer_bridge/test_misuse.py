"""What a trainer may get wrong: every argument is taken or refused by name, and no shape that would only broadcast goes through."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.hostile_values import HOSTILE_VALUES, check_refusal
from tests.unit.trainer_bridge.fakes import FakeWeightService, TinyNet, make_sample
from trainer_bridge import (
    GroupTask,
    InvalidBatch,
    InvalidOption,
    InvalidSample,
    RolloutShortfall,
    RolloutSource,
    TrainingSample,
    TurnSpan,
    UnpushableTensor,
    WeightPush,
    after_step_hook,
    each_member,
    merge_lora,
    samples_of,
)
from trainer_bridge.adapters.hf_trainer import PushCallback
from trainer_bridge.adapters.trl import ServiceWeightTransfer
from trainer_bridge.batch import Batch, collate, group_advantages, sample_advantages
from trainer_bridge.errors import BridgeError
from trainer_bridge.loss import logprob_gap, policy_loss, token_logprobs

VOCAB = 32
GIVEN = {name: getattr(make_sample(), name) for name in TrainingSample.__dataclass_fields__}
TENSORS: tuple[Any, ...] = (torch.zeros(2), torch.tensor([1.0, math.nan]), torch.tensor([[1.0, 2.0]]), torch.tensor(1))
VALUES = (*HOSTILE_VALUES, *TENSORS)


def two() -> list[TrainingSample]:
    return [make_sample(reward=0.0), make_sample(reward=1.0, member=1, seed=1)]


async def _no_group(_task: Any) -> list[TrainingSample]:
    return []


@pytest.mark.parametrize("field", GIVEN)
def test_a_sample_takes_or_refuses_whatever_a_field_is_given(field: str) -> None:
    for number, value in enumerate(VALUES):
        try:
            sample = TrainingSample(**{**GIVEN, field: value})
            collate([sample], [1.0], version=0)
            sample_advantages([sample])
        except BridgeError as error:
            check_refusal(error, (field, number))


@pytest.mark.parametrize("field", TurnSpan.__dataclass_fields__)
def test_a_turn_takes_or_refuses_whatever_a_field_is_given(field: str) -> None:
    for number, value in enumerate(VALUES):
        try:
            turn = TurnSpan(**{"start": 3, "end": 5, field: value})
            collate([TrainingSample(**{**GIVEN, "turns": (turn,)})], [1.0], version=0)
        except InvalidSample as error:
            check_refusal(error, (field, number))


@pytest.mark.parametrize("spans", ["ab", [(0,)], [(0, 1, 2)], [(3, 0), (1, 1)], [(0, 0), (0, 1)], [(-1, 0)], [(0, 1.5)], [(0, True)]])
def test_kv_spans_that_are_no_runs_in_order_are_refused(spans: Any) -> None:
    with pytest.raises(InvalidSample, match="kv_spans"):
        TurnSpan(start=3, end=5, kv_spans=spans)


@pytest.mark.parametrize("reward", ["1", True, np.True_, [1.0], math.nan, 10**400, torch.tensor([1.0, 2.0])])
def test_a_reward_is_one_finite_number(reward: Any) -> None:
    with pytest.raises(InvalidSample, match="give a broken score the status failed") as refusal:
        make_sample(reward=reward)
    assert refusal.value.field == "reward"


@pytest.mark.parametrize("reward", [1, np.float32(0.5), torch.tensor(0.25), np.array(2)])
def test_a_number_of_another_library_is_a_reward(reward: Any) -> None:
    assert make_sample(reward=reward).reward == float(reward)


@pytest.mark.parametrize("name", ["samples", "advantages", "pad_id", "pad_side", "packed", "multiple_of", "version"])
def test_collate_takes_or_refuses_whatever_it_is_given(name: str) -> None:
    for number, value in enumerate(VALUES):
        try:
            collate(**{"samples": two(), name: value})
        except InvalidBatch as error:
            check_refusal(error, (name, number))


@pytest.mark.parametrize("name", ["rewards", "groups", "ddof", "eps", "reward", "group"])
def test_advantages_take_or_refuse_whatever_they_are_given(name: str) -> None:
    for number, value in enumerate(VALUES):
        given: dict[str, Any] = {"rewards": [0.0, 1.0], "groups": [0, 0]}
        given |= {"rewards": [0.0, value]} if name == "reward" else {"groups": [0, value]} if name == "group" else {name: value}
        try:
            assert np.isfinite(group_advantages(**given)).all()
        except InvalidBatch as error:
            check_refusal(error, (name, number))


def test_rewards_and_groups_may_be_tensors() -> None:
    expected = group_advantages([0.0, 1.0, 5.0], [3, 3, 4])
    assert np.array_equal(group_advantages(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([3, 3, 4])), expected)  # type: ignore[arg-type]


@pytest.fixture
def batch() -> Batch:
    return collate(two())


@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(2, 5, 3), torch.zeros(5, VOCAB), torch.zeros(2, 4, VOCAB), torch.zeros(2, 6, VOCAB), torch.zeros(1, 5, VOCAB),
        torch.zeros(3, 5, VOCAB), torch.zeros(2, 5, VOCAB, dtype=torch.int64), np.zeros((2, 5, VOCAB)), None, torch.zeros(0),
    ],
)  # fmt: skip
def test_logits_that_do_not_belong_to_the_batch_are_refused(batch: Batch, logits: Any) -> None:
    with pytest.raises(InvalidBatch, match=r"shape \[2, 5, V\].*not shifted") as refusal:
        token_logprobs(logits, batch)
    check_refusal(refusal.value, logits is None)


@pytest.mark.parametrize(
    "new",
    [
        torch.zeros(2, 5, VOCAB), torch.zeros(5), torch.zeros(1, 5), torch.zeros(2, 1), torch.tensor(0.0), torch.zeros(2, 4),
        torch.zeros(2, 6), torch.zeros(2, 5, dtype=torch.int64), np.zeros((2, 5)), None,
    ],
)  # fmt: skip
def test_logprobs_that_would_only_broadcast_are_refused(batch: Batch, new: Any) -> None:
    for use in (policy_loss, logprob_gap):
        with pytest.raises(InvalidBatch, match=r"batch's shape \[2, 5\].*token_logprobs") as refusal:
            use(new, batch)
        check_refusal(refusal.value, new is None)


@pytest.mark.parametrize("name", ["clip_low", "clip_high", "num_tokens"])
def test_the_loss_takes_or_refuses_whatever_its_options_are_given(batch: Batch, name: str) -> None:
    new = token_logprobs(torch.zeros(2, 5, VOCAB), batch)
    for number, value in enumerate(VALUES):
        try:
            assert math.isfinite(float(policy_loss(new, batch, **{name: value}).loss.detach())), (name, number)
        except InvalidBatch as error:
            check_refusal(error, (name, number))
    for bad in (0, -1, math.nan, True):
        with pytest.raises(InvalidBatch, match="num_tokens"):
            policy_loss(new, batch, num_tokens=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["prompts", "run_group", "group_size", "version", "max_staleness", "max_ahead", "fresh_groups", "min_valid_members", "max_attempts",
     "epochs", "seed", "safe_point", "poll_s", "outage_s"],
)  # fmt: skip
def test_a_source_takes_or_refuses_whatever_it_is_given(name: str) -> None:
    for number, value in enumerate(VALUES):
        try:
            RolloutSource(**{"prompts": [1, 2], "run_group": _no_group, "group_size": 2, "version": lambda: 0, name: value}).close()
        except InvalidOption as error:
            check_refusal(error, (name, number))


@pytest.mark.parametrize("name", ["canary_ids", "autocast", "allow_unchanged", "bucket_bytes", "timeout_s"])
def test_a_push_is_made_or_refused_whatever_an_option_is_given(tmp_path: Path, name: str) -> None:
    service = FakeWeightService(tmp_path)
    for number, value in enumerate(VALUES):
        try:
            WeightPush(service, TinyNet(), **{"transport": "file", "process_group": None, name: value})  # type: ignore[arg-type]
        except InvalidOption as error:
            check_refusal(error, (name, number))
    for bad in ([[1.5, 2]], [[1]], [[-1, 2]], ["ab"], [[True, 1]]):
        with pytest.raises(InvalidOption, match="at least two token ids"):
            WeightPush(service, TinyNet(), transport="file", process_group=None, canary_ids=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["canary", "trainer_step", "partial", "mode", "drain_s", "wait"])
def test_an_argument_that_a_push_cannot_have_is_refused_before_an_update_is_open(tmp_path: Path, name: str) -> None:
    service = FakeWeightService(tmp_path)
    push = WeightPush(service, TinyNet(), transport="file", process_group=None)
    refused = 0
    for number, value in enumerate(value for value in VALUES if not callable(value)):
        given = {"mode": "no mode", name: value} if name != "mode" else {name: value}
        with pytest.raises(InvalidOption) as refusal:
            push.push(**given)  # type: ignore[call-overload]
        check_refusal(refusal.value, (name, number))
        refused += refusal.value.field == name
    assert refused > 20 and "begin" not in service.calls


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_outside_the_mask_changes_neither_loss_nor_gradient_nor_counts(batch: Batch, garbage: float) -> None:
    def trained(batch: Batch, outside: float) -> tuple[float, torch.Tensor, float, float]:
        new = torch.where(batch.loss_mask_ST, batch.logprobs_ST - 0.1, outside).requires_grad_()
        outcome = policy_loss(new, batch)
        outcome.loss.backward()
        assert new.grad is not None
        return float(outcome.loss.detach()), new.grad, outcome.mean_ratio, outcome.mean_abs_log_ratio

    clean = trained(batch, 0.0)
    spoilt = replace(
        batch,
        behaviour_logprobs_ST=torch.where(batch.loss_mask_ST, batch.behaviour_logprobs_ST, garbage),
        advantages_ST=torch.where(batch.loss_mask_ST, batch.advantages_ST, garbage),
    )
    for outside in (0.0, garbage):
        found = trained(spoilt, outside)
        assert found[0] == clean[0] and torch.equal(found[1], clean[1]) and found[2:] == clean[2:]
    assert clean[1][batch.loss_mask_ST].abs().min() > 0


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"embed.weight": torch.zeros(2)}, "pass its items()"),
        (TinyNet(), "pass its named_parameters(), or make WeightPush(client, model)"),
        (torch.zeros(2, 2), "pass model.named_parameters()"),
        ("embed.weight", "pass model.named_parameters()"),
        (3, "pass model.named_parameters()"),
        ([torch.zeros(2)], "pass model.named_parameters()"),
        ([("embed.weight",)], "pass model.named_parameters()"),
        (["ab"], "pass model.named_parameters()"),
        ([(3, torch.zeros(2))], "pass model.named_parameters()"),
        (iter([torch.zeros(2)]), "pass model.named_parameters()"),
        (iter([(None, torch.zeros(2))]), "pass model.named_parameters()"),
    ],
)
def test_what_holds_no_named_tensors_is_refused_with_what_to_pass(tmp_path: Path, given: Any, remedy: str) -> None:
    service = FakeWeightService(tmp_path)
    with pytest.raises(InvalidOption) as refusal:
        WeightPush(service, transport="file", process_group=None).push(given)
    check_refusal(refusal.value, remedy)
    assert refusal.value.field == "named_parameters" and remedy in str(refusal.value)
    assert service.calls[-1:] in ([], ["abort"])


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(
    ("tensor", "remedy"),
    [
        (np.zeros((32, 8), np.float32), "pass (name, tensor) pairs"),
        ([[0.0] * 8] * 32, "pass (name, tensor) pairs"),
        (torch.zeros(32, 8, dtype=torch.int32), "not integer buffers"),
        (torch.zeros(32, 8, dtype=torch.complex64), "not integer buffers"),
        (torch.zeros(32, 8, device="meta"), "load the model's weights before the push"),
        (torch.zeros(32, 8).to_sparse(), "push tensor.to_dense()"),
    ],
)
def test_what_is_no_tensor_that_can_be_served_is_refused_by_its_name(tmp_path: Path, tensor: Any, remedy: str, in_turn: bool) -> None:
    service = FakeWeightService(tmp_path)
    pairs = [("embed.weight", tensor)]
    with pytest.raises(UnpushableTensor) as refusal:
        WeightPush(service, transport="file", process_group=None).push(iter(pairs) if in_turn else pairs, partial=True)
    check_refusal(refusal.value, remedy)
    assert refusal.value.field == "embed.weight" and remedy in str(refusal.value)
    assert service.calls == (["begin", "abort"] if in_turn else [])


def test_a_canary_function_may_return_anything_and_is_refused_by_name(tmp_path: Path) -> None:
    service = FakeWeightService(tmp_path)
    push = WeightPush(service, transport="file", process_group=None)
    wrong = (*VALUES, torch.full((23,), math.nan), np.full(23, -math.inf), torch.zeros(24), torch.zeros(23, 1))
    for number, value in enumerate(wrong):
        with pytest.raises(InvalidOption) as refusal:
            push.push(list(TinyNet().named_parameters()), canary=lambda ids, value=value: value)  # type: ignore[misc]
        check_refusal(refusal.value, ("canary", number))
        assert refusal.value.field == "canary" and service.calls[-1] == "abort"


def test_a_canary_that_is_not_finite_is_not_told_of_its_shape(tmp_path: Path) -> None:
    push = WeightPush(FakeWeightService(tmp_path), transport="file", process_group=None)
    with pytest.raises(InvalidOption, match=r"values that are not finite .* look at the model's logits"):
        push.push(list(TinyNet().named_parameters()), canary=lambda ids: np.full(len(ids) - 1, math.nan))


@pytest.mark.parametrize(
    ("canary_ids", "limit"),
    [
        ([[1, 2], [1, 32]], "token ids below the model's 32"),
        ([list(range(30)) * 3], "max_model_len of 64 tokens"),
        ([[1, 2]] * 65, "at most 64 sequences"),
    ],
)
def test_canaries_that_the_served_model_cannot_take_are_refused_when_the_push_is_made(tmp_path: Path, canary_ids: Any, limit: str) -> None:
    with pytest.raises(InvalidOption, match=limit) as refusal:
        WeightPush(FakeWeightService(tmp_path), TinyNet(), transport="file", process_group=None, canary_ids=canary_ids)
    check_refusal(refusal.value, limit)


@pytest.mark.parametrize("name", ["push", "every", "on_report", "mode", "drain_s"])
def test_what_pushes_by_itself_is_made_or_refused_whatever_it_is_given(tmp_path: Path, name: str) -> None:
    model = TinyNet()
    push = WeightPush(FakeWeightService(tmp_path), model, transport="file", process_group=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, value in enumerate(VALUES):
        makers: list[Any] = [lambda **given: PushCallback(given.pop("push", push), **given)]
        if name in ("push", "every", "on_report"):
            makers.append(lambda **given: after_step_hook(optimizer, given.pop("push", push), **given))
        if name in ("push", "mode", "drain_s"):
            makers.append(lambda **given: ServiceWeightTransfer(given.pop("push", push), **given))
        for make in makers:
            try:
                make(**{name: value})
            except InvalidOption as error:
                check_refusal(error, (name, number))
                assert error.field == name
            else:
                assert name != "push", number
    with pytest.raises(InvalidOption, match=r"call push\.push\(\) after its step yourself"):
        after_step_hook(push, optimizer)  # type: ignore[arg-type]


def test_what_is_no_batch_episode_or_function_is_refused_by_name() -> None:
    for number, value in enumerate(VALUES):
        calls: dict[str, Any] = {
            "batch": lambda given: policy_loss(torch.zeros(2, 5), given),
            "batch of logits": lambda given: token_logprobs(torch.zeros(2, 5, VOCAB), given),
            "batch of a gap": lambda given: logprob_gap(torch.zeros(2, 5), given),
            "result": samples_of,
            "lora": lambda given: merge_lora(torch.zeros(2, 2), given, torch.zeros(2, 2), 1.0),
            "run_episode": each_member,
        }
        for name, call in calls.items():
            if name == "run_episode" and callable(value):
                continue
            with pytest.raises(BridgeError) as refusal:
                call(value)
            check_refusal(refusal.value, (name, number))
            assert refusal.value.field == name.split()[0] or name == "lora"


EPISODE = SimpleNamespace(status="done", reward=1.0, failure=None, rows=())
NOT_SAMPLES: tuple[tuple[Any, str], ...] = (
    (EPISODE, r"make samples with samples_of\(result\)"),
    ([EPISODE], r"make samples with samples_of\(result\)"),
    ([make_sample(), EPISODE], r"make samples with samples_of\(result\)"),
    (SimpleNamespace(results=(), kept=()), r"samples_of_group\(result\)"),
    ([SimpleNamespace(samples=(), prompt=1)], r"group\.samples"),
    (None, r"make them with samples_of\(result\)"),
    ([None], r"make them with samples_of\(result\)"),
    (5, r"make them with samples_of\(result\)"),
)


def _next(play: Any) -> None:
    with RolloutSource(range(4), play, group_size=2, version=lambda: 0) as source:
        source.next(1, timeout_s=20)


@pytest.mark.parametrize(("given", "remedy"), NOT_SAMPLES)
def test_what_is_no_sample_is_refused_with_what_makes_samples(given: Any, remedy: str) -> None:
    for use in (collate, sample_advantages):
        with pytest.raises(InvalidBatch, match=remedy) as refusal:
            use(given)
        check_refusal(refusal.value, remedy)
        assert refusal.value.field == "samples"

    async def play(task: Any, member: int = 0) -> Any:
        return given

    with pytest.raises(ExceptionGroup) as failures:
        asyncio.run(each_member(play)(GroupTask(index=0, prompt=0, group_size=2, seed=0)))
    assert failures.group_contains(InvalidSample, match=remedy)
    for runner, name in ((each_member(play), "run_episode"), (play, "run_group")):
        with pytest.raises(RolloutShortfall, match=f"what {name} returned .*{remedy}") as shortfall:
            _next(runner)
        assert set(shortfall.value.failures) == {"sample_invalid"}


@pytest.mark.parametrize("returned", [None, [make_sample()], EPISODE])
def test_a_function_that_plays_and_is_not_async_is_refused_by_its_name(returned: Any) -> None:
    for runner, name in ((each_member(lambda task, member: returned), "run_episode"), (lambda task: returned, "run_group")):
        with pytest.raises(RolloutShortfall, match=f"{name} returned a .* cannot be awaited; .*write `async def`") as shortfall:
            _next(runner)
        assert set(shortfall.value.failures) == {"option_invalid"}


def test_no_samples_have_no_advantages() -> None:
    assert sample_advantages([]).shape == (0,)
