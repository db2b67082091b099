"""One prompt of several requests is computed once, to its last token: of those that come together, later, or with another end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Engine, FinishKind, Request
from tests.crossed import every_pair, every_value
from tests.engine_runs import Output, assert_idle, make_engine, random_prompt, reference_gap, request, run
from tests.fixtures_models import checkpoint_tensors, reference_model, write_checkpoint

PAGE = 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _prompt(size: int, seed: int = 0) -> np.ndarray:
    return random_prompt(np.random.default_rng(seed + 100 * size), size, size + 1)


def _members(prompt: np.ndarray, count: int, **params: Any) -> list[Request]:
    return [request(n, prompt, max_new_tokens=12, seed=100 + n, ignore_eos=True, **params) for n in range(count)]


def _later(members: list[Request]) -> dict[int, list[Callable[[Engine], object]]]:
    """Return a script by which one comes after the other, while all before it run."""
    return {step: [lambda engine, member=member: engine.submit(member)] for step, member in enumerate(members)}


def _assert_alone(llama: Path, members: list[Request], outputs: dict[int, Output], **options: Any) -> None:
    for number, member in enumerate(members):
        alone = run(make_engine(llama, **options), [member])[number]
        assert outputs[number].ids == alone.ids
        assert np.allclose(outputs[number].logprobs, alone.logprobs, atol=1e-4)


@every_pair(size=[5, 16, 21, 48], path=["resident", "rebuilt"], run_ahead=[0, 2])
def test_requests_that_come_together_with_one_prompt_are_one_prefill(llama: Path, size: int, path: str, run_ahead: int) -> None:
    members = _members(_prompt(size), 6)
    engine = make_engine(llama, decode_tables=path, run_ahead=run_ahead)
    outputs = run(engine, members)
    stats = engine.stats()
    assert stats["prefill_tokens"] == size and stats["forks"] == 5 and stats["cached_tokens"] == 5 * (size - 1)
    assert len({tuple(output.ids) for output in outputs.values()}) == 6
    _assert_alone(llama, members, outputs, decode_tables=path)
    assert all(reference_gap(reference_model(llama), _prompt(size), output) < 1e-4 for output in outputs.values())


@every_pair(size=[5, 16, 21, 48], path=["resident", "rebuilt"], run_ahead=[0, 2])
def test_a_request_that_comes_while_its_prompt_runs_computes_the_last_token_alone(
    llama: Path, size: int, path: str, run_ahead: int
) -> None:
    members = _members(_prompt(size), 6)
    engine = make_engine(llama, decode_tables=path, run_ahead=run_ahead)
    outputs = run(engine, script=_later(members))
    # A whole last page is computed again, as the one token that is always left lies in it.
    again = 1 if size % PAGE else PAGE
    assert engine.stats()["prefill_tokens"] == size + 5 * again
    assert [outputs[n].end.cached_tokens for n in range(6)] == [0, *[size - again] * 5]
    _assert_alone(llama, members, outputs, decode_tables=path)


def test_other_ends_share_what_their_beginnings_have_in_common_on_the_last_page(llama: Path) -> None:
    prompt = _prompt(29)
    other = np.append(prompt[:26], (prompt[26:] + 1) % 200 + 3)
    longer = np.append(prompt, _prompt(40, seed=1))
    asked = [request(n, ids, max_new_tokens=9, seed=n, ignore_eos=True) for n, ids in enumerate((prompt, other, longer))]
    engine = make_engine(llama)
    outputs = run(engine, script=_later(asked))
    assert [outputs[n].end.cached_tokens for n in range(3)] == [0, 26, 29]
    _assert_alone(llama, asked, outputs)


def test_a_queue_of_several_prompts_shares_each_and_nobody_overtakes(llama: Path) -> None:
    prompts = [_prompt(size, seed=3) for size in (21, 37, 21)]
    asked = [request(n, prompts[n % 3], max_new_tokens=6, seed=n, ignore_eos=True) for n in range(12)]
    engine = make_engine(llama, max_rows=5)
    starts: list[int] = []
    for item in asked:
        engine.submit(item)
    outputs: dict[int, list[int]] = {n: [] for n in range(12)}
    while engine.has_work:
        step = engine.step()
        engine.check_integrity()
        for number, token in zip(step.request_ids.tolist(), step.token_ids.tolist()):
            starts += [number] if not outputs[number] else []
            outputs[number].append(token)
    assert_idle(engine)
    assert engine.stats()["forks"] and engine.stats()["prefill_tokens"] < 21 + 37 + 21 + 12
    # Those of one launch draw in the order of its chunks.
    assert all(abs(place - number) < 5 for place, number in enumerate(starts))
    for number, item in enumerate(asked):
        assert outputs[number] == run(make_engine(llama), [item])[number].ids


@every_value(differs=["salt", "cache off", "scores", "ids"])
def test_what_is_not_the_same_prompt_or_must_be_computed_is_not_shared(llama: Path, differs: str) -> None:
    prompt, other = _prompt(21), _prompt(21)
    other[-1] = (other[-1] + 1) % 200 + 3
    second: dict[str, Any] = {"salt": {"cache_salt": "b"}, "scores": {"prompt_logprobs_from": 1}}.get(differs, {})
    asked = [
        request(0, prompt, max_new_tokens=6, seed=0, ignore_eos=True),
        request(1, other if differs == "ids" else prompt, max_new_tokens=6, seed=1, ignore_eos=True, **second),
    ]
    engine = make_engine(llama, prefix_cache=differs != "cache off")
    outputs = run(engine, asked)
    expected = {"ids": 2 * 21 - PAGE}.get(differs, 2 * 21)
    assert engine.stats()["forks"] == 0 and engine.stats()["prefill_tokens"] == expected
    _assert_alone(llama, asked, outputs, prefix_cache=differs != "cache off")


def test_a_commit_ends_what_is_shared_with_rows_that_run_on(llama: Path, tmp_path: Path) -> None:
    newer = write_checkpoint(tmp_path / "newer", "llama", seed=1)

    def push(engine: Engine) -> None:
        engine.begin_update(None, version=1)
        for name, tensor in checkpoint_tensors(newer).items():
            engine.stage(name, tensor)
        engine.commit_update()

    members = _members(_prompt(21), 4)
    script = {0: [lambda e: e.submit(members[0])], 3: [push, *(lambda e, m=m: e.submit(m) for m in members[1:])]}
    outputs = run(make_engine(llama), script=script)
    assert outputs[0].end.kv_spans[0] == (0, 0) and outputs[1].end.cached_tokens == 0
    for number in (1, 2, 3):
        assert outputs[number].end.kv_spans == ((0, 1),)
        assert reference_gap(reference_model(newer), _prompt(21), outputs[number]) < 1e-4


@every_value(kind=["ends", "cancelled", "preempted"])
def test_a_page_that_its_row_gave_back_is_not_copied(llama: Path, kind: str) -> None:
    prompt = _prompt(21)
    first = request(0, prompt, max_new_tokens=3 if kind == "ends" else 150, seed=0, ignore_eos=True)
    engine = make_engine(llama, num_pages=15, max_rows=3)
    script: dict[int, list[Callable[[Engine], object]]] = {0: [lambda e: e.submit(first)]}
    if kind == "cancelled":
        script[3] = [lambda e: e.cancel(0)]
    if kind == "preempted":
        script[2] = [lambda e: e.submit(request(8, _prompt(40, seed=2), max_new_tokens=150, seed=8, ignore_eos=True))]
    late = 90 if kind == "preempted" else 6
    script[late] = [lambda e: e.clear_prefix_cache()]
    script[late + 1] = [lambda e: e.submit(request(1, prompt, max_new_tokens=6, seed=1, ignore_eos=True))]
    outputs = run(engine, script=script)
    assert kind != "preempted" or engine.stats()["preemptions"]
    assert outputs[0].end.reason.kind is (FinishKind.CANCELLED if kind == "cancelled" else FinishKind.LENGTH)
    assert reference_gap(reference_model(llama), prompt, outputs[1]) < 1e-4


def test_what_a_row_wrote_behind_its_prompt_never_reaches_who_copies_the_page(llama: Path) -> None:
    engine = make_engine(llama)
    members = _members(_prompt(21), 2)
    engine.submit(members[0])
    engine.step()
    # As if the row computed what is no number: it is written behind the prompt's tokens.
    (page,) = engine._scheduler._live[0].pages[1:2]
    for tensor in (engine._store.keys, engine._store.values):
        tensor[:, page, 21 % PAGE :] = float("nan")
    engine.submit(members[1])
    outputs: list[int] = []
    while engine.has_work:
        step = engine.step()
        outputs += step.token_ids[step.request_ids == 1].tolist()
        engine.check_integrity()
    assert torch.isnan(engine._store.keys).any(), "nothing was poisoned"
    assert outputs == run(make_engine(llama), [members[1]])[1].ids


def test_salts_leave_nothing_behind_in_the_index(llama: Path) -> None:
    engine = make_engine(llama)
    for number in range(5):
        run(engine, [request(number, _prompt(5), max_new_tokens=1, ignore_eos=True, cache_salt=str(number))])
    engine._scheduler.prefix.evict(100)
    assert not engine._scheduler.prefix._roots
