"""Root-mean-square norm in Hugging Face's order of rounding.

Normalise in fp32, round to the model's dtype, then multiply by the weight. Doing all of it in fp32 and rounding last
gives other bits in a quarter of a bf16 tensor's elements, and the trainer's model does not do that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last `size` elements.

    Shapes: weight [size], or [heads, size] to give each head of x [T, heads, size] its own.
    """

    weight: torch.Tensor
    eps: float
    size: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed copy of `x`."""
        if x.dtype == torch.float32 and self.weight.dim() == 1:
            return functional.rms_norm(x, (self.size,), self.weight, self.eps)
        return functional.rms_norm(x, (self.size,), None, self.eps).mul_(self.weight)
