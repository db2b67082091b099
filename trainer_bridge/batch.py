"""From training samples to what an optimizer step needs: advantages and tensors.

A trainer calls `collate` (or `group_advantages` first), its own model, and then what is in `loss.py`. Legend of shapes: S
sequences (1 when packed), T token places, V vocabulary. Every [S, T] tensor speaks about the token at that place,
so `logprobs_ST[s, t]` belongs to `ids_ST[s, t]` and is what the model's output at the place before must reproduce.
Invariant: places outside `loss_mask_ST` (prompt, tool text, padding) change neither loss nor gradient, whatever they hold.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer_bridge.errors import InvalidBatch, shown
from trainer_bridge.option_names import OTHER_OPTIONS, checks_names
from trainer_bridge.samples import SampleStatus, TrainingSample, as_samples
from trainer_bridge.turns import is_count, is_finite, listed

DEFAULT_DDOF = 1
DEFAULT_EPS = 1e-6
MAX_MULTIPLE = 2**20
MIN_RELATIVE_SPREAD = 4 * float(np.finfo(np.float64).eps)


def _entries(name: str, given: Any) -> list[Any]:
    """Return a list's, an array's or a tensor's entries. Raises: InvalidBatch."""
    flat = getattr(given, "ndim", 1) == 1 and not isinstance(given, (bytes, Mapping, Set))
    entries = listed(given) if flat else None
    if entries is None:
        raise InvalidBatch(
            f"{name} is {shown(given)}",
            field=name,
            value=type(given).__name__,
            limit="one entry for each member, in one dimension",
            remedy=f"pass {name} as a list or a flat array",
        )
    return given.tolist() if hasattr(given, "tolist") else entries


@checks_names(InvalidBatch, OTHER_OPTIONS)
def group_advantages(
    rewards: Sequence[float | None] | np.ndarray, groups: Sequence[Hashable], *, ddof: int = DEFAULT_DDOF, eps: float = DEFAULT_EPS
) -> np.ndarray:
    """Return (reward - mean) / (std + eps) of each reward within its group, float64 [len(rewards)].

    `groups` names each reward's group, in any order. None marks a failed member: it counts in neither mean nor spread and
    gets 0. Groups with one valid member, or whose rewards are all equal (up to rounding), get 0. `ddof` is the divisor's correction in the
    standard deviation: 1 (sample) by default, 0 (population) on request.
    Raises: InvalidBatch.
    """
    rewards, groups = _entries("rewards", rewards), _entries("groups", groups)
    if len(rewards) != len(groups):
        raise InvalidBatch(
            f"groups has {len(groups)} entries",
            field="groups",
            value=len(groups),
            limit=f"rewards has {len(rewards)}",
            remedy="name one group for each reward",
        )
    if not is_count(ddof) or ddof > 1:
        raise InvalidBatch(f"ddof={shown(ddof)}", field="ddof", value=ddof, limit="ddof is 0 or 1", remedy="use the default")
    if not is_finite(eps) or eps < 0:
        raise InvalidBatch(f"eps={shown(eps)}", field="eps", value=eps, limit="eps is finite and >= 0", remedy="use the default")
    for place, (reward, group) in enumerate(zip(rewards, groups)):
        if reward is not None and not is_finite(reward):
            raise InvalidBatch(
                f"rewards[{place}]={shown(reward)}",
                field="rewards",
                value=reward,
                limit="rewards are finite numbers",
                remedy="pass None for a failed member",
            )
        if not isinstance(group, Hashable):
            raise InvalidBatch(
                f"groups[{place}] is a {type(group).__name__}",
                field="groups",
                value=type(group).__name__,
                limit="groups are hashable keys",
                remedy="name each group by a number or a text",
            )
    values = np.array([math.nan if reward is None else float(reward) for reward in rewards], np.float64)
    valid = np.array([reward is not None for reward in rewards], np.bool_)
    places: dict[Hashable, list[int]] = {}
    for place in np.flatnonzero(valid).tolist():
        places.setdefault(groups[place], []).append(place)
    advantages = np.zeros(len(values), np.float64)
    for members in places.values():
        group = values[members]
        if len(members) > 1:
            advantages[members] = _normalised(group, ddof, eps)
    return advantages


def _normalised(group: np.ndarray, ddof: int, eps: float) -> np.ndarray:
    """Return (x - mean) / (std + eps), finite for all finite x; zeros where the spread is no more than rounding."""
    # A power of two scales without rounding, so that sums and squares neither overflow nor vanish and no bit changes otherwise.
    exponent = int(np.frexp(np.abs(group).max())[1])
    scaled = np.ldexp(group, -exponent)
    if scaled.max() - scaled.min() <= MIN_RELATIVE_SPREAD:
        return np.zeros_like(group)
    with np.errstate(over="ignore"):
        scaled_eps = np.ldexp(np.float64(eps), -exponent)
    return (scaled - scaled.mean()) / (scaled.std(ddof=ddof) + scaled_eps)


@checks_names(InvalidBatch, OTHER_OPTIONS)
def sample_advantages(samples: Sequence[TrainingSample], *, ddof: int = DEFAULT_DDOF, eps: float = DEFAULT_EPS) -> np.ndarray:
    """Return each sample's group advantage, float64 [len(samples)].

    Rows of one forked episode (same group and member) count once. Members that are not trainable count as failed.
    Raises: InvalidBatch for what is no sample, and when rows of one member disagree about the reward.
    """
    samples = as_samples("samples", samples, error=InvalidBatch)
    members: dict[tuple[Hashable, int], float | None] = {}
    for sample in samples:
        key = (sample.group_id, sample.member)
        reward = sample.reward if sample.is_trainable else None
        if members.setdefault(key, reward) != reward:
            raise InvalidBatch(
                f"member {sample.member} of group {sample.group_id!r} has rewards {members[key]} and {reward}",
                field="reward",
                value=reward,
                limit="rows of one episode share its reward",
                remedy="give all rows of an episode the same reward and status",
            )
    values = group_advantages(list(members.values()), [group for group, _ in members], ddof=ddof, eps=eps)
    by_member = dict(zip(members, values))
    return np.array([by_member[sample.group_id, sample.member] for sample in samples], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Padded (S rows) or packed (one row, `sequence_ST` tells sequences apart) tensors of the same [S, T] shape.

    dtypes: ids and positions int64, masks bool, the rest float32; versions int64. `behaviour_logprobs_ST` equals
    `logprobs_ST` where the rollout reported no other. `attention_mask_ST` marks real tokens. `temperatures_ST` is what the
    logits that predict a place must be divided by. `exact_ST` marks sampled tokens that come from `version` alone (all
    False without one). `filtered_ST` marks tokens drawn from what filters had left of the vocabulary, `shaped_ST` those drawn
    under penalties, biases or `min_new_tokens`. `kept_counts_ST` int64 (0 where there is no kept set) cut `kept_ids` int64, the ids
    that the filters kept, into places, row by row; `num_without_kept` counts the filtered tokens without. `samples` are the rows in
    order; `num_left_out` counts the samples that were not trainable, `num_cancelled` those among them that were cancelled.
    `mean_kept_tokens` and `mean_cancelled_tokens` are the mean numbers of sampled tokens of a row that is kept and of a cancelled one
    (NaN without any): where slow members are let go, short episodes are kept, and the two show how much.
    """

    ids_ST: torch.Tensor
    attention_mask_ST: torch.Tensor
    loss_mask_ST: torch.Tensor
    logprobs_ST: torch.Tensor
    behaviour_logprobs_ST: torch.Tensor
    advantages_ST: torch.Tensor
    temperatures_ST: torch.Tensor
    positions_ST: torch.Tensor
    versions_ST: torch.Tensor
    sequence_ST: torch.Tensor
    exact_ST: torch.Tensor
    filtered_ST: torch.Tensor
    shaped_ST: torch.Tensor
    kept_counts_ST: torch.Tensor
    kept_ids: torch.Tensor
    packed: bool
    samples: tuple[TrainingSample, ...]
    num_without_kept: int = 0
    num_left_out: int = 0
    num_cancelled: int = 0
    mean_kept_tokens: float = math.nan
    mean_cancelled_tokens: float = math.nan

    @property
    def num_loss_tokens(self) -> int:
        """Return how many tokens carry loss."""
        return int(self.loss_mask_ST.sum())

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch with its tensors on `device`."""
        moved = {
            name: getattr(self, name).to(device) if isinstance(getattr(self, name), torch.Tensor) else getattr(self, name)
            for name in self.__dataclass_fields__
        }
        return Batch(**moved)


def _columns(sample: TrainingSample, advantage: float, version: int | None) -> dict[str, np.ndarray]:
    """Return the sample's values by batch field; what was not sampled is 0, so that no NaN enters a tensor."""
    behaviour = sample.logprobs if sample.behaviour_logprobs is None else sample.behaviour_logprobs
    length = len(sample)
    return {
        "ids_ST": sample.ids.astype(np.int64),
        "attention_mask_ST": np.ones(length, np.bool_),
        "loss_mask_ST": sample.mask,
        "logprobs_ST": np.where(sample.mask, sample.logprobs, np.float32(0)),
        "behaviour_logprobs_ST": np.where(sample.mask, behaviour, np.float32(0)),
        "advantages_ST": np.where(sample.mask, np.float32(advantage), np.float32(0)),
        "temperatures_ST": sample.temperatures(),
        "positions_ST": np.arange(length, dtype=np.int64),
        "versions_ST": np.where(sample.mask, sample.versions, np.int64(-1)),
        "exact_ST": np.zeros(length, np.bool_) if version is None else sample.exact_mask(version),
        "filtered_ST": sample.filtered_mask(),
        "shaped_ST": sample.shaped_mask(),
        "kept_counts_ST": sample.kept_sets()[0].astype(np.int64),
    }


_PADDING = {"temperatures_ST": 1.0, "versions_ST": -1, "sequence_ST": -1}


def _checked_samples(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Return samples as a list. Raises: InvalidBatch."""
    given = as_samples("samples", samples, error=InvalidBatch)
    if not given:
        raise InvalidBatch(
            f"samples is {shown(samples)}",
            field="samples",
            value=type(samples).__name__,
            limit="a sequence of at least one TrainingSample",
            remedy="pass the samples of the groups that the source gave",
        )
    return given


def _check_layout(*, pad_id: object, pad_side: object, packed: object, multiple_of: object, version: object) -> None:
    """Check how samples are laid out. Raises: InvalidBatch."""
    checks = (
        ("pad_id", pad_id, is_count(pad_id) and pad_id < 2**31, "a token id"),  # type: ignore[operator]
        ("pad_side", pad_side, isinstance(pad_side, str) and pad_side in ("left", "right"), "'left' or 'right'"),
        ("packed", packed, isinstance(packed, (bool, np.bool_)), "True or False"),
        ("multiple_of", multiple_of, is_count(multiple_of) and 1 <= multiple_of <= MAX_MULTIPLE, f"an integer from 1 to {MAX_MULTIPLE}"),  # type: ignore[operator]
        ("version", version, version is None or (is_count(version) and version < 2**63), "an integer of at least 0, or None"),  # type: ignore[operator]
    )
    for name, value, ok, limit in checks:
        if not ok:
            raise InvalidBatch(f"{name}={shown(value)}", field=name, value=value, limit=limit, remedy="use the default")


@checks_names(InvalidBatch, OTHER_OPTIONS)
def collate(
    samples: Sequence[TrainingSample],
    advantages: Sequence[float] | np.ndarray | None = None,
    *,
    pad_id: int = 0,
    pad_side: str = "right",
    packed: bool = False,
    multiple_of: int = 1,
    version: int | None = None,
) -> Batch:
    """Return the samples as tensors; those that are not trainable are left out and counted.

    `advantages` has one number for each sample (default: `sample_advantages`). The common length is rounded up to
    `multiple_of`. `version`, usually the trainer's current one, fills `exact_ST`.
    Raises: InvalidBatch.
    """
    samples = _checked_samples(samples)
    _check_layout(pad_id=pad_id, pad_side=pad_side, packed=packed, multiple_of=multiple_of, version=version)
    try:
        values = sample_advantages(samples) if advantages is None else np.asarray(advantages, np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, InvalidBatch):
            raise
        values = np.full(0, math.nan)
    if values.shape != (len(samples),) or not np.isfinite(values).all():
        raise InvalidBatch(
            f"advantages={shown(advantages)} has shape {values.shape} or holds what is no finite number",
            field="advantages",
            value=str(values.shape),
            limit=f"one finite number for each of the {len(samples)} samples",
            remedy="use sample_advantages(samples)",
        )
    kept = [(sample, float(value)) for sample, value in zip(samples, values) if sample.is_trainable]
    if not kept:
        raise InvalidBatch(
            f"none of the {len(samples)} samples is trainable",
            field="samples",
            value=len(samples),
            limit="at least one finished or truncated sample with a reward",
            remedy="look at the failures counted by the source",
        )
    cancelled = [sample for sample in samples if sample.status is SampleStatus.CANCELLED]
    rows = [_columns(sample, value, version) for sample, value in kept]
    for number, row in enumerate(rows):
        row["sequence_ST"] = np.full(len(row["ids_ST"]), number, np.int64)
    if packed:
        rows = [{name: np.concatenate([row[name] for row in rows]) for name in rows[0]}]
    width = -(-max(len(row["ids_ST"]) for row in rows) // multiple_of) * multiple_of
    padding = {**_PADDING, "ids_ST": pad_id}
    tensors = {name: _stack([row[name] for row in rows], width, padding.get(name, 0), pad_side) for name in rows[0]}
    # Rows stand in the order of the samples and places in order within them, so the sets of all samples follow each other.
    kept_ids = np.concatenate([sample.kept_sets()[1] for sample, _ in kept])
    return Batch(
        **tensors,
        kept_ids=torch.from_numpy(kept_ids.astype(np.int64)),
        packed=packed,
        samples=tuple(sample for sample, _ in kept),
        num_without_kept=int((tensors["filtered_ST"] & (tensors["kept_counts_ST"] == 0)).sum()),
        num_left_out=len(samples) - len(kept),
        num_cancelled=len(cancelled),
        mean_kept_tokens=float(np.mean([sample.num_sampled for sample, _ in kept])),
        mean_cancelled_tokens=float(np.mean([sample.num_sampled for sample in cancelled])) if cancelled else math.nan,
    )


def check_batch(batch: object) -> None:
    """Refuse what is no batch. Raises: InvalidBatch."""
    if not isinstance(batch, Batch):
        raise InvalidBatch(
            f"batch is a {type(batch).__name__}",
            field="batch",
            value=type(batch).__name__,
            limit="a Batch",
            remedy="pass collate(samples, version=push.version)",
        )


def _stack(columns: list[np.ndarray], width: int, fill: Any, pad_side: str) -> torch.Tensor:
    table = np.full((len(columns), width), fill, columns[0].dtype)
    for row, column in enumerate(columns):
        if pad_side == "right":
            table[row, : len(column)] = column
        else:
            table[row, width - len(column) :] = column
    return torch.from_numpy(table)
