"""The Gumbel-max draw, with noise made only for ids that can win.

An id wins if its score plus its noise is the largest. The most likely id's own noise bounds from below what the winner
reaches, so id i can win only if its noise does, which is if its u is at most about exp(score_i - bound): for almost all
ids a compare of the hash decides. The noise of the few that are left is made as for all of them, so the winner and its
score are those of the full draw, bit for bit. Called by the sampler; tensors of another device are drawn in full, for
comparisons with kernels only.
"""

from __future__ import annotations

import numpy as np
import torch

from areno.sampling import noise

_WORD = 2.0**32
_SMALL = 1 << 15
"""Elements up to which noise for all of them costs less than finding those who can win."""
_SLACK, _RELATIVE_SLACK = 1e-4, 1e-6


def draw(
    shaped_BW: torch.Tensor,
    weights_BW: torch.Tensor,
    greedy_B: torch.Tensor,
    seeds_B: torch.Tensor,
    positions_B: torch.Tensor,
    first_id: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the winner's place and score of each row; lowest place on ties, no noise for greedy rows.

    Shapes: `shaped` float32 scores, `weights` = exp(shaped - row maximum); [B, 1] int64 and [B] float32.
    """
    if shaped_BW.device.type != "cpu" or shaped_BW.numel() <= _SMALL:
        return _draw_all(shaped_BW, greedy_B, seeds_B, positions_B, first_id)
    top_B = torch.from_numpy(shaped_BW.numpy().argmax(axis=1))
    top_score_B = shaped_BW.gather(1, top_B[:, None])[:, 0]
    keys_B = noise.keys(seeds_B.numpy().view(np.uint64), positions_B.numpy().astype(np.uint64))
    limits = _limits(top_score_B.numpy(), _u_of_tops(keys_B, top_B.numpy(), first_id))
    if not np.isfinite(limits).all():
        # Scores that are not finite, or as large as their own rounding: the full draw says what becomes of them.
        return _draw_all(shaped_BW, greedy_B, seeds_B, positions_B, first_id)
    limits[greedy_B.numpy()] = -1.0
    rows, places, hashed = _contenders(keys_B, weights_BW.numpy(), limits, first_id)
    row, place = torch.from_numpy(rows), torch.from_numpy(places)
    score = noise.of_hashes(hashed).add_(shaped_BW[row, place])
    best_B = torch.where(greedy_B, top_score_B, float("-inf")).scatter_reduce_(0, row, score, "amax")
    winning = (score == best_B[row]).nonzero()[:, 0]
    first_B = torch.full_like(top_B, shaped_BW.shape[1]).scatter_reduce_(0, row[winning], place[winning], "amin")
    return torch.where(greedy_B, top_B, first_B)[:, None], best_B


def _u_of_tops(keys_B: np.ndarray, tops_B: np.ndarray, first_id: int) -> np.ndarray:
    """Return u of each row's own id. Shapes: float64 [B]."""
    hashed = noise.hashes_of(keys_B, (tops_B + first_id).astype(np.uint32))
    return np.minimum((hashed + 0.5) / _WORD, noise.LARGEST_U)


def _limits(top_scores_B: np.ndarray, u_B: np.ndarray) -> np.ndarray:
    """Return the factor that turns an id's weight into the largest hash with which it can win. Shapes: float32 [B].

    noise(u) >= noise(u_top) + score_top - score means -log1p(-u) <= -log1p(-u_top) * weight, and u <= -log1p(-u). The slack
    covers the rounding of scores, weights and noise.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        slack = np.exp(_SLACK + _RELATIVE_SLACK * np.abs(top_scores_B.astype(np.float64)))
        limits: np.ndarray = (-np.log1p(-u_B) * slack * _WORD).astype(np.float32)
    return limits


def _contenders(
    keys_B: np.ndarray, weights_BW: np.ndarray, limits_B: np.ndarray, first_id: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, places and hashes of the ids that can win. Shapes: int64, int64 and uint32 [n]."""
    rows, width = weights_BW.shape
    ids = np.arange(first_id, first_id + width, dtype=np.uint32)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    # Two more than the limit, since a hash is half a step below the u that it stands for.
    offset = np.where(limits_B < 0.0, np.float32(-1.0), np.float32(2.0))[:, None]
    for part in noise.parts(rows, width):
        hashed = noise.hashes(keys_B, ids[part])
        bounds = weights_BW[:, part] * limits_B[:, None]
        bounds += offset
        won = np.flatnonzero(hashed.astype(np.float32) <= bounds)
        row, place = np.divmod(won, hashed.shape[1])
        found.append((row, place + part.start, hashed.reshape(-1)[won]))
    row, place, hashed = (np.concatenate(pieces) for pieces in zip(*found))
    return row, place, hashed


def _draw_all(
    shaped_BW: torch.Tensor, greedy_B: torch.Tensor, seeds_B: torch.Tensor, positions_B: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(first_id, first_id + shaped_BW.shape[1], dtype=torch.int32, device=shaped_BW.device)
    scores = noise.gumbel(seeds_B, positions_B, ids).masked_fill_(greedy_B[:, None], 0.0).add_(shaped_BW)
    best = scores.argmax(dim=1, keepdim=True)
    return best, scores.gather(1, best)[:, 0]
