"""A model cut into two real processes over gloo: updates by broadcasts, sleep, and losing the other rank inside a collective."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from areno import Canary, Engine, EngineConfig, EngineFailure
from areno.errors import DigestMismatch, ManifestMismatch
from areno.ranks.peers import Peers, PeersPlan
from areno.weights.digest import digest
from areno.weights.slices import Slice
from rollout.service.last_weights import LastWeights
from tests.engine_runs import generate, random_prompt, request, run
from tests.fixtures_models import checkpoint_tensors, manifest_of, reference_logprobs, write_checkpoint

OPTIONS: dict[str, Any] = {"max_rows": 8, "seed": 1, "page_size": 8, "device": "cpu"}
TIMEOUT_S = 2.0
PROMPT = [5, 9, 11, 40, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3", seed=0, tie_word_embeddings=True)


def cut(folder: Path) -> tuple[Engine, Peers]:
    """Return an engine of two ranks, to which weights go by broadcasts as they do between devices."""
    plan = PeersPlan(
        model=folder,
        devices=("cpu", "cpu"),
        backend="gloo",
        launches_ahead=1,
        rank_timeout_s=TIMEOUT_S,
        stall_s=60.0,
        threads=1,
        broadcasts=True,
    )
    peers = Peers(plan)
    return Engine(EngineConfig(model=str(folder), **OPTIONS), ranks=peers), peers


def lose(engine: Engine, pid: int, how: signal.Signals, work: Callable[[], object]) -> None:
    """Signal the other rank while rank 0 works; the work must end with a typed error in time, and so must all that follows."""
    threading.Timer(0.05, os.kill, (pid, how)).start()
    started = time.monotonic()
    with pytest.raises(EngineFailure, match=rf"rank 1 \(pid {pid}\) (was killed by SIGKILL|has shown no sign of life)") as failed:
        while True:
            work()
    assert time.monotonic() - started < TIMEOUT_S + 8.0
    with pytest.raises(EngineFailure) as again:
        engine.score(np.arange(3, 30))
    assert again.value is failed.value
    engine.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.timeout(120)
def test_weights_that_are_broadcast_are_proven_and_sleep_gives_them_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    engine, peers = cut(folder)
    other = write_checkpoint(tmp_path / "other", "qwen3", seed=1, tie_word_embeddings=True)
    tensors = checkpoint_tensors(other)
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    canary = Canary(ids=np.arange(3, 20), expected_logprobs=reference_logprobs(str(other), np.arange(3, 20)).astype(np.float32))
    alone = Engine(EngineConfig(model=str(other), **OPTIONS))
    requests = [request(number, random_prompt(np.random.default_rng(number), 4, 40), max_new_tokens=12, seed=number) for number in range(6)]
    expected = run(alone, requests)

    def stage(version: int) -> None:
        engine.begin_update(manifest_of(tensors), version=version)
        for name, tensor in tensors.items():
            if "down_proj" in name:
                # Slices that end within rows, so that each rank takes its columns of parts of rows.
                flat = tensor.reshape(-1)
                for start in range(0, flat.numel(), 1001):
                    engine.stage_slices([Slice(name, flat[start : start + 1001], start, manifest_of(tensors)[name])])
                engine.settle_slices()
            else:
                engine.stage(name, tensor)

    stage(1)
    name = next(iter(digests))
    with pytest.raises(DigestMismatch, match=name):
        engine.commit_update(digests={**digests, name: digests[name] ^ 1}, canaries=[canary])
    assert engine.version == 0
    stage(1)
    report = engine.commit_update(digests=digests, canaries=[canary])
    assert report.canary_gap is not None and report.canary_gap < 1e-4 and report.changed_tensors == len(tensors)
    kept = LastWeights(engine, tmp_path / "kept.safetensors")
    kept.committed()
    while kept.busy:
        kept.advance()
    written = load_file(tmp_path / "kept.safetensors")
    assert written.keys() == tensors.keys() and all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    for _ in range(2):
        outputs = run(engine, requests)
        for number, output in expected.items():
            assert outputs[number].ids == output.ids
            assert np.allclose(outputs[number].logprobs, output.logprobs, atol=1e-4)
        assert {name: engine.digests()[name] for name in digests} == digests
        engine.sleep("weights")
        engine.wake()
    engine.submit(request(99, PROMPT, max_new_tokens=400, ignore_eos=True))
    lose(engine, peers.pids[1], signal.SIGSTOP, engine.step)


@pytest.mark.timeout(60)
def test_what_rank_0_refuses_of_a_tied_tensor_changes_the_update_nowhere(folder: Path) -> None:
    engine, _ = cut(folder)
    tensors = checkpoint_tensors(folder)
    before = generate(engine, PROMPT, max_new_tokens=5, temperature=0.0).ids
    norm, head = "model.norm.weight", "lm_head.weight"
    sent = {norm: tensors[norm] * 1.0, head: tensors["model.embed_tokens.weight"]}
    manifest = manifest_of(sent)
    engine.begin_update(manifest, version=1, partial=True)
    for name, tensor in sent.items():
        engine.stage(name, tensor)
    broken = sent[head] * float("nan")
    with pytest.raises(ManifestMismatch, match="NaN"):
        engine.stage_slices([Slice(head, broken.reshape(-1), 0, manifest[head])])
    with pytest.raises(ManifestMismatch, match="NaN"):
        engine.stage(head, broken)
    with pytest.raises(ManifestMismatch, match="is a NoneType"):
        engine.stage(norm, None)  # type: ignore[arg-type]
    assert engine.commit_update(digests={name: digest(tensor) for name, tensor in sent.items()}).version == 1
    assert generate(engine, PROMPT, max_new_tokens=5, temperature=0.0).ids == before
    engine.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sliced", [False, True])
def test_an_interrupt_between_the_parts_of_a_staged_tensor_ends_all_ranks_at_once(
    folder: Path, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, peers = cut(folder)
    tensors = checkpoint_tensors(folder)
    engine.begin_update(None, version=1)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(peers, "stage", interrupt)
    name, tensor = next(iter(tensors.items()))
    with pytest.raises(KeyboardInterrupt):
        if sliced:
            engine.stage_slices([Slice(name, tensor.reshape(-1), 0, manifest_of(tensors)[name])])
        else:
            engine.stage(name, tensor)
    started = time.monotonic()
    with pytest.raises(EngineFailure):
        engine.commit_update()
    assert time.monotonic() - started < TIMEOUT_S + 8.0
    engine.close()
    assert not any(psutil.pid_exists(pid) for pid in peers.pids.values())


def _decode(engine: Engine) -> Callable[[], object]:
    engine.submit(request(1, PROMPT, max_new_tokens=500, ignore_eos=True))
    engine.step()

    def step() -> None:
        if not engine.has_work:
            engine.submit(request(1, PROMPT, max_new_tokens=500, ignore_eos=True))
        engine.step()

    return step


def _prefill(engine: Engine) -> Callable[[], object]:
    numbers = iter(range(10**6))
    rng = np.random.default_rng(0)
    return lambda: generate(engine, random_prompt(rng, 450, 460), max_new_tokens=1, request_id=next(numbers))


def _update(engine: Engine) -> Callable[[], object]:
    tensors = checkpoint_tensors(Path(engine._config.model))
    versions = iter(range(1, 10**6))

    def push() -> None:
        engine.begin_update(None, version=next(versions))
        for name, tensor in tensors.items():
            engine.stage(name, tensor)
        engine.commit_update(canaries=[])

    return push


@pytest.mark.long
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("phase", [_prefill, _decode, _update], ids=lambda phase: phase.__name__)
def test_a_rank_that_is_lost_inside_collectives_is_named_in_time(
    folder: Path, phase: Callable[[Engine], Callable[[], object]], how: signal.Signals
) -> None:
    engine, peers = cut(folder)
    lose(engine, peers.pids[1], how, phase(engine))
