"""Engines over one memory: the same bits on either decode path, one of them at a time, and refusals that name the option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno import InvalidConfig, InvalidRequest
from areno.twin import twin_config
from tests.engine_runs import make_engine, random_prompt, request, run
from tests.fixtures_models import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_twins_give_the_same_bits_one_after_the_other(folder: Path) -> None:
    rng = np.random.default_rng(0)
    requests = [request(n, random_prompt(rng, 1, 40), max_new_tokens=12, seed=n) for n in range(12)]
    first = make_engine(folder, prefix_cache=False)
    twins = [first.twin(decode_tables=path, max_rows=4, sampling_slots=2) for path in ("resident", "rebuilt")]
    told = [run(engine, requests) for engine in (*twins, twins[0])]
    for number, output in told[0].items():
        for other in told[1:]:
            assert other[number].ids == output.ids and other[number].logprobs == output.logprobs
    assert twins[0]._store is first._store and twins[1]._table is first._table
    assert twins[0].info.num_pages == first.info.num_pages and twins[0].info.max_rows == 4
    alone = run(make_engine(folder, prefix_cache=False, max_rows=4), requests)
    assert all(alone[number].ids == output.ids for number, output in told[0].items())


def test_only_one_engine_over_a_memory_has_work(folder: Path) -> None:
    first = make_engine(folder, prefix_cache=False)
    twin = first.twin()
    twin.submit(request(1, [3, 4], max_new_tokens=2))
    with pytest.raises(InvalidRequest, match="another engine") as refusal:
        first.submit(request(1, [3, 4], max_new_tokens=2))
    assert "has_work" in str(refusal.value.remedy)
    run(twin)
    run(first, [request(1, [3, 4], max_new_tokens=2)])


@pytest.mark.parametrize(
    ("options", "changes", "field"),
    [
        ({"prefix_cache": False}, {"page_size": 4}, "page_size"),
        ({"prefix_cache": False}, {"max_rows": 99}, "max_rows"),
        ({}, {"decode_tables": "rebuilt"}, "prefix_cache"),
    ],
)
def test_what_a_twin_cannot_have_is_refused_by_name(folder: Path, options: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field.split("_")[0]) as refusal:
        make_engine(folder, **options).twin(**changes)
    assert refusal.value.field == field and refusal.value.remedy


def test_an_engine_of_several_ranks_has_no_twin(folder: Path) -> None:
    first = make_engine(folder, prefix_cache=False)
    with pytest.raises(InvalidConfig, match=r"an engine of tp=2 ranks has no twin; .* compare engines with tp=1"):
        twin_config(replace(first._config, tp=2), first._resolved, {})
