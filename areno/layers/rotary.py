"""Rotary positions: the two halves of a head turn against each other, each dimension with a frequency of its own.

The table of angles is made once in fp32 for every position of the context and rounded to the model's dtype, as
Hugging Face's models do at each forward. A forward looks its positions up once and every layer rotates q and k, which
lie side by side in the fused projection, in one go. How a model's frequencies are stretched changes the table alone.
Source: RoFormer (arXiv 2104.09864), in the half-rotation layout of GPT-NeoX.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from areno.layers.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Angles of one forward's positions. Shapes: both [T, 1, D]; `sin` is negative in the first half."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rotate(self, x_THD: torch.Tensor) -> torch.Tensor:
        """Return `x_THD` rotated; the heads may be those of q and of k together."""
        rotated_THD = x_THD * self.cos
        return rotated_THD.addcmul_(x_THD.roll(x_THD.shape[-1] // 2, -1), self.sin)


class RotaryTable:
    """Cosines and signed sines of every position below `num_positions`. Shapes: `angles` [positions, 2, 1, D]."""

    __slots__ = ("angles",)

    def __init__(self, head_dim: int, rope: Rope, num_positions: int, *, dtype: torch.dtype, device: torch.device):
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies(head_dim, rope)
        cos, sin = angles.cos(), angles.sin()
        if isinstance(rope.scaling, YarnScaling):
            cos, sin = cos * rope.scaling.magnitude, sin * rope.scaling.magnitude
        full = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self.angles = full[:, :, None].to(device=device, dtype=dtype)

    def select(self, positions_T: torch.Tensor) -> RotaryAngles:
        """Return the angles at `positions_T` (int32 or int64, below the table's length)."""
        cos, sin = self.angles.index_select(0, positions_T).unbind(1)
        return RotaryAngles(cos, sin)


def frequencies(head_dim: int, rope: Rope) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions. Shapes: [D / 2], float32. Units: radians."""
    assert head_dim % 2 == 0, f"head_dim={head_dim} cannot be split in halves"
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / periods
    scaling = rope.scaling
    if scaling is None:
        return plain
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    # Far positions multiply a frequency's last bit, hence the reference's order of operations from here on.
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_positions / (2 * math.pi / plain)
        kept = ((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)).clamp(0.0, 1.0)
        return (1 - kept) * plain / scaling.factor + kept * plain
    kept = _kept_yarn(head_dim, rope.theta, scaling)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + plain * kept


def _kept_yarn(head_dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Return the share of its plain frequency that each pair of dimensions keeps. Shapes: [D / 2]."""

    def dimension_that_turns(times: float) -> float:
        return head_dim * math.log(scaling.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_that_turns(scaling.fast_turns), dimension_that_turns(scaling.slow_turns)
    if scaling.whole_dimensions:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound is in single dimensions although the ramp runs over pairs: checkpoints were trained with it so.
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
