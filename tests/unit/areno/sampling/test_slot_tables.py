"""Sampling slots filled many at once: each holds what its request asked for, whatever was there before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areno.sampling.penalties import SlotTables
from areno.sampling.slot_content import SlotContent

SLOTS, VOCAB, FORCED = 6, 40, 9


def _content(rng: np.random.Generator) -> SlotContent:
    biased = rng.permutation(VOCAB)[: rng.integers(0, 5)]
    return SlotContent(
        forced_ids=rng.integers(0, VOCAB, size=rng.integers(0, FORCED + 1)),
        bias_ids=biased,
        bias_values=rng.normal(size=biased.size),
        repetition=float(rng.uniform(1, 2)),
        presence=float(rng.normal()),
        frequency=float(rng.normal()),
        prompt_ids=rng.integers(0, VOCAB, size=rng.integers(1, 30)),
        output_ids=rng.integers(0, VOCAB, size=rng.integers(0, 20)),
    )


def _check(tables: SlotTables, slot: int, content: SlotContent) -> None:
    forced = np.full(FORCED + 1, -1)
    forced[: content.forced_ids.size] = content.forced_ids
    np.testing.assert_array_equal(tables.forced_ids[slot].numpy(), forced)
    size = content.bias_ids.size
    np.testing.assert_array_equal(tables.bias_ids[slot, :size].numpy(), content.bias_ids)
    np.testing.assert_allclose(tables.bias_values[slot, :size].numpy(), content.bias_values, rtol=1e-6)
    assert not tables.bias_values[slot, size:].any()
    held = [float(column[slot]) for column in (tables.repetition, tables.presence, tables.frequency)]
    np.testing.assert_allclose(held, [content.repetition, content.presence, content.frequency], rtol=1e-6)
    assert int(tables.emitted[slot]) == content.output_ids.size
    np.testing.assert_array_equal(tables.counts[slot].numpy(), np.bincount(content.output_ids, minlength=VOCAB))
    np.testing.assert_array_equal(tables.prompt_seen[slot].numpy(), np.bincount(content.prompt_ids, minlength=VOCAB) > 0)


@pytest.mark.parametrize("seed", range(5))
def test_slots_filled_together_hold_what_each_request_asked_for(seed: int) -> None:
    """A second filling of some slots leaves nothing of the first in them and touches no other."""
    rng = np.random.default_rng(seed)
    tables = SlotTables(num_slots=SLOTS, vocab_size=VOCAB, max_forced=FORCED, device=torch.device("cpu"))
    held = {slot: _content(rng) for slot in range(SLOTS)}
    tables.fill(list(held.items()))
    for chosen in (rng.permutation(SLOTS)[:3], rng.permutation(SLOTS)[:1], []):
        again = {int(slot): _content(rng) for slot in chosen}
        tables.fill(list(again.items()))
        held |= again
        for slot, content in held.items():
            _check(tables, slot, content)
