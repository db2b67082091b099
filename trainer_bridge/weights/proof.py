"""Evidence that the service's new weights are the trainer's: digests of tensors, log-probabilities of canaries.

`push.WeightPush` sends both with a commit, and the service swaps back when they disagree. Digests say that the bytes
arrived; canaries say that the model computes with them what the trainer's model computes. Invariant: making them leaves the
trainer's model, its modes and its random state as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer_bridge.errors import InvalidOption
from trainer_bridge.weights.sources import reshard

CanaryFunction = Callable[[np.ndarray], "np.ndarray | torch.Tensor | Sequence[float]"]
AutocastFactory = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanaryRecord:
    """One sequence with the trainer's log-probabilities of its tokens from the second on. Shapes: [n], [n - 1]."""

    ids: np.ndarray
    expected_logprobs: np.ndarray
    temperature: float = 1.0


def default_canary_ids(num_ids: int, max_len: int, *, count: int = 3, length: int = 24, seed: int = 20260101) -> list[np.ndarray]:
    """Return `count` fixed sequences of ids below `num_ids`, drawn once and alike in every process."""
    draws = np.random.Generator(np.random.PCG64(seed))
    return [draws.integers(0, num_ids, size=max(2, min(length + number, max_len)), dtype=np.int64) for number in range(count)]


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients; then restore each module's mode and all random states it may use.

    Modules that gathered their shards for the forward (FSDP2) give them up again, as they do before it with older ones.
    """
    reshard(model)
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            reshard(model)


def model_canaries(
    model: torch.nn.Module, sequences: Sequence[np.ndarray], *, autocast: AutocastFactory = contextlib.nullcontext
) -> list[CanaryRecord]:
    """Return the trainer model's own log-probabilities of fixed sequences.

    `model(input_ids=...)` must return logits, or an object with `.logits`, as Hugging Face models do. An autocast that is
    active in the caller applies as well; `autocast` makes one where none is.
    """
    device = next(model.parameters()).device
    canaries = []
    with undisturbed(model), autocast():
        for ids in sequences:
            output = model(input_ids=torch.as_tensor(ids, dtype=torch.int64, device=device)[None])
            logits = output if isinstance(output, torch.Tensor) else output.logits
            logprobs = torch.log_softmax(logits[0, :-1].float(), dim=-1)
            chosen = logprobs.gather(-1, torch.as_tensor(ids[1:], dtype=torch.int64, device=device)[:, None])[:, 0]
            canaries.append(CanaryRecord(ids=np.asarray(ids, np.int64), expected_logprobs=chosen.cpu().numpy().astype(np.float32)))
    return canaries


def _as_floats(values: object) -> np.ndarray | None:
    """Return what a canary function gave as an array, None for what is none."""
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, which the caller refuses
            return values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, np.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def function_canaries(canary: CanaryFunction, sequences: Sequence[np.ndarray]) -> list[CanaryRecord]:
    """Return canaries whose log-probabilities a function of the ids gives: one for each id from the second on."""
    canaries = []
    for ids in sequences:
        with torch.no_grad():
            values = canary(ids)
        expected = _as_floats(values)
        right = None if expected is None else expected.shape == (len(ids) - 1,)
        if expected is None or not right or not np.isfinite(expected).all():
            told = (
                f"a {type(values).__name__}" if expected is None else "values that are not finite" if right else f"shape {expected.shape}"
            )
            raise InvalidOption(
                f"canary returned {told} for {len(ids)} ids",
                field="canary",
                value=told,
                limit=f"{len(ids) - 1} finite log-probabilities: of each id given those before it",
                remedy="look at the model's logits for these ids" if right else "leave out the first id, which nothing predicts",
            )
        canaries.append(CanaryRecord(ids=np.asarray(ids, np.int64), expected_logprobs=expected.astype(np.float32)))
    return canaries
