"""Min-p, top-k and top-p as thresholds on scores, found by searching values, never by sorting.

Each filter sees the mass that those before it left, in this order; ids whose score equals a threshold are all kept. Float
bits, read as integers, are ordered like the floats, so halving the interval of bits finds an exact threshold in 32 steps.
"""

from __future__ import annotations

import torch

_NEG_INF = float("-inf")
_STEPS = 32


def _ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Map float32 to int64 so that integers compare as the floats do."""
    bits = values.view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _largest_threshold(bits_BW: torch.Tensor, weights_BW: torch.Tensor, needed_B: torch.Tensor) -> torch.Tensor:
    """Return per lane the largest value t such that the weights of all scores >= t add up to at least `needed`.

    Shapes: [B]. Where even all weights do not reach `needed`, t is below every score.
    """
    low = bits_BW.amin(dim=1) - 1
    high = bits_BW.amax(dim=1)
    zero = torch.zeros((), dtype=weights_BW.dtype, device=weights_BW.device)
    for _ in range(_STEPS + 1):
        middle = (low + high + 1) >> 1
        reached = torch.where(bits_BW >= middle[:, None], weights_BW, zero).sum(dim=1) >= needed_B
        low = torch.where(reached, middle, low)
        high = torch.where(reached, high, middle - 1)
    return low


def _drop(scores_BW: torch.Tensor, dropped_BW: torch.Tensor) -> torch.Tensor:
    return scores_BW.masked_fill(dropped_BW, _NEG_INF)


def min_p(scores_BW: torch.Tensor, share_B: torch.Tensor) -> torch.Tensor:
    """Keep scores whose probability is at least `share` of the largest one's; share 0 is off."""
    limit = scores_BW.amax(dim=1) + share_B.log()
    return _drop(scores_BW, scores_BW < limit[:, None])


def top_k(scores_BW: torch.Tensor, count_B: torch.Tensor) -> torch.Tensor:
    """Keep the `count` largest scores and what equals the last of them; count 0 is off."""
    bits = _ordered_bits(scores_BW)
    threshold = _largest_threshold(bits, torch.ones_like(scores_BW, dtype=torch.int32), count_B)
    return _drop(scores_BW, (bits < threshold[:, None]) & (count_B > 0)[:, None])


def top_p(scores_BW: torch.Tensor, mass_B: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of largest scores whose probabilities reach `mass`, the crossing id included; mass 1 is off."""
    weights = (scores_BW - scores_BW.amax(dim=1, keepdim=True)).exp().double()
    bits = _ordered_bits(scores_BW)
    threshold = _largest_threshold(bits, weights, weights.sum(dim=1) * mass_B.double())
    return _drop(scores_BW, (bits < threshold[:, None]) & (mass_B < 1.0)[:, None])


def apply(scores_BW: torch.Tensor, *, min_p_B: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Apply the three filters in their order. Shapes: scores [B, W] of the whole vocabulary; returns a new tensor."""
    return top_p(top_k(min_p(scores_BW, min_p_B), top_k_B), top_p_B)
