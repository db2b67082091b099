"""What has gone wrong in engines that keep rows on the device, one test each, on both decode paths of the CPU.

Elsewhere: stalled lanes, late KILLs, MOVEs of dead rows and slots in random order in `test_tables.py`; ring slots and their events
in `test_results.py`; cancels at every moment in `test_engine_cancel.py`; the paths of a device in `kernels/test_graphs_rebuilt.py`
and `tests/gpu/test_engine_rebuilt.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Engine, FinishKind, Request
from areno.decode.rebuilt import RebuiltPath
from areno.decode.resident import ResidentPath
from areno.sampling.penalties import SlotTables
from tests.bench.decode_runs import recorded
from tests.crossed import every_pair, every_value
from tests.engine_runs import Output, generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import reference_model, write_checkpoint

PATHS = pytest.mark.parametrize("path", ["resident", "rebuilt"])
BOTH = every_value(path=["resident", "rebuilt"], run_ahead=[0, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _alone(folder: Path, requests: list[Request], **options: Any) -> dict[int, Output]:
    engine = make_engine(folder, max_rows=4, prefix_cache=False, **options)
    return {item.request_id: run(engine, [item])[item.request_id] for item in requests}


def _same(found: dict[int, Output], wanted: dict[int, Output]) -> None:
    for number, want in wanted.items():
        assert found[number].ids == want.ids, f"request {number}"
        assert found[number].end.reason == want.end.reason
        assert np.allclose(found[number].logprobs, want.logprobs, atol=1e-4, rtol=0)


@BOTH
def test_page_growth_gives_a_row_all_the_pages_it_comes_to_need(folder: Path, path: str, run_ahead: int) -> None:
    prompt = random_prompt(np.random.default_rng(0), 6, 7)
    engine = make_engine(folder, decode_tables=path, run_ahead=run_ahead, page_size=4, num_pages=60)
    output = generate(engine, prompt, max_new_tokens=150, seed=1, ignore_eos=True)
    stats = engine.stats()
    assert len(output.ids) == 150 and stats["grown_pages"] >= 20 and stats["starved"] == 0
    assert reference_gap(reference_model(folder), prompt, output) < 1e-4


def _addresses(engine: Engine) -> dict[str, int]:
    """Return where everything lies that a launch reads or writes."""
    path: Any = engine._path
    found = {"ring": engine._ring.words, "keys": engine._store.keys, "values": engine._store.values}
    if isinstance(path, ResidentPath):
        state, slots = path.tables.state, path.tables.slots
    else:
        assert isinstance(path, RebuiltPath)
        state, slots = path._rows.state, path._slots  # type: ignore[assignment]
    found |= {name: getattr(slots, name) for name in SlotTables.__slots__}
    found |= {name: getattr(state, name) for name in ("ints", "floats", "alive", "seed", "stop_ids", "page_table")}
    return {name: value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data for name, value in found.items()}


@PATHS
def test_storage_stays_at_one_address_over_a_whole_run(folder: Path, path: str) -> None:
    rng = np.random.default_rng(1)
    engine = make_engine(folder, decode_tables=path, run_ahead=2, page_size=4, num_pages=110, sampling_slots=3, compaction_steps=1)
    before = _addresses(engine)
    for number in range(40):
        sampling = {"max_new_tokens": int(rng.integers(1, 100)), "seed": number, "stop_ids": rng.integers(3, 256, size=2).tolist()}
        sampling |= {"repetition_penalty": 1.2} if number % 5 == 0 else {}
        engine.submit(request(number, random_prompt(rng, 1, 30), **sampling))
    step = 0
    while engine.has_work:
        if step % 7 == 0:
            engine.cancel(step)
        engine.step()
        assert _addresses(engine) == before
        step += 1
    stats = engine.stats()
    assert min(stats[name] for name in ("moves", "cancelled", "stop", "length", "grown_pages")) > 0


@BOTH
def test_rows_that_were_moved_down_go_on_beside_those_that_refill_their_places(folder: Path, path: str, run_ahead: int) -> None:
    rng = np.random.default_rng(2)
    # The short ones leave holes below the long ones, which move down; then new ones take the rows behind them.
    budgets = [3] * 6 + [40] * 2
    first = [request(n, random_prompt(rng, 5, 20), max_new_tokens=budget, seed=n, ignore_eos=True) for n, budget in enumerate(budgets)]
    later = [request(n, random_prompt(rng, 5, 20), max_new_tokens=12, seed=n, ignore_eos=True) for n in range(8, 16)]
    settings = {"decode_tables": path, "run_ahead": run_ahead, "compaction_steps": 1, "prefix_cache": False}
    engine = make_engine(folder, **settings)
    found = run(engine, first, script={12: [lambda e, item=item: e.submit(item) for item in later]})
    assert engine.stats()["moves"] >= 2
    _same(found, _alone(folder, [*first, *later]))


@BOTH
def test_a_sampling_slot_that_is_used_again_holds_nothing_of_its_last_owner(folder: Path, path: str, run_ahead: int) -> None:
    rng = np.random.default_rng(3)
    shaped: list[dict[str, Any]] = [
        {"forced_ids": [9, 8, 7, 6], "repetition_penalty": 1.8},
        {"logit_bias": {5: 9.0, 6: 9.0}},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5, "logit_bias": {7: 8.0}},
        {"forced_ids": [3]},
        {"repetition_penalty": 1.1},
    ]
    requests = [
        request(n, random_prompt(rng, 5, 30), max_new_tokens=10, seed=n, ignore_eos=True, **params) for n, params in enumerate(shaped)
    ]
    engine = make_engine(folder, decode_tables=path, run_ahead=run_ahead, sampling_slots=1, prefix_cache=False)
    _same(run(engine, requests), _alone(folder, requests))
    assert engine.stats()["free_sampling_slots"] == 1


@every_pair(place=[0, 1, 5], path=["resident", "rebuilt"], run_ahead=[0, 2])
def test_a_stop_token_ends_its_row_where_it_comes_and_is_named(folder: Path, path: str, run_ahead: int, place: int) -> None:
    stop_ids = list(range(100, 116))
    requests = []
    for number, stop in enumerate(stop_ids):
        forced = [20 + number] * 8
        forced[place] = stop
        requests.append(request(number, [5, 6, 7], max_new_tokens=8, forced_ids=forced, stop_ids=stop_ids, ignore_eos=True))
    engine = make_engine(folder, decode_tables=path, run_ahead=run_ahead, max_rows=16)
    for number, output in run(engine, requests).items():
        assert output.ids == [20 + number] * place + [stop_ids[number]]
        assert output.end.reason.kind is FinishKind.STOP and output.end.reason.stop_id == stop_ids[number]


@BOTH
def test_a_row_ends_at_its_budget_and_at_the_end_of_the_context(folder: Path, path: str, run_ahead: int) -> None:
    engine = make_engine(folder, decode_tables=path, run_ahead=run_ahead, max_model_len=40, page_size=4)
    prompts = {0: 3, 1: 3, 2: 3, 3: 39, 4: 20}
    budgets = {0: 1, 1: 2, 2: 17, 3: 1, 4: 20}
    rng = np.random.default_rng(4)
    requests = [
        request(n, random_prompt(rng, size, size + 1), max_new_tokens=budgets[n], seed=n, ignore_eos=True) for n, size in prompts.items()
    ]
    for number, output in run(engine, requests).items():
        assert len(output.ids) == budgets[number] and output.end.reason.kind is FinishKind.LENGTH


@BOTH
def test_a_batch_that_shrinks_runs_ever_smaller_buckets_and_loses_no_row(folder: Path, path: str, run_ahead: int) -> None:
    rng = np.random.default_rng(5)
    # Sixteen rows, of which 8, 4, 2 and 1 go on for longer; the long ones are spread over the rows.
    budgets = [60 if n == 15 else 50 if n == 9 else 38 if n % 5 == 0 and n else 26 if n % 3 == 1 else 12 for n in range(16)]
    requests = [request(n, random_prompt(rng, 3, 20), max_new_tokens=budget, seed=n, ignore_eos=True) for n, budget in enumerate(budgets)]
    engine = make_engine(folder, decode_tables=path, run_ahead=run_ahead, max_rows=16, compaction_steps=1, max_prefill_tokens=2048)
    with recorded(engine) as launches:
        found = run(engine, requests)
    buckets = list(dict.fromkeys(launch.bucket for launch in launches))
    assert buckets == [16, 8, 4] and [launch.bucket for launch in launches] == sorted((launch.bucket for launch in launches), reverse=True)
    assert engine.stats()["moves"] > 0
    _same(found, _alone(folder, requests))
