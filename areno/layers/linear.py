"""Projections whose weights may be several checkpoint tensors in one storage.

Called by the decoders. One fused matmul replaces two or three: on a small CPU model a step costs as much in calls as
in arithmetic. On the CPU a few rows times a large matrix cost mostly the packing of that matrix, which the plain product repeats
at every call; `PackedWeight` keeps it packed, and `SidewaysWeight` turns the product over where the matrix is not taller than wide.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from areno.config import LANE_MULTIPLE
from areno.weights.cut import Cut
from areno.weights.names import ParameterTable
from areno.weights.shards import TensorShard


class PackedWeight:
    """A copy of a weight in the layout that oneDNN multiplies fastest; the table keeps it up to date.

    Its products give a row the same bits at any number of rows (a test holds it to that).
    """

    __slots__ = ("_packed",)

    def __init__(self, table: ParameterTable, weight: torch.Tensor) -> None:
        self._packed = table.derive(weight, torch.ops.mkldnn._reorder_linear_weight)

    @staticmethod
    def is_possible(table: ParameterTable) -> bool:
        """Whether weights of this table can be packed: fp32 on a CPU whose torch has oneDNN."""
        on_cpu = table.device.type == "cpu" and torch.backends.mkldnn.is_available()
        return on_cpu and table.dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Project. Shapes: x [T, in] -> [T, out]."""
        projected: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed.current, bias, "none", [], "")
        return projected


class SidewaysWeight:
    """A weight that is multiplied as W x^T, which the library does faster for a few rows if W is not taller than wide.

    At multiples of four from `LEAST_ROWS` rows on, to which others are padded, its products give a row the same bits at any number
    of rows; where a trial shows that they do not, this is not possible.
    """

    LEAST_ROWS = 12
    __slots__ = ("_weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    @staticmethod
    def is_possible(table: ParameterTable, out_size: int, in_size: int) -> bool:
        """Whether a weight of this table can be multiplied so: fp32 on a CPU, and steady there."""
        fits = table.device.type == "cpu" and table.dtype == torch.float32 and out_size <= in_size
        return fits and _is_steady(out_size, in_size)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Project. Shapes: x [T, in] -> [T, out], strided."""
        rows = x.shape[0]
        missing = max(self.LEAST_ROWS - rows, -rows % LANE_MULTIPLE)
        if missing:
            x = functional.pad(x, (0, 0, 0, missing))
        projected = torch.mm(self._weight, x.t()).t()[:rows]
        return projected if bias is None else projected + bias


@functools.cache
def _is_steady(out_size: int, in_size: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn((rows, in_size), generator=generator) for rows in (out_size, 512))
    whole = torch.mm(weight, x.t())
    return all(torch.equal(torch.mm(weight, x[:rows].t()), whole[:, :rows]) for rows in (12, 16, 20, 24, 32, 48, 64, 128, 192, 256))


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. Shapes: weight [out, in], bias [out] or None; `packed` multiplies in its place."""

    weight: torch.Tensor
    weight_transposed: torch.Tensor
    bias: torch.Tensor | None
    packed: PackedWeight | SidewaysWeight | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Project. Shapes: x [T, in] -> [T, out]."""
        if self.packed is not None:
            return self.packed(x, self.bias)
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add the projection of `x` to `residual`. Shapes: [T, out] and [T, in]. Mutates: residual.

        In fp32 the addition may ride in the matmul. In bf16 it does not: the projection is rounded before it is added,
        as in Hugging Face's models.
        """
        if self.packed is None and self.bias is None and residual.dtype == torch.float32:
            residual.addmm_(x, self.weight_transposed)
        else:
            residual.add_(self(x))


def allocate_linear(
    table: ParameterTable,
    module: str,
    name: str,
    parts: Mapping[str, int | Cut],
    in_size: int | Cut,
    *,
    bias: bool,
    pack: bool,
    ranks: int = 1,
) -> Linear:
    """Allocate projection `module`.`name`, made of the checkpoint's projections `parts` (name -> rows) in order.

    A cut says which rows, or which columns, one of `ranks` holds. `pack` keeps a packed copy where that is possible.
    """
    cuts = {part: _cut(rows) for part, rows in parts.items()}
    columns = _cut(in_size)
    out_size = sum(rows.size for rows in cuts.values())
    tensors = {}
    for kind, shape in (("weight", (out_size, columns.size)), ("bias", (out_size,))):
        if kind == "bias" and not bias:
            continue
        names = {part: f"{module}.{part}.{kind}" for part in cuts}
        shards = {names[part]: TensorShard.of(rows, columns if kind == "weight" else None, ranks=ranks) for part, rows in cuts.items()}
        counts = {names[part]: rows.size for part, rows in cuts.items()}
        tensors[kind] = table.allocate(f"{module}.{name}.{kind}", shape, counts, shards if ranks > 1 else None)
    packed: PackedWeight | SidewaysWeight | None = None
    if pack and SidewaysWeight.is_possible(table, out_size, columns.size):
        packed = SidewaysWeight(tensors["weight"])
    elif pack and PackedWeight.is_possible(table):
        packed = PackedWeight(table, tensors["weight"])
    return Linear(tensors["weight"], tensors["weight"].t(), tensors.get("bias"), packed)


def _cut(size: int | Cut) -> Cut:
    return size if isinstance(size, Cut) else Cut.whole(size)
