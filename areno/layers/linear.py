"""Projections whose weights may be several checkpoint tensors in one storage.

Called by the decoders. One fused matmul replaces two or three: on a small CPU model a step costs as much in calls as
in arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from areno.weights.names import ParameterTable


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. Shapes: weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    weight_transposed: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Project. Shapes: x [T, in] -> [T, out]."""
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add the projection of `x` to `residual`. Shapes: [T, out] and [T, in]. Mutates: residual.

        In fp32 the addition rides in the matmul. In bf16 it does not: the projection is rounded before it is added,
        as in Hugging Face's models.
        """
        if self.bias is None and residual.dtype == torch.float32:
            residual.addmm_(x, self.weight_transposed)
        else:
            residual.add_(functional.linear(x, self.weight, self.bias))


def allocate_linear(table: ParameterTable, module: str, name: str, parts: Mapping[str, int], in_size: int, *, bias: bool) -> Linear:
    """Allocate projection `module`.`name`, made of the checkpoint's projections `parts` (name -> rows) in order."""
    out_size = sum(parts.values())
    tensors = {}
    for kind, shape in (("weight", (out_size, in_size)), ("bias", (out_size,))):
        if kind == "bias" and not bias:
            continue
        rows = {f"{module}.{part}.{kind}": count for part, count in parts.items()}
        tensors[kind] = table.allocate(f"{module}.{name}.{kind}", shape, rows)
    return Linear(tensors["weight"], tensors["weight"].t(), tensors.get("bias"))
