"""The probe of mapped memory finds wrong bytes and refused pointers, and the rank's choice follows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from areno import EngineFailure, InvalidConfig
from areno.decode.mapped import MASK, WORDS, probe_mapped
from areno.decode.transport import HostTransport, choose_transport
from tests.engine_runs import make_engine
from tests.fixtures_models import write_checkpoint


class Card:
    """A device that does what the probe asks, unless told to fail."""

    def __init__(self, *, lost: int = 0, stale: bool = False, error: Exception | None = None, broken: bool = False) -> None:
        self._lost, self._stale, self._error, self._broken = lost, stale, error, broken
        self._cached: torch.Tensor | None = None
        self.launches = 0

    def pinned(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def echo(self, source: torch.Tensor, target: torch.Tensor, mask: int) -> None:
        self.launches += 1
        if self._error is not None:
            raise self._error
        if self._cached is None or not self._stale:
            self._cached = source.clone()
        target[self._lost :] = (self._cached ^ mask)[self._lost :]

    def check(self) -> None:
        if self._broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_maps_memory_passes_twice() -> None:
    card = Card()
    assert probe_mapped(card).works and card.launches == 2
    assert -(2**31) <= MASK < 2**31, "the mask is an int32"


def test_words_that_never_arrive_are_counted() -> None:
    found = probe_mapped(Card(lost=3))
    assert not found.works and f"6 of {2 * WORDS:,} words" in found.reason


def test_words_from_a_stale_cache_show_in_the_second_round() -> None:
    found = probe_mapped(Card(stale=True))
    assert not found.works and found.reason.startswith("4,")


@pytest.mark.parametrize(
    "error",
    [ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"), RuntimeError("CUDA error: not supported\nmore")],
)
def test_a_refusal_is_the_reason(error: Exception) -> None:
    found = probe_mapped(Card(error=error))
    assert not found.works and found.reason == f"{type(error).__name__}: {str(error).splitlines()[0]}"


def test_an_error_that_stays_is_a_failure_with_the_way_round_it() -> None:
    with pytest.raises(EngineFailure, match="while pinned memory was tried") as failure:
        probe_mapped(Card(error=RuntimeError("CUDA error: misaligned address"), broken=True))
    assert failure.value.field == "result_transport" and "result_transport='copy'" in str(failure.value.remedy)


def test_the_cpu_takes_auto_alone(tmp_path: Path) -> None:
    assert isinstance(choose_transport("auto", torch.device("cpu")), HostTransport)
    folder = write_checkpoint(tmp_path, "llama")
    for wanted in ("mapped", "copy"):
        with pytest.raises(InvalidConfig, match="needs a CUDA device") as refusal:
            make_engine(folder, result_transport=wanted)
        assert refusal.value.field == "result_transport" and "leave result_transport at 'auto'" in str(refusal.value.remedy)
    engine = make_engine(folder)
    assert engine.info.result_transport == engine.stats()["result_transport"] == "host"
    assert engine.info.result_transport_reason == "the engine runs on the CPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_the_probe_as_a_program_prints_one_line() -> None:
    run = subprocess.run([sys.executable, "-m", "areno.decode.mapped"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"works": False, "reason": "there is no CUDA device"}
