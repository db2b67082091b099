"""Pairs of options, each with a value that is taken alone: what two of them mean together is what no test of single fields sees."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.hostile_values import HOSTILE_VALUES

ENGINE_EDGES: dict[str, list[Any]] = {
    "dtype": ["float32", "bfloat16"],
    "device": ["cpu", "cuda", "cuda:3"],
    "max_rows": [1, 3, 70, 4096],
    "page_size": [1, 3, 1023, 1024],
    "num_pages": [1, 2, 2**31 - 1],
    "max_model_len": [2, 3, 511, 512, 513, 2**31 - 1],
    "max_prefill_tokens": [1, 2**20],
    "run_ahead": [0, 1, 2, 3],
    "ring_slots": [2, 3, 8, 64],
    "decode_tables": ["resident", "rebuilt"],
    "sampling_slots": [0, 4096],
    "compaction_steps": [1, 2**20],
    "load_format": ["dummy"],
    "gpu_memory_fraction": [1e-300, 1],
    "result_transport": ["mapped", "copy"],
    "weight_staging": ["device", "host"],
    "canary_tolerance": [1e-300, 1e300],
    "tp": [2, 64],
}


def taken_alone(make: Callable[[Mapping[str, Any]], object], name: str, refusal: type[Exception]) -> list[Any]:
    """Return the hostile values that an option takes while the others have their defaults."""
    taken = []
    for value in HOSTILE_VALUES:
        try:
            make({name: value})
        except refusal:
            continue
        taken.append(value)
    return taken


def pairs(
    names: Sequence[str],
    make: Callable[[Mapping[str, Any]], object],
    *,
    edges: Mapping[str, Sequence[Any]],
    refusal: type[Exception],
    each: int,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield `each` drawn pairs of values for every two options: hostile ones that are taken alone, and the edges of their domains."""
    values = {name: [*taken_alone(make, name, refusal), *edges.get(name, ())] for name in names}
    draw = random.Random(seed)
    for one, other in itertools.combinations(names, 2):
        combinations = list(itertools.product(range(len(values[one])), range(len(values[other]))))
        for first, second in draw.sample(combinations, min(each, len(combinations))):
            yield {one: values[one][first], other: values[other][second]}
