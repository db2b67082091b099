"""Sampling slots: what only some requests need of the sampler, kept by slot beside the rows.

A slot holds forced ids, up to 256 biases, the three penalties, which ids the prompt has and how often each id came out. It
is built from the request's ids when its row is set, so that a row that was preempted gets it back, and advances with
every token. The decode paths own one `SlotTables` each.

Sources: repetition penalty as in CTRL (Keskar et al. 2019), over prompt and output; presence and frequency penalties as in
the OpenAI API, over the output alone.
"""

from __future__ import annotations

import numpy as np
import torch

from areno.request import MAX_BIASES
from areno.sampling.slot_content import SlotContent
from areno.uploads import upload


class SlotTables:
    """Contents of S slots over a vocabulary of V ids. Shapes: counts and prompt bits [S, V], biases [S, 256]."""

    __slots__ = ("bias_ids", "bias_values", "counts", "emitted", "forced_ids", "frequency", "presence", "prompt_seen", "repetition")

    def __init__(self, *, num_slots: int, vocab_size: int, max_forced: int, device: torch.device) -> None:
        self.forced_ids = torch.full((num_slots, max_forced + 1), -1, dtype=torch.int32, device=device)
        self.emitted = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.bias_ids = torch.zeros((num_slots, MAX_BIASES), dtype=torch.int64, device=device)
        self.bias_values = torch.zeros((num_slots, MAX_BIASES), device=device)
        self.repetition = torch.ones(num_slots, device=device)
        self.presence = torch.zeros(num_slots, device=device)
        self.frequency = torch.zeros(num_slots, device=device)
        self.counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)

    def fill(self, slot: int, content: SlotContent) -> None:
        """Write a slot anew. Mutates: that slot."""
        forced = np.full(self.forced_ids.shape[1], -1, dtype=np.int32)
        forced[: content.forced_ids.size] = content.forced_ids
        bias_ids, bias_values = np.zeros(MAX_BIASES, dtype=np.int64), np.zeros(MAX_BIASES, dtype=np.float32)
        bias_ids[: content.bias_ids.size], bias_values[: content.bias_ids.size] = content.bias_ids, content.bias_values
        seen, known = np.unique(content.prompt_ids), np.unique_counts(content.output_ids)
        penalties = np.array([content.repetition, content.presence, content.frequency], dtype=np.float32)
        arrays = (forced, bias_ids, bias_values, penalties, seen.astype(np.int64), known.values.astype(np.int64), known.counts)
        sent = upload(self.counts.device, *arrays)
        self.forced_ids[slot], self.bias_ids[slot], self.bias_values[slot] = sent[:3]
        self.repetition[slot], self.presence[slot], self.frequency[slot] = sent[3]
        self.emitted[slot].fill_(content.output_ids.size)
        self.prompt_seen[slot].zero_().index_fill_(0, sent[4], True)
        self.counts[slot].zero_().index_copy_(0, sent[5], sent[6].to(torch.int32))

    def forced(self, slots_B: torch.Tensor) -> torch.Tensor:
        """Return the id that each lane must emit next, -1 where it is free. Shapes: int64 slots [B], -1 without one."""
        place = slots_B.clamp(min=0)
        next_ids = self.forced_ids[place, self.emitted[place].clamp(max=self.forced_ids.shape[1] - 1)]
        return torch.where(slots_B >= 0, next_ids, -1)

    def add_biases(self, logits_BW: torch.Tensor, slots_B: torch.Tensor, first_id: int) -> None:
        """Add the biases of lanes with a slot. Mutates: `logits_BW`."""
        lanes = (slots_B >= 0).nonzero()[:, 0]
        held = slots_B[lanes]
        local = self.bias_ids[held] - first_id
        inside = (local >= 0) & (local < logits_BW.shape[1])
        values = torch.where(inside, self.bias_values[held], 0.0).to(logits_BW.dtype)
        rows = logits_BW[lanes]
        rows.scatter_add_(1, local.clamp(0, logits_BW.shape[1] - 1), values)
        logits_BW[lanes] = rows

    def penalise(self, logits_BW: torch.Tensor, slots_B: torch.Tensor, first_id: int) -> None:
        """Apply the penalties of lanes with a slot. Mutates: `logits_BW`."""
        lanes = (slots_B >= 0).nonzero()[:, 0]
        held = slots_B[lanes]
        columns = slice(first_id, first_id + logits_BW.shape[1])
        counts = self.counts[held, columns]
        rows = logits_BW[lanes]
        repetition = self.repetition[held][:, None]
        repeated = torch.where(rows > 0, rows / repetition, rows * repetition)
        rows = torch.where((counts > 0) | self.prompt_seen[held, columns], repeated, rows)
        rows = rows - self.frequency[held][:, None] * counts - self.presence[held][:, None] * (counts > 0)
        logits_BW[lanes] = rows

    def shapes_draw(self, slots_B: torch.Tensor) -> torch.Tensor:
        """Tell which lanes' slots change the distribution (biases or penalties). Shapes: bool [B]."""
        place = slots_B.clamp(min=0)
        active = (self.repetition != 1.0) | (self.presence != 0.0) | (self.frequency != 0.0) | (self.bias_values != 0.0).any(dim=1)
        return (slots_B >= 0) & active[place]

    def advance(self, slots_B: torch.Tensor, tokens_B: torch.Tensor, running_B: torch.Tensor) -> None:
        """Count the tokens that lanes with a slot emitted. Mutates: counts and places of forced ids."""
        mine = (running_B & (slots_B >= 0)).to(torch.int32)
        place = slots_B.clamp(min=0)
        self.emitted.index_add_(0, place, mine.to(torch.int64))
        self.counts.index_put_((place, tokens_B.to(torch.int64)), mine, accumulate=True)
