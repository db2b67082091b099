"""Pushes that happen by themselves: after the steps of a plain torch optimizer.

The hook runs in the thread that steps the optimizer, after the parameters have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from trainer_bridge.errors import InvalidOption
from trainer_bridge.option_names import OTHER_OPTIONS, checks_names
from trainer_bridge.options import check_hook
from trainer_bridge.weights.push import PushReport, WeightPush


@checks_names(InvalidOption, OTHER_OPTIONS)
def after_step_hook(
    optimizer: torch.optim.Optimizer, push: WeightPush, *, every: int = 1, on_report: Callable[[PushReport], None] | None = None
) -> RemovableHandle:
    """Push after every `every`-th step of `optimizer`; `handle.remove()` ends it.

    The push's label is the number of steps. A failed push raises out of `optimizer.step()`, whose update is kept. Under
    gradient scaling, skipped steps do not call the hook. Raises: InvalidOption.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidOption(
            f"optimizer is a {type(optimizer).__name__}",
            field="optimizer",
            value=type(optimizer).__name__,
            limit="a torch.optim.Optimizer",
            remedy="pass the optimizer inside a wrapper, or call push.push() after its step yourself",
        )
    check_hook(push, every, on_report)
    steps = 0

    def pushed(_optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        nonlocal steps
        steps += 1
        if steps % every == 0:
            report = push.push(trainer_step=steps)
            if on_report is not None:
                on_report(report)

    return optimizer.register_step_post_hook(pushed)
