"""Rotary positions, default kind: the two halves of a head turn against each other.

The table of angles is made once in fp32 for every position of the context and rounded to the model's dtype, as
Hugging Face's models do at each forward. A forward looks its positions up once and every layer rotates q and k, which
lie side by side in the fused projection, in one go.
Source: RoFormer (arXiv 2104.09864), in the half-rotation layout of GPT-NeoX.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    """Cosines and signed sines of every position below `num_positions`."""

    __slots__ = ("_angles",)

    def __init__(self, head_dim: int, theta: float, num_positions: int, *, dtype: torch.dtype, device: torch.device):
        assert head_dim % 2 == 0, f"head_dim={head_dim} cannot be split in halves"
        inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse
        cos, sin = angles.cos(), angles.sin()
        full = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self._angles = full[:, :, None].to(device=device, dtype=dtype)

    def select(self, positions_T: torch.Tensor) -> RotaryAngles:
        """Return the angles at `positions_T` (int32 or int64, below the table's length)."""
        cos, sin = self._angles.index_select(0, positions_T).unbind(1)
        return RotaryAngles(cos, sin)
