"""A fake engine that gives one log-probability too few for a prompt that begins with `UNFIT`."""

from __future__ import annotations

from dataclasses import replace

from areno.step_output import StepOutput
from tests.fakes import FakeEngine

UNFIT = 99


class UnfitEngine(FakeEngine):
    """See the module."""

    def step(self) -> StepOutput:
        """Take a step, and say it wrongly."""
        output = super().step()
        wrong = any(int(row.request.prompt_ids[0]) == UNFIT for row in self._running.values())
        return replace(output, logprobs=output.logprobs[:-1]) if wrong and len(output.request_ids) else output
