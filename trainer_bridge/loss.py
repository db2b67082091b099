"""The trainer's log-probabilities of a batch's tokens, the clipped loss on them, and how far they are from the rollout's.

Where filters narrowed the draw, the policy that drew was the model renormalised over the ids that were kept, and so must the
policy be that is trained: `token_logprobs` renormalises over the kept sets that the batch has, and `policy_loss` refuses
filtered tokens without. Invariant: places outside the mask change neither loss nor gradient, whatever they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer_bridge.batch import Batch, check_batch
from trainer_bridge.errors import InvalidBatch, KeptSetsMissing, shown
from trainer_bridge.option_names import OTHER_OPTIONS, checks_names
from trainer_bridge.turns import is_count, is_finite

MAX_LOG_RATIO = 20.0
MAX_CLIP = 1e9


@checks_names(InvalidBatch, OTHER_OPTIONS)
def token_logprobs(logits_STV: torch.Tensor, batch: Batch, *, over_kept: bool = True) -> torch.Tensor:
    """Return the log-probability of each token under the model, float32 [S, T], 0 where nothing was sampled.

    `logits_STV` is the model's output for `batch.ids_ST`; place t is predicted by the output at t - 1, divided by the
    temperature it was sampled with. Only sampled places are computed. A place with a kept set is renormalised over it;
    `over_kept=False` takes the whole vocabulary everywhere.
    Raises: InvalidBatch for logits that do not belong to the batch.
    """
    check_batch(batch)
    sequences, places = batch.ids_ST.shape
    fits = isinstance(logits_STV, torch.Tensor) and logits_STV.ndim == 3 and logits_STV.shape[:2] == (sequences, places)
    if not fits or not logits_STV.is_floating_point() or logits_STV.shape[2] <= int(batch.ids_ST.max()):
        raise InvalidBatch(
            f"logits are {_kind(logits_STV)}",
            field="logits_STV",
            value=_kind(logits_STV),
            limit=f"floats of shape [{sequences}, {places}, V], V above the largest id {int(batch.ids_ST.max())}",
            remedy="pass the model's whole output for batch.ids_ST, not shifted",
        )
    predicted_S, predicted_T = torch.nonzero(batch.loss_mask_ST, as_tuple=True)
    temperatures = batch.temperatures_ST[predicted_S, predicted_T]
    logits = logits_STV[predicted_S, predicted_T - 1].float() / temperatures[:, None]
    ids = batch.ids_ST[predicted_S, predicted_T][:, None]
    if over_kept and batch.kept_ids.numel():
        chosen = logits.gather(-1, ids)[:, 0] - _log_mass(logits, batch.kept_counts_ST[predicted_S, predicted_T], batch.kept_ids)
    else:
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, ids)[:, 0]
    return torch.zeros(batch.ids_ST.shape, dtype=torch.float32, device=logits_STV.device).index_put((predicted_S, predicted_T), chosen)


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _check_places(new_logprobs_ST: torch.Tensor, batch: Batch) -> None:
    """Refuse what would only broadcast against the batch. Raises: InvalidBatch."""
    fits = isinstance(new_logprobs_ST, torch.Tensor) and new_logprobs_ST.shape == batch.ids_ST.shape
    if not fits or not new_logprobs_ST.is_floating_point():
        raise InvalidBatch(
            f"new log-probabilities are {_kind(new_logprobs_ST)}",
            field="new_logprobs_ST",
            value=_kind(new_logprobs_ST),
            limit=f"floats of the batch's shape {list(batch.ids_ST.shape)}",
            remedy="pass token_logprobs(logits, batch) of this batch",
        )


def _log_mass(logits: torch.Tensor, counts: torch.Tensor, kept_ids: torch.Tensor) -> torch.Tensor:
    """Return the logsumexp of each row over its kept ids, or over all ids where it has none. Shapes: [n, V], [n], [sum]."""
    kept, whole = torch.nonzero(counts > 0)[:, 0], torch.nonzero(counts == 0)[:, 0]
    sizes = counts[kept]
    there = torch.arange(int(sizes.max()), device=counts.device)[None, :] < sizes[:, None]
    columns = torch.zeros(there.shape, dtype=torch.int64, device=counts.device)
    columns[there] = kept_ids
    inside = logits[kept].gather(1, columns).masked_fill(~there, float("-inf"))
    mass = torch.zeros(counts.shape, dtype=logits.dtype, device=logits.device)
    return mass.index_put((kept,), torch.logsumexp(inside, dim=1)).index_put((whole,), torch.logsumexp(logits[whole], dim=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss to call backward on, and what it was made of (plain floats over the tokens that carry loss)."""

    loss: torch.Tensor
    mean_ratio: float
    clip_fraction: float
    mean_abs_log_ratio: float


@checks_names(InvalidBatch, OTHER_OPTIONS)
def policy_loss(
    new_logprobs_ST: torch.Tensor, batch: Batch, *, clip_low: float = 0.2, clip_high: float = 0.2, num_tokens: int | None = None
) -> PolicyLoss:
    """Return the clipped policy-gradient loss, the sum over sampled tokens divided by `num_tokens`.

    `new_logprobs_ST` are `token_logprobs` of the batch, over its kept sets. The importance ratio is taken against the behaviour
    log-probabilities, that is, against the policy which really drew the tokens, however old; beyond a log ratio of +-20 a token
    has no gradient. `num_tokens` defaults to the
    batch's own count; give the whole step's count to micro-batches.
    Raises: KeptSetsMissing, InvalidBatch. Source: clipped surrogate objective, arXiv 1707.06347.
    """
    check_batch(batch)
    if batch.num_without_kept:
        raise KeptSetsMissing(
            f"{batch.num_without_kept} tokens were drawn through top-k, top-p or min-p and have no kept sets",
            field="kept_ids",
            value=batch.num_without_kept,
            limit="a ratio needs both policies over the ids that could be drawn",
            remedy="sample with return_kept_ids=True and top_k of 1 to 64 (serve --kept-ids), or without filters",
        )
    _check_places(new_logprobs_ST, batch)
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        bounded = is_finite(value) and 0 <= float(value) <= MAX_CLIP
        if not bounded and not (isinstance(value, float) and value == math.inf):
            raise InvalidBatch(f"{name}={shown(value)}", field=name, value=value, limit="a number of at least 0", remedy="use 0.2")
    if num_tokens is not None and (not is_count(num_tokens) or not 1 <= num_tokens < 2**53):
        raise InvalidBatch(
            f"num_tokens={shown(num_tokens)}",
            field="num_tokens",
            value=num_tokens,
            limit="an integer of at least 1",
            remedy="pass the whole step's number of sampled tokens",
        )
    mask = batch.loss_mask_ST
    zero = torch.zeros((), dtype=torch.float32, device=new_logprobs_ST.device)
    # `where` and not a product: garbage outside the mask may be NaN or infinite, and 0 * NaN is NaN in loss and gradient.
    log_ratio = torch.where(mask, new_logprobs_ST - batch.behaviour_logprobs_ST, zero)
    advantages = torch.where(mask, batch.advantages_ST, zero)
    # exp overflows float32 above 88, and an infinite ratio makes NaN of the gradients of all tokens. Within the bounds the
    # clamp changes no bit of value or gradient; beyond them the gradient is 0.
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - float(clip_low), 1 + float(clip_high))
    objective = torch.where(mask, torch.minimum(ratio * advantages, clipped * advantages), zero)
    count = max(1, batch.num_loss_tokens)
    loss = -objective.sum() / (count if num_tokens is None else num_tokens)
    with torch.no_grad():
        clips = mask & (clipped * advantages < ratio * advantages)
        mean_ratio = float(torch.where(mask, ratio, zero).sum() / count)
        return PolicyLoss(
            loss=loss,
            mean_ratio=mean_ratio,
            clip_fraction=float(clips.sum() / count),
            mean_abs_log_ratio=float(log_ratio.abs().sum() / count),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """How far the trainer's log-probabilities are from the reported ones.

    `max_exact` is over the `num_exact` tokens of the trainer's own version (`Batch.exact_ST`), where any gap is a defect;
    `mean_other` is the mean |log ratio| of the `num_other` remaining tokens, where a gap is staleness.
    """

    max_exact: float
    num_exact: int
    mean_other: float
    num_other: int

    def __str__(self) -> str:
        """Return the part in which a gap is a defect."""
        return f"gap {self.max_exact:.1e} over {self.num_exact} tokens" if self.num_exact else "gap unknown: no token of this version"

    @classmethod
    def merged(cls, parts: Sequence[LogprobGap]) -> LogprobGap:
        """Return the gap over the tokens of all parts, for example a step's micro-batches."""
        num_other = sum(part.num_other for part in parts)
        return cls(
            max_exact=max((part.max_exact for part in parts), default=0.0),
            num_exact=sum(part.num_exact for part in parts),
            mean_other=sum(part.mean_other * part.num_other for part in parts) / max(1, num_other),
            num_other=num_other,
        )


@checks_names(InvalidBatch, OTHER_OPTIONS)
def logprob_gap(new_logprobs_ST: torch.Tensor, batch: Batch, *, over_kept: bool = True) -> LogprobGap:
    """Compare the trainer's log-probabilities with those that the rollout reported.

    `over_kept` is what `token_logprobs` was given. Over a kept set the like quantity is the behaviour log-probability, unless
    penalties, biases or `min_new_tokens` changed it too: such tokens are left out here, and compared with `over_kept=False`.
    Raises: InvalidBatch.
    """
    check_batch(batch)
    _check_places(new_logprobs_ST, batch)
    with torch.no_grad():
        kept = (batch.kept_counts_ST > 0) & over_kept
        reported = torch.where(kept, batch.behaviour_logprobs_ST, batch.logprobs_ST)
        alike = batch.loss_mask_ST & ~(kept & batch.shaped_ST)
        gap = (new_logprobs_ST - reported).abs()
        exact, other = gap[alike & batch.exact_ST], gap[alike & ~batch.exact_ST]
        return LogprobGap(
            max_exact=float(exact.max()) if exact.numel() else 0.0,
            num_exact=exact.numel(),
            mean_other=float(other.mean()) if other.numel() else 0.0,
            num_other=other.numel(),
        )
