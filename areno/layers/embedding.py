"""The two ends of a decoder: token ids to hidden states, hidden states to logits.

They may share one tensor (tied); ranks cut both by ids, alike. Logits are always fp32. A bf16 head multiplies bf16 by bf16 into
fp32 on CUDA; the CPU has no such product, so there the head multiplies an fp32 copy of itself, which the table rebuilds after an
update.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from areno.layers.linear import PackedWeight
from areno.parallel import TPGroup
from areno.weights.derived import DerivedCopy
from areno.weights.names import ParameterTable


class Embedding:
    """Rows of a table by token id. Shapes: weight [V, hidden], of a rank its ids from `first_id` on."""

    __slots__ = ("_group", "first_id", "weight")

    def __init__(self, weight: torch.Tensor, *, first_id: int = 0, group: TPGroup | None = None):
        self.weight, self.first_id = weight, first_id
        self._group = group or TPGroup.single(weight.device)

    def __call__(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [T, hidden]; ids (int32 or int64) must lie in the vocabulary. Blocks: on the CPU for the other ranks."""
        if self._group.size == 1:
            return self.weight.index_select(0, ids_T)
        local = ids_T - self.first_id
        here = (local >= 0) & (local < self.weight.shape[0])
        rows = self.weight.index_select(0, local.clamp_(0, self.weight.shape[0] - 1))
        # One rank has the row, the others add zeros.
        return self._group.all_reduce_(rows.masked_fill_(~here[:, None], 0.0))


class Head:
    """Hidden states to fp32 logits, of a rank those of its own ids. Shapes: weight [V, hidden]."""

    __slots__ = ("_copy", "_packed", "weight")

    def __init__(self, table: ParameterTable, weight: torch.Tensor, *, pack: bool = False):
        self.weight = weight
        self._packed = PackedWeight(table, weight) if pack and PackedWeight.is_possible(table) else None
        self._copy: DerivedCopy | None = None
        if weight.dtype != torch.float32 and weight.device.type == "cpu":
            self._copy = table.derive(weight, torch.Tensor.float)

    def __call__(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Return logits [S, V] in fp32."""
        if self._packed is not None:
            return self._packed(hidden_SH, None)
        if self._copy is not None:
            return functional.linear(hidden_SH.float(), self._copy.current)
        if self.weight.dtype == torch.float32:
            return functional.linear(hidden_SH, self.weight)
        return torch.mm(hidden_SH, self.weight.t(), out_dtype=torch.float32)
