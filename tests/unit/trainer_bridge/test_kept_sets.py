"""Filtered tokens: no ratio without the ids that could be drawn, and with them the ratio that numpy works out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.trainer_bridge.fakes import make_sample
from trainer_bridge.batch import Batch, collate
from trainer_bridge.errors import InvalidBatch, KeptSetsMissing
from trainer_bridge.loss import logprob_gap, policy_loss, token_logprobs
from trainer_bridge.samples import TrainingSample
from trainer_bridge.turns import TurnSpan

VOCAB = 32
LAYOUT = ((3, False), (4, True), (2, False), (3, True))


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())


def filtered_sample(
    seed: int, *, top_k: int = 5, temperature: float = 0.8, kept: bool = True, shaped: bool = False, both_turns: bool = True, **fields: Any
) -> tuple[TrainingSample, np.ndarray]:
    """Return a sample drawn by numpy from logits through top-k, and those logits [n, V] (row t predicts place t)."""
    draws = np.random.default_rng(seed)
    plain = make_sample(LAYOUT, seed=seed, vocab=VOCAB, **fields)
    logits = draws.normal(size=(len(plain), VOCAB)) * 2
    ids, logprobs = plain.ids.copy(), plain.logprobs.copy()
    behaviour, sets = plain.logprobs.copy(), [[] for _ in ids]  # type: ignore[var-annotated]
    turns = tuple(
        replace(turn, temperature=temperature, filtered=number == 0 or both_turns, shaped=shaped) for number, turn in enumerate(plain.turns)
    )
    for turn in turns:
        for place in range(turn.start, turn.end):
            scores = logits[place] / temperature
            shown = scores + (np.arange(VOCAB) % 3 if shaped else 0)
            allowed = np.argsort(-shown)[:top_k] if turn.filtered else np.arange(VOCAB)
            ids[place] = draws.choice(allowed)
            logprobs[place] = log_softmax(scores)[ids[place]]
            behaviour[place] = shown[ids[place]] - np.log(np.exp(shown[allowed]).sum())
            sets[place] = allowed.tolist() if turn.filtered else []
    kept_fields = {"kept_counts": [len(one) for one in sets], "kept_ids": [token for one in sets for token in one]} if kept else {}
    columns = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    columns |= {"ids": ids, "logprobs": logprobs, "behaviour_logprobs": behaviour, "turns": turns, **kept_fields}
    return TrainingSample(**columns), logits


def model_logits(batch: Batch, tables: list[np.ndarray], *, pad_left: bool = False) -> torch.Tensor:
    """Return logits as a model would give them: the row that predicts a place stands at the place before."""
    out = torch.zeros((*batch.ids_ST.shape, VOCAB), dtype=torch.float32)
    rows = [np.concatenate(tables)] if batch.packed else tables
    for row, table in enumerate(rows):
        first = batch.ids_ST.shape[1] - len(table) if pad_left else 0
        out[row, first : first + len(table) - 1] = torch.from_numpy(table[1:]).float()
    return out.requires_grad_()


def by_hand(sample: TrainingSample, logits: np.ndarray) -> np.ndarray:
    """Return each sampled token's log-probability under these logits, over its kept set where it has one."""
    found, at = np.zeros(len(sample)), 0
    temperatures, (counts, ids) = sample.temperatures(), sample.kept_sets()
    for place in range(len(sample)):
        scores = logits[place] / temperatures[place]
        kept = ids[at : at + counts[place]]
        at += int(counts[place])
        if sample.mask[place]:
            found[place] = scores[sample.ids[place]] - (np.log(np.exp(scores[kept]).sum()) if kept.size else np.log(np.exp(scores).sum()))
    return found


@pytest.mark.parametrize("layout", ["right", "left", "packed"])
@pytest.mark.parametrize("both_turns", [True, False])
def test_log_probabilities_are_renormalised_over_the_kept_sets(layout: str, both_turns: bool) -> None:
    pairs = [filtered_sample(seed, top_k=3 + seed, both_turns=both_turns, member=seed, reward=float(seed)) for seed in range(3)]
    pairs.append((make_sample(LAYOUT, seed=9, vocab=VOCAB, member=9), np.random.default_rng(9).normal(size=(12, VOCAB))))
    options: dict[str, Any] = {"packed": True} if layout == "packed" else {"pad_side": layout, "multiple_of": 16}
    batch = collate([sample for sample, _ in pairs], **options)
    new = token_logprobs(model_logits(batch, [table for _, table in pairs], pad_left=layout == "left"), batch)
    expected = np.concatenate([by_hand(sample, table)[sample.mask] for sample, table in pairs])
    np.testing.assert_allclose(new[batch.loss_mask_ST].detach().numpy(), expected, atol=1e-5)
    full = token_logprobs(model_logits(batch, [table for _, table in pairs], pad_left=layout == "left"), batch, over_kept=False)
    whole = np.concatenate([sample.logprobs[sample.mask] for sample, _ in pairs[:3]])
    np.testing.assert_allclose(full[batch.loss_mask_ST].detach().numpy()[: whole.size], whole, atol=1e-5)


def test_the_policy_that_drew_has_a_ratio_of_one_and_no_gap() -> None:
    pairs = [filtered_sample(seed, member=seed, reward=float(seed)) for seed in range(3)]
    batch = collate([sample for sample, _ in pairs], version=0)
    logits = model_logits(batch, [table for _, table in pairs])
    new = token_logprobs(logits, batch)
    outcome = policy_loss(new, batch)
    assert outcome.mean_ratio == pytest.approx(1.0, abs=1e-5) and outcome.mean_abs_log_ratio < 1e-5
    gap = logprob_gap(new, batch)
    assert gap.num_exact == 21 and gap.max_exact < 1e-5
    full = token_logprobs(logits, batch, over_kept=False)
    assert logprob_gap(full, batch, over_kept=False).max_exact < 1e-5
    assert policy_loss(full, batch).mean_ratio < 0.95, "over the whole vocabulary the same policy looks like another one"


def test_another_policys_ratio_and_gradient_stay_inside_the_kept_sets() -> None:
    sample, table = filtered_sample(4, reward=1.0)
    other = table + np.random.default_rng(5).normal(size=table.shape) * 0.1
    batch = collate([sample], [1.0])
    logits = model_logits(batch, [other])
    outcome = policy_loss(token_logprobs(logits, batch), batch, clip_low=9, clip_high=9)
    assert sample.behaviour_logprobs is not None
    ratios = np.exp(by_hand(sample, other) - sample.behaviour_logprobs)[sample.mask]
    assert outcome.mean_ratio == pytest.approx(ratios.mean(), rel=1e-5)
    outcome.loss.backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    counts, ids = sample.kept_sets()
    places = np.repeat(np.arange(len(sample)), counts)
    touched = {(int(place) + 1, int(token)) for place, token in torch.nonzero(logits.grad[0]).tolist()}
    assert touched and touched <= set(zip(places.tolist(), ids.tolist())), "an id that could not be drawn has no part in it"


def test_filtered_tokens_without_kept_sets_have_no_ratio() -> None:
    kept, table = filtered_sample(1, member=0)
    bare, other = filtered_sample(2, kept=False, member=1, reward=0.0)
    batch = collate([kept, bare])
    new = token_logprobs(model_logits(batch, [table, other]), batch)
    with pytest.raises(
        KeptSetsMissing, match=r"7 tokens .*return_kept_ids=True and top_k of 1 to 64 \(serve --kept-ids\), or without"
    ) as refused:
        policy_loss(new, batch)
    assert isinstance(refused.value, InvalidBatch) and refused.value.code == "kept_sets_missing"
    assert logprob_gap(new, batch).num_other == 14, "the gap over the whole vocabulary is still there"
    assert math.isfinite(policy_loss(new[:1], collate([kept], [1.0])).mean_ratio)
    failed = TrainingSample(**{name: getattr(bare, name) for name in bare.__dataclass_fields__} | {"status": "failed", "reward": None})
    assert collate([kept, failed]).num_without_kept == 0, "what is left out of the batch is not refused"


def test_forced_tokens_of_a_filtered_turn_need_no_kept_sets() -> None:
    sample = make_sample()
    fields = {name: getattr(sample, name) for name in sample.__dataclass_fields__}
    forced = TrainingSample(**fields | {"turns": (TurnSpan(start=3, end=5, filtered=True, forced_tokens=2),)})
    assert collate([forced], [1.0]).num_without_kept == 0


def test_penalised_draws_carry_their_mark_and_are_weighed_by_what_they_were_drawn_from() -> None:
    sample, table = filtered_sample(3, shaped=True, reward=1.0)
    batch = collate([sample], [1.0], version=0)
    assert torch.equal(batch.shaped_ST, batch.loss_mask_ST) and torch.equal(batch.filtered_ST, batch.loss_mask_ST)
    new = token_logprobs(model_logits(batch, [table]), batch)
    assert sample.behaviour_logprobs is not None
    ratios = np.exp(by_hand(sample, table) - sample.behaviour_logprobs)[sample.mask]
    assert policy_loss(new, batch).mean_ratio == pytest.approx(ratios.mean(), rel=1e-4) != pytest.approx(1.0, abs=1e-3)
    assert logprob_gap(new, batch).num_exact == 0, "there is nothing like it to compare with"
    full = token_logprobs(model_logits(batch, [table]), batch, over_kept=False)
    whole = logprob_gap(full, batch, over_kept=False)
    assert whole.num_exact == 7 and whole.max_exact < 1e-5
    unfiltered = collate([make_sample(member=1)], [1.0])
    assert not unfiltered.shaped_ST.any() and not unfiltered.filtered_ST.any() and not unfiltered.kept_ids.numel()
