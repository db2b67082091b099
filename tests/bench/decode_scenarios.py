"""The four loads of the decode benchmarks, as plans that any engine can follow: who asks for what, and what happens when.

    steady              as many requests as rows, one fixed length, stops ignored
    tail_refill         twice as many requests as rows, lengths 4 to 32 by stop tokens: rows are refilled, then the tail shrinks
    cancel_refill       three times as many; every other one is cancelled in the middle while others wait and are admitted
    continuous_refill   a queue that never empties; the run ends when enough tokens came and drops the rest, untimed

Events depend on what was delivered, never on time, so that every engine gets the same plan. With scripted tokens (`forced_ids`)
an end by a stop token is a real one: the row's last forced id is its stop id. Greedy tokens are not known before: those rows end
by length, with stop ids that are looked for and as good as never come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from areno import Request, SamplingParams

SCENARIOS = ("steady", "tail_refill", "cancel_refill", "continuous_refill")
LENGTHS = (32, 16, 8, 4)
CANCELLED_LENGTH = 48
CANCEL_AFTER = (4, 8, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sizes of a case: `batch` rows, prompts of these lengths, `tokens` of a fixed-length request; ids from `vocab`.

    `rounds` says how often a plan is followed in one run, so that a run is long enough to be timed.
    """

    batch: int
    prompts: tuple[int, ...]
    tokens: int
    vocab: int
    greedy: bool
    rounds: int = 1

    @property
    def longest(self) -> int:
        """The most ids a request of any scenario can have."""
        return max(self.prompts) + max(self.tokens, CANCELLED_LENGTH, *LENGTHS) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Requests in the order of their ids.

    The first `at_once` are submitted at the start, each further one when a request ends. `cancel_after` names the tokens
    after which a request is cancelled. With `target_tokens` the run is over when that many were delivered.
    """

    requests: tuple[Request, ...]
    at_once: int
    rounds: int = 1
    cancel_after: dict[int, int] = field(default_factory=dict)
    target_tokens: int | None = None


def make_plan(scenario: str, load: Load, *, seed: int = 0) -> Plan:
    """Return the plan of a scenario; the same for equal arguments."""
    rng = np.random.default_rng([seed, SCENARIOS.index(scenario), load.batch])
    if scenario == "steady":
        requests = tuple(_request(rng, load, number, load.tokens, stops=False) for number in range(load.batch))
        return Plan(requests=requests, at_once=load.batch, rounds=load.rounds)
    if scenario == "tail_refill":
        requests = tuple(_ended(rng, load, number) for number in range(2 * load.batch))
        return Plan(requests=requests, at_once=len(requests), rounds=load.rounds)
    if scenario == "cancel_refill":
        cancelled = range(0, 3 * load.batch, 2)
        requests = tuple(
            _request(rng, load, number, CANCELLED_LENGTH, stops=False) if number in cancelled else _ended(rng, load, number)
            for number in range(3 * load.batch)
        )
        after = {number: min(CANCEL_AFTER[place % len(CANCEL_AFTER)], load.tokens) for place, number in enumerate(cancelled)}
        return Plan(requests=requests, at_once=len(requests), cancel_after=after, rounds=load.rounds)
    target = load.batch * load.tokens * load.rounds
    # Enough for a queue that is never shorter than the batch: a request gives its shortest length at least.
    needed = 3 * load.batch + target // min(min(LENGTHS), load.tokens) + 1
    return Plan(requests=tuple(_ended(rng, load, number) for number in range(needed)), at_once=2 * load.batch, target_tokens=target)


def _ended(rng: np.random.Generator, load: Load, number: int) -> Request:
    """Return a request whose length is one of a few."""
    return _request(rng, load, number, min(LENGTHS[number % len(LENGTHS)], load.tokens), stops=True)


def _request(rng: np.random.Generator, load: Load, number: int, length: int, *, stops: bool) -> Request:
    prompt = rng.integers(3, load.vocab, size=load.prompts[number % len(load.prompts)])
    # The stop ids are no other token of the script.
    stop_ids, others = (3, 4), rng.integers(5, load.vocab, size=length)
    sampling = {"ignore_eos": True, "seed": number, "max_new_tokens": length, "stop_ids": stop_ids if stops else ()}
    if load.greedy:
        params = SamplingParams(temperature=0.0, **sampling)
    else:
        if stops:
            others[-1] = stop_ids[0]
            sampling["max_new_tokens"] = length + 8
        params = SamplingParams(forced_ids=others.tolist(), **sampling)
    return Request(request_id=number, prompt_ids=prompt, sampling=params)
