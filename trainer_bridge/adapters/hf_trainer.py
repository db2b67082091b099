"""A push after the optimizer steps of a transformers Trainer.

`trainer.add_callback(PushCallback(push))` is all; the trainer calls it from the thread that steps. Imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from trainer_bridge.errors import InvalidOption
from trainer_bridge.option_names import OTHER_OPTIONS, checks_names
from trainer_bridge.options import check_hook, check_push_arguments
from trainer_bridge.weights.push import PushReport, WeightPush


@checks_names(InvalidOption, OTHER_OPTIONS)
class PushCallback(TrainerCallback):
    """Push when training begins, after every `every`-th optimizer step, and at the end if steps were made since.

    The push's label is the trainer's `global_step`, so accumulated micro-steps and steps that gradient scaling skipped push
    nothing. `first` is False where the service has the trainer's weights already. `mode` and `drain_s` as in `WeightPush.push`.
    A failed push raises out of `train()`. Raises: InvalidOption.
    """

    def __init__(
        self,
        push: WeightPush,
        *,
        every: int = 1,
        first: bool = True,
        mode: str = "inflight",
        drain_s: float = 60.0,
        on_report: Callable[[PushReport], None] | None = None,
    ) -> None:
        check_hook(push, every, on_report)
        check_push_arguments(mode=mode, drain_s=drain_s)
        self._push, self._every, self._first = push, every, first
        self._mode, self._drain_s, self._on_report = mode, drain_s, on_report
        self._pushed_step: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the service have the weights that training begins with."""
        if self._first:
            self._push_step(state.global_step)
        else:
            self._pushed_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Push what the optimizer has made."""
        if state.global_step % self._every == 0 and state.global_step != self._pushed_step:
            self._push_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Push the last steps, whatever `every` says."""
        if state.global_step != self._pushed_step:
            self._push_step(state.global_step)

    def _push_step(self, step: int) -> None:
        report = self._push.push(trainer_step=step, mode=self._mode, drain_s=self._drain_s)
        self._pushed_step = step
        if self._on_report is not None:
            self._on_report(report)
