"""Drives an engine for the tests: submits, steps with integrity checks, collects every token, and compares with the reference.

`Script` events happen before the step with their number, so that churn is the same for every engine that runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno import Engine, EngineConfig, Finished, PromptScore, Request, SamplingParams, StepOutput
from tests.fixtures_models import reference_logprobs

MAX_STEPS = 20_000


@dataclass
class Output:
    """Everything an engine said about one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    behaviour_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    prompt_score: PromptScore | None = None
    finished: Finished | None = None

    @property
    def end(self) -> Finished:
        """The terminal record; there must be one."""
        assert self.finished is not None
        return self.finished


class Recorder:
    """Collects step outputs and holds them to: one terminal record per request, nothing after it, equal lengths."""

    def __init__(self) -> None:
        self.outputs: dict[int, Output] = defaultdict(Output)

    def add(self, step: StepOutput) -> None:
        """Take one step's output."""
        names = ("token_ids", "logprobs", "raw_logprobs", "behaviour_logprobs", "versions")
        assert {getattr(step, name).size for name in names} == {step.request_ids.size}
        counts = np.zeros(step.request_ids.size, np.int64) if step.kept_counts is None else step.kept_counts
        kept_ids = np.zeros(0, np.int32) if step.kept_ids is None else step.kept_ids
        assert counts.size == step.request_ids.size and counts.sum() == kept_ids.size
        kept = np.split(kept_ids, np.cumsum(counts)[:-1])
        for place, request_id in enumerate(step.request_ids.tolist()):
            output = self.outputs[request_id]
            assert output.finished is None, f"request {request_id} got a token after its end"
            output.ids.append(int(step.token_ids[place]))
            output.logprobs.append(float(step.logprobs[place]))
            output.raw_logprobs.append(float(step.raw_logprobs[place]))
            output.behaviour_logprobs.append(float(step.behaviour_logprobs[place]))
            output.versions.append(int(step.versions[place]))
            output.kept.append(kept[place].tolist())
        for score in step.prompt_scores:
            assert self.outputs[score.request_id].prompt_score is None, "a prompt was scored twice"
            self.outputs[score.request_id].prompt_score = score
        for finished in step.finished:
            output = self.outputs[finished.request_id]
            assert output.finished is None, f"request {finished.request_id} ended twice"
            assert finished.output_tokens == len(output.ids)
            output.finished = finished


def make_engine(folder: object, **options: Any) -> Engine:
    """Return an engine over a checkpoint folder with a small fixed configuration."""
    return Engine(EngineConfig(**{"model": str(folder), "max_rows": 8, "seed": 1, **options}))


def request(request_id: int, prompt: Sequence[int] | np.ndarray, **sampling: Any) -> Request:
    """Return a request; sampling fields and lineage, cache_salt, kv_policy, max_kv_lag by name."""
    own = {
        name: sampling.pop(name)
        for name in ("lineage", "cache_salt", "kv_policy", "max_kv_lag", "group", "prior_output_tokens")
        if name in sampling
    }
    return Request(request_id=request_id, prompt_ids=prompt, sampling=SamplingParams(**sampling), **own)


def run(
    engine: Engine,
    requests: Sequence[Request] = (),
    *,
    script: Mapping[int, Sequence[Callable[[Engine], object]]] | None = None,
    check: bool = True,
) -> dict[int, Output]:
    """Submit, step until idle, check integrity after every step; return the outputs by request id."""
    recorder = Recorder()
    for item in requests:
        engine.submit(item)
    events = dict(script or {})
    step = 0
    while engine.has_work or events:
        for event in events.pop(step, ()):
            event(engine)
            if check:
                engine.check_integrity()
        recorder.add(engine.step())
        if check:
            engine.check_integrity()
        step += 1
        assert step < MAX_STEPS, "the engine makes no progress"
    assert_idle(engine)
    return dict(recorder.outputs)


def generate(engine: Engine, prompt: Sequence[int] | np.ndarray, **sampling: Any) -> Output:
    """Run one request alone; `request_id` may be given."""
    request_id = sampling.pop("request_id", 0)
    return run(engine, [request(request_id, prompt, **sampling)])[request_id]


def assert_idle(engine: Engine) -> None:
    """Check that nothing is left of any request: all pages free or cached, no rows, slots or waiting entries."""
    engine.check_integrity()
    stats = engine.stats()
    assert not engine.has_work
    assert stats["waiting"] == stats["running"] == stats["rows_used"] == stats["used_pages"] == 0
    assert stats["free_pages"] + stats["cached_pages"] == engine.info.num_pages
    assert stats["free_sampling_slots"] == engine.info.sampling_slots


def reference_gap(model: Any, prompt: Sequence[int] | np.ndarray, output: Output, temperature: float = 1.0) -> float:
    """Return the largest distance of an output's logprobs from the reference at its temperature (greedy: untempered)."""
    ids = np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(output.ids, dtype=np.int64)])
    expected = reference_logprobs(model, ids, temperature or 1.0)[len(prompt) - 1 :]
    return float(np.abs(expected - np.array(output.logprobs)).max()) if output.ids else 0.0


def random_prompt(rng: np.random.Generator, low: int, high: int, vocab: int = 256) -> np.ndarray:
    """Return a prompt of low..high - 1 random ids that are no special tokens."""
    return rng.integers(3, vocab, size=int(rng.integers(low, high)))
