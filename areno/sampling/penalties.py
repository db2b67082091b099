"""Sampling slots: what only some requests need of the sampler, kept by slot beside the rows.

A slot holds forced ids, up to 256 biases, the three penalties, which ids the prompt has and how often each id came out. It
is built from the request's ids when its row is set, so that a row that was preempted gets it back, and advances with
every token. The decode paths own one `SlotTables` each.

Sources: repetition penalty as in CTRL (Keskar et al. 2019), over prompt and output; presence and frequency penalties as in
the OpenAI API, over the output alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from areno.request_values import MAX_BIASES
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

    def fill(self, contents: Sequence[tuple[int, SlotContent]]) -> None:
        """Write slots anew, all of them in one upload and a fixed number of launches. Mutates: those slots."""
        if not contents:
            return
        held = dict(contents)
        slots, filled = np.array(list(held), dtype=np.int64), list(held.values())
        bias_ids, bias_values = np.zeros((slots.size, MAX_BIASES), dtype=np.int64), np.zeros((slots.size, MAX_BIASES), dtype=np.float32)
        for place, content in enumerate(filled):
            bias_ids[place, : content.bias_ids.size], bias_values[place, : content.bias_ids.size] = content.bias_ids, content.bias_values
        penalties = np.array([[content.repetition, content.presence, content.frequency] for content in filled], dtype=np.float32)
        forced, outputs = [content.forced_ids for content in filled], [content.output_ids for content in filled]
        width, vocab = self.forced_ids.shape[1], self.counts.shape[1]
        sent = upload(
            self.counts.device,
            slots,
            bias_ids,
            bias_values,
            np.ascontiguousarray(penalties.T),
            np.array([ids.size for ids in outputs], dtype=np.int64),
            _flat([np.arange(ids.size) for ids in forced], slots * width),
            np.concatenate(forced).astype(np.int32),
            _flat([content.prompt_ids for content in filled], slots * vocab),
            _flat(outputs, slots * vocab),
        )
        places = sent[0]
        self.bias_ids.index_copy_(0, places, sent[1])
        self.bias_values.index_copy_(0, places, sent[2])
        for column, values in zip((self.repetition, self.presence, self.frequency), sent[3]):
            column.index_copy_(0, places, values)
        self.emitted.index_copy_(0, places, sent[4])
        self.forced_ids.index_fill_(0, places, -1).view(-1).index_copy_(0, sent[5], sent[6])
        self.prompt_seen.index_fill_(0, places, False).view(-1).index_fill_(0, sent[7], True)
        counted = torch.ones_like(sent[8], dtype=torch.int32)
        self.counts.index_fill_(0, places, 0).view(-1).index_add_(0, sent[8], counted)

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


def _flat(ids: Sequence[np.ndarray], starts: np.ndarray) -> np.ndarray:
    """Return the places of each array's ids behind its own start, one after the other. Shapes: int64 [sum of sizes]."""
    return np.concatenate([np.asarray(part, dtype=np.int64) + start for part, start in zip(ids, starts)])
