"""Hints of return in the engine: a waiting episode finds its KV again, and running requests never wait for hints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno import Engine, InvalidConfig, InvalidRequest
from tests.engine_runs import assert_idle, make_engine, request, run
from tests.fixtures_models import write_checkpoint

PAGE = 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _ids(name: int, count: int) -> list[int]:
    return np.random.default_rng(name).integers(10, 250, count).tolist()


def _turn(engine: Engine, number: int, prompt: list[int], lineage: str | None = None, **params: Any) -> Any:
    output = run(engine, [request(number, prompt, lineage=lineage, max_new_tokens=PAGE, ignore_eos=True, seed=number)])[number]
    return output


def _second_turn_cached(engine: Engine, *, hint_s: float | None, strangers: int = 6) -> int:
    """Play a first turn, let strangers fill the pool, and return how much of the second turn's prompt was cached."""
    first = _turn(engine, 1, _ids(1, 4 * PAGE), "episode")
    if hint_s is not None:
        assert engine.expect_return("episode", hint_s, owner="client")
    for number in range(strangers):
        _turn(engine, 10 + number, _ids(10 + number, 3 * PAGE))
    prompt = [*_ids(1, 4 * PAGE), *first.ids, *_ids(2, 8)]
    second = _turn(engine, 2, prompt, "episode")
    assert_idle(engine)
    return int(second.end.cached_tokens)


def test_a_waiting_episode_finds_its_kv_again(llama: Path) -> None:
    assert _second_turn_cached(make_engine(llama, num_pages=16), hint_s=None) == 0
    engine = make_engine(llama, num_pages=16)
    assert _second_turn_cached(engine, hint_s=60.0) >= 5 * PAGE - 1
    stats = engine.stats()
    assert (stats["hints"], stats["hints_kept"], stats["hints_open"], stats["hinted_pages"]) == (1, 1, 0, 0)


def test_no_share_ignores_hints(llama: Path) -> None:
    engine = make_engine(llama, num_pages=16, hint_share=0.0)
    _turn(engine, 1, _ids(1, 4 * PAGE), "episode")
    assert not engine.expect_return("episode", 60.0)


def test_running_requests_take_what_hints_hold(llama: Path) -> None:
    engine = make_engine(llama, num_pages=16, hint_share=1.0)
    for number in range(2):
        _turn(engine, number, _ids(number, 4 * PAGE), f"episode {number}")
        engine.expect_return(f"episode {number}", 60.0 + number)
    assert engine.stats()["hinted_pages"] >= 8
    big = run(engine, [request(9, _ids(9, 8 * PAGE), max_new_tokens=6 * PAGE, ignore_eos=True, seed=9)])[9]
    assert big.end.output_tokens == 6 * PAGE and engine.stats()["preemptions"] == 0
    assert engine.stats()["hints_dropped"] >= 1
    assert_idle(engine)


def test_an_owners_hints_end_with_it(llama: Path) -> None:
    engine = make_engine(llama, num_pages=16)
    _turn(engine, 1, _ids(1, 4 * PAGE), "episode")
    engine.expect_return("episode", 60.0, owner="client")
    engine.end_hints("another")
    assert engine.stats()["hints_open"] == 1
    engine.end_hints("client")
    assert engine.stats()["hints_open"] == 0 and engine.stats()["hints_ended"] == 1


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "2"])
def test_a_wait_must_be_a_time(llama: Path, seconds: Any) -> None:
    with pytest.raises(InvalidRequest, match="say how long the wait is"):
        make_engine(llama, num_pages=16).expect_return("episode", seconds)


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "half"])
def test_the_share_is_checked(llama: Path, share: Any) -> None:
    with pytest.raises(InvalidConfig, match="leave hint_share at"):
        make_engine(llama, hint_share=share)
