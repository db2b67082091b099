"""Cancelling in every phase: one terminal record, real tokens kept, nothing leaked, nobody else disturbed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areno import Engine, FinishKind
from tests.crossed import every_pair
from tests.engine_runs import Recorder, assert_idle, generate, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import reference_model, write_checkpoint

PROMPT = random_prompt(np.random.default_rng(1), 48, 49)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _engine(folder: Path, path: str, run_ahead: int) -> Engine:
    return make_engine(folder, decode_tables=path, run_ahead=run_ahead, max_prefill_tokens=16)


@every_pair(steps=range(12), path=["resident", "rebuilt"], run_ahead=[0, 2])
def test_a_cancel_after_any_number_of_steps_ends_the_request_once_with_its_real_tokens(
    llama: Path, path: str, run_ahead: int, steps: int
) -> None:
    """Steps 0 waits, 1-2 are between chunks, 3 is the last chunk, then decode, then the end at 6 tokens, then after it."""
    whole = generate(make_engine(llama), PROMPT, max_new_tokens=6, seed=4, ignore_eos=True)
    engine = _engine(llama, path, run_ahead)
    recorder = Recorder()
    engine.submit(request(5, PROMPT, max_new_tokens=6, seed=4, ignore_eos=True))
    for _ in range(steps):
        recorder.add(engine.step())
        engine.check_integrity()
    told = len(recorder.outputs[5].ids)
    answered = engine.cancel(5)
    engine.check_integrity()
    assert not engine.cancel(5) and not engine.cancel(6)
    while engine.has_work:
        recorder.add(engine.step())
        engine.check_integrity()
    output = recorder.outputs[5]
    assert answered or output.end.reason.kind is FinishKind.LENGTH
    assert output.end.reason.kind in (FinishKind.CANCELLED, FinishKind.LENGTH)
    assert len(output.ids) >= told and output.ids == whole.ids[: len(output.ids)]
    assert np.allclose(output.logprobs, whole.logprobs[: len(output.ids)], atol=1e-4)
    assert not engine.cancel(5)
    assert_idle(engine)


def test_an_expired_request_says_so_with_its_detail(llama: Path) -> None:
    engine = make_engine(llama)
    engine.submit(request(1, PROMPT, max_new_tokens=50, ignore_eos=True))
    engine.step()
    assert engine.cancel(1, kind=FinishKind.EXPIRED, detail="deadline_s=1")
    end = engine.step().finished[0]
    assert end.reason.kind is FinishKind.EXPIRED and end.reason.detail == "deadline_s=1"


def test_a_cancelled_row_is_refilled_in_the_very_next_step(llama: Path) -> None:
    engine = make_engine(llama, max_rows=1, run_ahead=3)
    other = random_prompt(np.random.default_rng(2), 40, 41)
    events = {6: [lambda e: e.cancel(1), lambda e: e.submit(request(2, other, max_new_tokens=12, seed=1, ignore_eos=True))]}
    outputs = run(engine, [request(1, PROMPT, max_new_tokens=50, ignore_eos=True)], script=events)
    assert outputs[1].end.reason.kind is FinishKind.CANCELLED and 0 < len(outputs[1].ids) < 10
    assert reference_gap(reference_model(llama), other, outputs[2]) < 1e-4 and len(outputs[2].ids) == 12


def test_the_request_after_a_thousand_random_cancels_equals_the_reference(llama: Path) -> None:
    rng = np.random.default_rng(11)
    engine = make_engine(llama, max_rows=8, num_pages=64, run_ahead=2)
    recorder = Recorder()
    live: list[int] = []
    for number in range(1000):
        engine.submit(request(number, random_prompt(rng, 1, 50), max_new_tokens=int(rng.integers(1, 12)), seed=number))
        live.append(number)
        if rng.random() < 0.7:
            recorder.add(engine.step())
        while len(live) > 10:
            engine.cancel(live.pop(int(rng.integers(len(live)))))
        if number % 50 == 0:
            engine.check_integrity()
    while engine.has_work:
        recorder.add(engine.step())
    assert_idle(engine)
    assert len(recorder.outputs) == 1000
    output = generate(engine, PROMPT, max_new_tokens=20, seed=3, request_id=1000, ignore_eos=True)
    assert reference_gap(reference_model(llama), PROMPT, output) < 1e-4


@every_pair(path=["resident", "rebuilt"], run_ahead=[0, 1, 3])
def test_a_cancelled_rows_sampling_slot_serves_the_next_request_before_its_results_are_read(llama: Path, path: str, run_ahead: int) -> None:
    """One slot, two requests with scripts of their own: the second starts in the step after the cancel and both say their scripts."""
    engine = make_engine(llama, decode_tables=path, run_ahead=run_ahead, sampling_slots=1, max_rows=2)
    scripts = {1: list(range(10, 50)), 2: list(range(60, 90))}
    for number, script in scripts.items():
        engine.submit(request(number, PROMPT[:9], max_new_tokens=len(script), forced_ids=script, ignore_eos=True))
    recorder = Recorder()
    for _ in range(8):
        recorder.add(engine.step())
    assert engine.stats()["waiting"] == 1
    engine.cancel(1)
    recorder.add(engine.step())
    engine.check_integrity()
    assert engine.stats()["waiting"] == 0
    while engine.has_work:
        recorder.add(engine.step())
        engine.check_integrity()
    cut = recorder.outputs[1].ids
    assert cut and cut == scripts[1][: len(cut)] and recorder.outputs[2].ids == scripts[2]
    assert_idle(engine)
