"""Advantages by numpy, masks that hold whatever lies outside them, and the loss against a plain formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.trainer_bridge.fakes import TinyNet, failed_sample, make_sample
from trainer_bridge.batch import Batch, collate, group_advantages, sample_advantages
from trainer_bridge.errors import InvalidBatch
from trainer_bridge.loss import LogprobGap, logprob_gap, policy_loss, token_logprobs
from trainer_bridge.samples import SampleStatus, TrainingSample
from trainer_bridge.turns import TurnSpan

torch.set_num_threads(1)

TURNS = ((4, False), (5, True), (11, False), (7, True), (13, False), (3, True))


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("rewards", [[1.0], [1.0, 1.0, 1.0, 1.0], [0.1, 0.1, 0.1]])
def test_groups_of_one_and_without_spread_get_zeros(rewards: list[float], ddof: int) -> None:
    assert group_advantages(rewards, ["g"] * len(rewards), ddof=ddof).tolist() == [0.0] * len(rewards)


def test_two_rewards_are_normalised_with_the_stated_correction() -> None:
    half = 1 / math.sqrt(2)
    np.testing.assert_allclose(group_advantages([0, 1], "gg", ddof=1, eps=0), [-half, half], atol=1e-12)
    np.testing.assert_allclose(group_advantages([0, 1], "gg", ddof=0, eps=0), [-1, 1], atol=1e-12)
    np.testing.assert_allclose(group_advantages([0, 1], "gg"), [-half, half], atol=1e-5)


@pytest.mark.parametrize("ddof", [0, 1])
def test_failed_members_count_in_neither_mean_nor_spread(ddof: int) -> None:
    advantages = group_advantages([1.0, None, 0.0, None], "gggg", ddof=ddof, eps=1e-6)
    pair = np.array([1.0, 0.0])
    expected = (pair - pair.mean()) / (pair.std(ddof=ddof) + 1e-6)
    np.testing.assert_allclose(advantages, [expected[0], 0, expected[1], 0], atol=1e-12)


def test_groups_are_found_by_key_whatever_the_order() -> None:
    draws = np.random.Generator(np.random.PCG64(3))
    groups = np.array(["three"] * 3 + ["five"] * 5)
    rewards = draws.normal(size=8)
    order = draws.permutation(8)
    shuffled = group_advantages(rewards[order], groups[order].tolist())
    for name in ("three", "five"):
        group = rewards[order][groups[order] == name]
        np.testing.assert_allclose(shuffled[groups[order] == name], (group - group.mean()) / (group.std(ddof=1) + 1e-6), atol=1e-12)


def test_large_rewards_with_small_differences_stay_finite_and_right() -> None:
    small = np.array([0.0, 1.0, 2.0, 3.0]) * 2**-20
    advantages = group_advantages(1e8 + small, "gggg", eps=0)
    assert np.isfinite(advantages).all()
    np.testing.assert_allclose(advantages, (small - small.mean()) / small.std(ddof=1), rtol=0.05)


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e-30, 1.0, 1e30, 1e200, 8.9e307])
def test_rewards_of_any_size_give_finite_advantages_of_the_same_shape(scale: float) -> None:
    rewards = np.array([0.0, 2.0, 1.0]) * scale
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_allclose(group_advantages(rewards, "ggg", eps=0), [-1.0, 1.0, 0.0], atol=1e-12)
        assert np.isfinite(group_advantages(rewards, "ggg")).all()
        assert np.abs(group_advantages([scale, -scale], "gg", eps=0)).tolist() == pytest.approx([0.5**0.5] * 2)


def test_a_spread_that_is_only_rounding_counts_as_none() -> None:
    assert group_advantages([1e8, 1e8 + 1.5e-8, 1e8], "ggg", eps=0).tolist() == [0.0] * 3
    assert group_advantages([0.1 + 0.2, 0.3], "gg", eps=0).tolist() == [0.0] * 2


def test_ordinary_advantages_equal_the_plain_formula_to_the_last_bit() -> None:
    rewards = np.random.Generator(np.random.PCG64(3)).normal(size=7) * 13
    plain = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert group_advantages(rewards, "g" * 7).tolist() == plain.tolist()


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(InvalidBatch, match=r"rewards\[1\].*pass None for a failed member"):
        group_advantages([0.0, reward], "gg")


def test_rewards_and_groups_of_other_lengths_are_refused() -> None:
    with pytest.raises(InvalidBatch, match="groups has 1 entries; rewards has 2"):
        group_advantages([0.0, 1.0], "g")


def test_the_rows_of_a_forked_episode_count_once() -> None:
    rows = [
        make_sample(group_id=7, member=0, reward=1.0),
        make_sample(group_id=7, member=0, reward=1.0),
        make_sample(group_id=7, member=1, reward=0.0),
    ]
    half = 1 / math.sqrt(2)
    np.testing.assert_allclose(sample_advantages(rows), [half, half, -half], atol=1e-5)


def test_rows_of_one_member_that_disagree_about_the_reward_are_refused() -> None:
    with pytest.raises(InvalidBatch, match="rows of one episode share its reward"):
        sample_advantages([make_sample(member=0, reward=1.0), make_sample(member=0, reward=0.0)])


def test_failed_members_are_left_out_of_the_tensors_and_counted() -> None:
    samples = [make_sample(member=0, reward=1.0), failed_sample(member=1), make_sample(member=2, reward=0.0, status=SampleStatus.TRUNCATED)]
    batch = collate(samples)
    assert batch.ids_ST.shape[0] == 2 and batch.num_left_out == 1
    assert batch.advantages_ST[batch.loss_mask_ST].abs().min() > 0.7
    with pytest.raises(InvalidBatch, match="none of the 1 samples is trainable"):
        collate([failed_sample()])


@pytest.mark.parametrize("pad_side", ["left", "right"])
def test_the_loss_mask_has_ones_exactly_at_the_sampled_places(pad_side: str) -> None:
    sample = make_sample(TURNS, member=0)
    batch = collate([sample, make_sample(((2, False), (50, True)), member=1, reward=0.0)], pad_side=pad_side, multiple_of=8)
    width = batch.ids_ST.shape[1]
    assert width == 56
    shift = width - len(sample) if pad_side == "left" else 0
    sampled = [*range(4, 9), *range(20, 27), *range(40, 43)]
    assert len(sampled) == 15 == int(batch.loss_mask_ST[0].sum())
    assert torch.nonzero(batch.loss_mask_ST[0])[:, 0].tolist() == [place + shift for place in sampled]
    assert batch.positions_ST[0][batch.attention_mask_ST[0]].tolist() == list(range(len(sample)))
    assert batch.ids_ST[0][batch.attention_mask_ST[0]].tolist() == sample.ids.tolist()


def loss_and_gradient(batch: Batch) -> tuple[float, torch.Tensor]:
    model = TinyNet().eval()
    outcome = policy_loss(token_logprobs(model(batch.ids_ST), batch), batch)
    outcome.loss.backward()
    return float(outcome.loss.detach()), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("garbage", [0.0, -3.0, math.nan, math.inf])
@pytest.mark.parametrize("layout", ["left", "right", "packed"])
def test_garbage_at_tool_tokens_and_padding_changes_neither_loss_nor_gradient(layout: str, garbage: float) -> None:
    options: dict[str, Any] = {"packed": True} if layout == "packed" else {"pad_side": layout}
    samples = [make_sample(TURNS, member=0), make_sample(((2, False), (50, True)), seed=1, member=1, reward=0.0)]
    clean = collate(samples, multiple_of=8, **options)
    spoiled_samples = []
    for sample in samples:
        fields = {name: getattr(sample, name) for name in sample.__dataclass_fields__}
        spoiled = np.where(sample.mask, sample.logprobs, np.float32(garbage))
        spoiled_samples.append(TrainingSample(**fields | {"logprobs": spoiled, "behaviour_logprobs": spoiled}))
    spoiled_batch = collate(spoiled_samples, multiple_of=8, **options)
    for table in (
        spoiled_batch.logprobs_ST,
        spoiled_batch.behaviour_logprobs_ST,
        spoiled_batch.advantages_ST,
        spoiled_batch.temperatures_ST,
    ):
        table[~spoiled_batch.loss_mask_ST] = garbage
    loss, gradient = loss_and_gradient(clean)
    spoiled_loss, spoiled_gradient = loss_and_gradient(spoiled_batch)
    assert loss == spoiled_loss and gradient.abs().max() > 0
    assert torch.equal(gradient, spoiled_gradient)


def test_packed_and_padded_batches_hold_the_same_tokens() -> None:
    samples = [make_sample(TURNS, member=0, temperature=0.7), make_sample(member=1, reward=0.0, version=3)]
    padded, packed = collate(samples), collate(samples, packed=True)
    assert packed.packed and packed.ids_ST.shape == (1, sum(map(len, samples)))
    for name in ("ids_ST", "logprobs_ST", "advantages_ST", "temperatures_ST", "positions_ST", "versions_ST", "loss_mask_ST", "sequence_ST"):
        assert torch.equal(getattr(padded, name)[padded.attention_mask_ST], getattr(packed, name)[packed.attention_mask_ST])
    assert packed.sequence_ST[0].tolist() == [0] * len(samples[0]) + [1] * len(samples[1])


def test_known_logits_at_half_temperature_give_the_known_log_probabilities() -> None:
    """Logits 2, 1, 0, -1: temperature divides before the softmax, it never scales the log-probability."""
    expected = [-0.145078, -2.145078, -4.145078, -6.145078]
    sample = TrainingSample(
        ids=[0, 0, 1, 2, 3],
        mask=[False, True, True, True, True],
        logprobs=[np.nan, *expected],
        versions=[-1, 0, 0, 0, 0],
        turns=(TurnSpan(start=1, end=5, temperature=0.5, kv_spans=((0, 0),)),),
        reward=1.0,
    )
    batch = collate([sample], [1.0], version=0)
    logits_STV = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(1, 5, 4)
    new = token_logprobs(logits_STV, batch)
    np.testing.assert_allclose(new[0, 1:].numpy(), expected, atol=1e-6)
    outcome = policy_loss(new, batch)
    assert abs(outcome.mean_ratio - 1) < 1e-4 and outcome.clip_fraction == 0
    gap = logprob_gap(new, batch)
    assert gap.num_exact == 4 and gap.max_exact < 1e-5 and gap.num_other == 0


def test_the_loss_is_the_clipped_surrogate_over_sampled_tokens() -> None:
    samples = [make_sample(TURNS, member=0), make_sample(((3, False), (9, True)), seed=5, member=1, reward=0.0)]
    batch = collate(samples)
    model = TinyNet().eval()
    new = token_logprobs(model(batch.ids_ST), batch)
    outcome = policy_loss(new, batch, clip_low=0.2, clip_high=0.3)
    total, clips = 0.0, 0
    for row, sample in enumerate(samples):
        logits = model(torch.from_numpy(sample.ids.astype(np.int64))[None])[0].double()
        advantage = float(sample_advantages(samples)[row])
        for place in np.flatnonzero(sample.mask):
            logprob = torch.log_softmax(logits[place - 1], -1)[sample.ids[place]]
            ratio = math.exp(float(logprob.detach()) - float(sample.logprobs[place]))
            clipped = min(max(ratio, 0.8), 1.3)
            total += min(ratio * advantage, clipped * advantage)
            clips += clipped * advantage < ratio * advantage
    assert float(outcome.loss.detach()) == pytest.approx(-total / batch.num_loss_tokens, rel=1e-4)
    assert outcome.clip_fraction == pytest.approx(clips / batch.num_loss_tokens)
    halved = policy_loss(new, batch, clip_low=0.2, clip_high=0.3, num_tokens=2 * batch.num_loss_tokens)
    assert float(halved.loss.detach()) == pytest.approx(float(outcome.loss.detach()) / 2, rel=1e-6)


def test_the_ratio_is_taken_against_the_policy_that_really_drew_the_tokens() -> None:
    sample = make_sample(reward=1.0)
    fields = {name: getattr(sample, name) for name in sample.__dataclass_fields__}
    drawn = TrainingSample(**fields | {"behaviour_logprobs": sample.logprobs - math.log(2)})
    batch = collate([drawn], [1.0])
    assert policy_loss(batch.logprobs_ST, batch).mean_ratio == pytest.approx(2.0, rel=1e-5)


def test_the_gap_tells_the_trainers_own_tokens_from_older_ones() -> None:
    old, new = make_sample(version=1, member=0), make_sample(version=2, member=1, reward=0.0)
    batch = collate([old, new], version=2)
    shifted = batch.logprobs_ST.clone()
    shifted[0] += 0.5
    shifted[1] += 0.001
    gap = logprob_gap(shifted, batch)
    assert (gap.num_exact, gap.num_other) == (2, 2)
    assert gap.max_exact == pytest.approx(0.001, rel=1e-2) and gap.mean_other == pytest.approx(0.5, rel=1e-4)


def test_gaps_of_micro_batches_merge_into_that_of_the_whole() -> None:
    samples = [make_sample(TURNS, seed=seed, member=seed, version=seed % 2, reward=float(seed)) for seed in range(6)]
    parts = [collate(part, np.zeros(len(part)), version=1) for part in (samples[:1], samples[1:4], samples[4:])]
    whole = collate(samples, np.zeros(6), version=1)
    model = TinyNet().eval()
    merged = LogprobGap.merged([logprob_gap(token_logprobs(model(part.ids_ST), part), part) for part in parts])
    expected = logprob_gap(token_logprobs(model(whole.ids_ST), whole), whole)
    assert (merged.num_exact, merged.num_other) == (expected.num_exact, expected.num_other) == (45, 45)
    assert merged.max_exact == pytest.approx(expected.max_exact) and merged.mean_other == pytest.approx(expected.mean_other)


@pytest.mark.parametrize("cuts", [(6,), (1, 6), (2, 3, 6)])
def test_micro_batches_with_the_steps_token_count_add_up_to_its_gradient(cuts: tuple[int, ...]) -> None:
    samples = [make_sample(TURNS[: 2 + 2 * (seed % 3)], seed=seed, member=seed, reward=float(seed)) for seed in range(6)]
    advantages = sample_advantages(samples)
    whole_loss, whole_gradient = loss_and_gradient(collate(samples))
    model, loss, start = TinyNet().eval(), 0.0, 0
    for end in cuts:
        batch = collate(samples[start:end], advantages[start:end])
        outcome = policy_loss(token_logprobs(model(batch.ids_ST), batch), batch, num_tokens=sum(sample.num_sampled for sample in samples))
        outcome.loss.backward()
        loss, start = loss + float(outcome.loss.detach()), end
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("behaviour", [-95.0, -1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_that_overflows_leaves_loss_and_gradients_finite(behaviour: float, advantage: float) -> None:
    sample = make_sample()
    fields = {name: getattr(sample, name) for name in sample.__dataclass_fields__}
    rare = TrainingSample(**fields | {"logprobs": np.where(sample.mask, behaviour, np.nan)})
    batch = collate([rare, make_sample(seed=1, member=1)], [advantage, 1.0])
    logits = torch.zeros(*batch.ids_ST.shape, 32, requires_grad=True)
    outcome = policy_loss(token_logprobs(logits, batch), batch)
    outcome.loss.backward()
    assert math.isfinite(float(outcome.loss.detach())) and math.isfinite(outcome.mean_ratio)
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert outcome.mean_abs_log_ratio > 40, "the report tells the true distance"


def test_bounding_the_ratio_changes_no_bit_of_ordinary_gradients() -> None:
    batch = collate([make_sample(seed=seed, member=seed) for seed in range(4)], [1.0, 1.0, -1.0, -1.0])
    shift = torch.linspace(-19, 19, batch.ids_ST.numel()).reshape(batch.ids_ST.shape)
    new = (batch.behaviour_logprobs_ST + shift).requires_grad_()
    policy_loss(new, batch).loss.backward()
    bare = new.detach().clone().requires_grad_()
    ratio = torch.where(batch.loss_mask_ST, bare - batch.behaviour_logprobs_ST, torch.zeros(())).exp()
    gains = torch.minimum(ratio * batch.advantages_ST, ratio.clamp(0.8, 1.2) * batch.advantages_ST)
    (-torch.where(batch.loss_mask_ST, gains, torch.zeros(())).sum() / batch.num_loss_tokens).backward()
    assert new.grad is not None and bare.grad is not None and new.grad.abs().max() > 0
    assert torch.equal(new.grad, bare.grad)
