"""A device that fails is a typed failure with a remedy wherever the engine meets it; memory that runs out ends only a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno import Canary, Engine, EngineFailure, RequestTooLong, WeightUpdateError
from areno.device_errors import device_errors, device_failure
from areno.errors import CanaryMismatch
from tests.engine_runs import generate, make_engine, request
from tests.fixtures_models import write_checkpoint

BROKEN = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported")
TRITON = RuntimeError("Triton Error [CUDA]: device-side assert triggered")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Raises:
    """A part of the engine that raises whatever of it is called; its numbers are zero."""

    launch_s, version = 0.0, 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: Any, **__: Any) -> Any:
            raise self._error

        return fail


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def engine(folder: Path) -> Engine:
    return make_engine(folder)


def break_part(owner: object, name: str, error: Exception) -> Any:
    """Put a part that raises in the place of its owner's; returns the former."""
    former = getattr(owner, name)
    setattr(owner, name, Raises(error))
    return former


@pytest.mark.parametrize(
    ("error", "remedy"), [(FULL, "lower gpu_memory_fraction"), (BROKEN, "restart the engine"), (TRITON, "restart the")]
)
def test_a_step_that_fails_on_the_device_is_a_failure_with_a_remedy(engine: Engine, error: RuntimeError, remedy: str) -> None:
    break_part(engine, "_executor", error)
    engine.submit(request(1, [3, 4, 5], max_new_tokens=2))
    with pytest.raises(EngineFailure, match="in the middle of a step") as failure:
        engine.step()
    assert remedy in str(failure.value.remedy) and failure.value.field == "device" and failure.value.__cause__ is error
    assert "\n" not in str(failure.value), "one line of the driver's is enough"


def test_an_error_of_another_kind_is_itself(engine: Engine) -> None:
    other = RuntimeError("shapes differ")
    assert device_failure(other) is None
    with pytest.raises(RuntimeError, match="shapes differ"), device_errors("while it was tested"):
        raise other
    refusal = CanaryMismatch("the CUDA error of a message", remedy="none")
    assert device_failure(refusal) is None, "the engine's own errors keep their type"


def test_results_that_cannot_be_read_are_a_failure(engine: Engine) -> None:
    break_part(engine, "_ring", BROKEN)
    with pytest.raises(EngineFailure, match="while results were read"):
        engine.collect()


def test_a_score_without_memory_is_refused_and_one_on_a_broken_device_is_a_failure(engine: Engine) -> None:
    forward = break_part(engine, "_forward", FULL)
    with pytest.raises(RequestTooLong, match="no memory to score 3 ids") as refusal:
        engine.score([3, 4, 5])
    assert "score a shorter sequence" in str(refusal.value.remedy) and "gpu_memory_fraction" in str(refusal.value.remedy)
    engine._forward = forward
    assert engine.score([3, 4, 5]).token_logprobs.size == 2, "the engine goes on"
    break_part(engine, "_forward", BROKEN)
    with pytest.raises(EngineFailure, match="while ids were scored"):
        engine.score([3, 4, 5])


def staged(engine: Engine, change: float) -> dict[str, torch.Tensor]:
    """Open a full update whose tensors are the live ones times a factor; returns the old ones."""
    old = {name: view.clone() for name, view in engine._table.views.items()}
    engine.begin_update(None, version=engine.version + 1)
    for name, tensor in old.items():
        engine.stage(name, tensor * change)
    return old


@pytest.mark.parametrize(("error", "expected"), [(FULL, WeightUpdateError), (BROKEN, EngineFailure)])
def test_a_proof_that_fails_on_the_device_restores_the_old_weights_or_gives_up(
    engine: Engine, error: RuntimeError, expected: type[Exception]
) -> None:
    before = generate(engine, [3, 4, 5], max_new_tokens=6, temperature=0.0).ids
    old = staged(engine, 1.5)
    proof = break_part(engine._updates, "_proof", error)
    canary = Canary(ids=np.array([3, 4, 5]), expected_logprobs=np.zeros(2, np.float32))
    with pytest.raises(expected) as failure:
        engine.commit_update(canaries=[canary])
    assert type(failure.value) is expected and failure.value.remedy
    assert engine.version == 0 and all(torch.equal(engine._table.views[name], tensor) for name, tensor in old.items())
    engine._updates._proof = proof
    assert generate(engine, [3, 4, 5], max_new_tokens=6, temperature=0.0, request_id=2).ids == before


@pytest.mark.parametrize("error", [FULL, BROKEN])
def test_a_swap_that_fails_half_way_is_always_a_failure(engine: Engine, error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    staged(engine, 1.5)
    monkeypatch.setattr("areno.weights.update.WeightUpdate.swap", Raises(error).swap)
    with pytest.raises(EngineFailure, match="while weights were"):
        engine.commit_update()


@pytest.mark.parametrize(("error", "expected"), [(FULL, WeightUpdateError), (BROKEN, EngineFailure)])
def test_a_tensor_that_cannot_be_staged_is_refused_by_name(engine: Engine, error: RuntimeError, expected: type[Exception]) -> None:
    engine.begin_update(None, version=1)
    update = break_part(engine._updates, "_update", error)
    with pytest.raises(expected, match=r"model\.norm\.weight") as failure:
        engine.stage("model.norm.weight", torch.zeros(1))
    assert type(failure.value) is expected and failure.value.remedy
    engine._updates._update = update
    engine.abort_update()


def test_an_engine_that_does_not_fit_says_how_it_would(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise FULL

    monkeypatch.setattr("areno.engine.build_rank", full)
    with pytest.raises(EngineFailure, match="while the engine was built: CUDA out of memory") as failure:
        make_engine(folder)
    assert "fewer max_rows" in str(failure.value.remedy)
