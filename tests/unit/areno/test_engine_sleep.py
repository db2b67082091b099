"""Sleep gives memory back and loses nothing but cached pages: requests wait, go on, and give the same tokens and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Engine, FinishKind, InvalidRequest
from areno.errors import Asleep, UpdateBusy
from tests.crossed import every_pair
from tests.engine_runs import Recorder, assert_idle, generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import checkpoint_tensors, write_checkpoint
from tests.unit.areno.test_engine_weights import _push

LEVELS = pytest.mark.parametrize("level", ["kv", "weights"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sleep"), "llama", seed=3)


def kv_bytes(engine: Engine) -> int:
    store = engine._store
    return sum(tensor.untyped_storage().nbytes() for tensor in (store.keys, store.values))


def weight_bytes(engine: Engine) -> int:
    return sum(storage.untyped_storage().nbytes() for storage in engine._table.live.values())


@every_pair(level=["kv", "weights"], path=["resident", "rebuilt"], run_ahead=[0, 3])
def test_requests_that_sleep_over_give_the_same_tokens_once_and_the_references_numbers(
    folder: Path, level: str, path: str, run_ahead: int
) -> None:
    options: dict[str, Any] = {"decode_tables": path, "run_ahead": run_ahead, "max_prefill_tokens": 32, "max_rows": 4}
    prompts = [random_prompt(np.random.default_rng(n), 10, 80) for n in range(7)]
    requests = [request(n, prompt, max_new_tokens=20, seed=n, ignore_eos=True) for n, prompt in enumerate(prompts)]
    awake = run(make_engine(folder, **options), requests)
    engine, recorder = make_engine(folder, **options), Recorder()
    for item in requests:
        engine.submit(item)
    weights = weight_bytes(engine)
    for step in range(400):
        if not engine.has_work:
            break
        if step in (3, 11, 12, 30):
            recorder.add(engine.sleep(level))
            engine.check_integrity()
            assert kv_bytes(engine) == 0 and weight_bytes(engine) == (0 if level == "weights" else weights)
            assert engine.stats()["used_pages"] == engine.stats()["rows_used"] == 0
            recorder.add(engine.collect())
            engine.wake()
            assert kv_bytes(engine) > 0 and weight_bytes(engine) == weights
        recorder.add(engine.step())
        engine.check_integrity()
    assert_idle(engine)
    for number, prompt in enumerate(prompts):
        output = recorder.outputs[number]
        assert output.ids == awake[number].ids and set(output.versions) == {0}
        assert reference_gap(folder, prompt, output) < 1e-4
    assert any(recorder.outputs[number].end.kv_rebuilt_at for number in range(7))


@LEVELS
def test_weights_come_back_bit_for_bit_and_no_page_of_before_is_known(folder: Path, level: str) -> None:
    engine = make_engine(folder)
    prompt = random_prompt(np.random.default_rng(1), 64, 65)
    first, before = generate(engine, prompt, max_new_tokens=8, seed=1, lineage="a"), engine.digests()
    assert generate(engine, prompt, max_new_tokens=8, seed=1, lineage="a").end.cached_tokens > 0
    engine.sleep(level)
    engine.wake()
    engine.wake()
    assert engine.digests() == before and engine.asleep is None
    again = generate(engine, prompt, max_new_tokens=8, seed=1, lineage="a")
    assert again.end.cached_tokens == 0 and again.ids == first.ids
    newer = {name: tensor + 0.01 for name, tensor in checkpoint_tensors(folder).items()}
    _push(engine, newer, 1)
    engine.sleep(level)
    engine.wake()
    assert engine.version == 1 and set(generate(engine, prompt, max_new_tokens=3, request_id=9).versions) == {1}


def test_what_needs_the_memory_is_refused_by_name_and_cancels_work(folder: Path) -> None:
    engine = make_engine(folder)
    engine.submit(request(0, [5, 6, 7], max_new_tokens=30, seed=1, ignore_eos=True))
    output = engine.step()
    assert output.token_ids.size
    engine.sleep("kv")
    engine.sleep("weights")
    assert engine.asleep == "weights" and engine.stats()["asleep"] == "weights"
    engine.sleep("kv")
    assert engine.asleep == "weights", "a shallower level takes nothing back"
    for call in (engine.step, lambda: engine.score([1, 2, 3]), lambda: engine.begin_update(None, version=1)):
        with pytest.raises(Asleep, match="KV and weights are not there; wake it first"):
            call()
    engine.submit(request(1, [5, 6, 7], max_new_tokens=2, seed=1))
    assert engine.cancel(0) and engine.cancel(1)
    ended = engine.collect().finished
    assert [(one.request_id, one.reason.kind) for one in ended] == [(0, FinishKind.CANCELLED), (1, FinishKind.CANCELLED)]
    assert ended[0].output_tokens == output.token_ids.size and not engine.has_work
    engine.wake()
    assert generate(engine, [5, 6, 7], max_new_tokens=4, request_id=2).ids


def test_sleep_is_refused_while_an_update_is_open_and_for_unknown_levels(folder: Path) -> None:
    engine = make_engine(folder)
    with pytest.raises(InvalidRequest, match="known: kv, weights"):
        engine.sleep("deep")
    engine.begin_update(None, version=1)
    with pytest.raises(UpdateBusy, match="commit or abort it first"):
        engine.sleep("kv")
    engine.abort_update()
    engine.sleep("kv")
    assert torch.isfinite(next(iter(engine.tensors().values()))).all(), "the weights stay at this level"
