"""Weight files: only regular files of ours below the folder, whole and as announced; staged piece by piece."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from areno.errors import ManifestMismatch
from rollout.errors import NoUpdate, UpdateBusy, WeightsFileRefused, WeightUpdateError
from rollout.service.weight_intake import StagedFile, WeightIntake, open_weights_file
from tests.fakes import FakeEngine, code_that_makes

NONE = np.empty(0, np.int64)
NO_CANARIES = (NONE, NONE, np.empty(0, np.float32), [])


def write(path: Path, **changes: torch.Tensor) -> Path:
    tensors = {"first.weight": torch.ones(4, 8), "second.weight": torch.full((8, 2), 2.0)} | changes
    save_file(tensors, path)
    return path


def opened(folder: Path) -> tuple[FakeEngine, WeightIntake]:
    engine = FakeEngine(model="x")
    intake = WeightIntake(engine, folder)
    intake.begin("u", 1, None, partial=False)
    return engine, intake


def finish(intake: WeightIntake, limit: int = 1000) -> StagedFile:
    for _ in range(limit):
        staged = intake.advance()
        if staged is not None:
            return staged
    raise AssertionError("staging never ends")


def test_a_whole_update_is_staged_piece_by_piece_and_published(tmp_path: Path) -> None:
    engine, intake = opened(tmp_path)
    path = write(tmp_path / "a.safetensors")
    intake.stage_file(b"c", "u", "a.safetensors", size=path.stat().st_size, xxh3=xxhash.xxh3_64_hexdigest(path.read_bytes()))
    assert intake.busy
    assert intake.advance() is None, "the first piece is not the end"
    assert finish(intake) == StagedFile(b"c", None)
    assert intake.commit("u", engine_digests(path), *NO_CANARIES).changed_tensors == 2
    assert engine.version == 1
    assert not intake.busy


def engine_digests(path: Path) -> dict[str, int]:
    other = FakeEngine(model="x")
    intake = WeightIntake(other, path.parent)
    intake.begin("o", 9, None, partial=False)
    intake.stage_file(b"", "o", str(path), size=path.stat().st_size, xxh3=None)
    finish(intake)
    intake.commit("o", None, *NO_CANARIES)
    return other.digests()


def symlink(folder: Path, outside: Path) -> str:
    (folder / "link").symlink_to(write(outside / "real"))
    return "link"


def symlinked_folder(folder: Path, outside: Path) -> str:
    write(outside / "real")
    (folder / "sub").symlink_to(outside)
    return "sub/real"


def hard_link(folder: Path, outside: Path) -> str:
    os.link(write(outside / "real"), folder / "hard")
    return "hard"


def fifo(folder: Path, outside: Path) -> str:
    os.mkfifo(folder / "fifo")
    return "fifo"


def directory(folder: Path, outside: Path) -> str:
    (folder / "dir").mkdir()
    return "dir"


def dots(folder: Path, outside: Path) -> str:
    write(outside / "real")
    return f"../{outside.name}/real"


def absolute_outside(folder: Path, outside: Path) -> str:
    return str(write(outside / "real"))


def absent(folder: Path, outside: Path) -> str:
    return "nothing"


def nothing(folder: Path, outside: Path) -> str:
    return ""


@pytest.mark.parametrize("make", [symlink, symlinked_folder, hard_link, fifo, directory, dots, absolute_outside, absent, nothing])
def test_anything_but_a_regular_file_of_ours_below_the_folder_is_refused(make: Callable[[Path, Path], str], tmp_path: Path) -> None:
    folder, outside = tmp_path / "weights", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    path = make(folder, outside)
    size = (outside / "real").stat().st_size if (outside / "real").exists() else 0
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightsFileRefused) as refused:
        open_weights_file(folder, path, size)
    assert refused.value.field == "path"
    assert "weights_dir" in str(refused.value.remedy)
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor stays open"


def test_a_file_in_a_folder_below_is_taken_by_either_form_of_its_path(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    path = write(tmp_path / "step-1" / "a.safetensors")
    for form in (str(path), "step-1/a.safetensors"):
        os.close(open_weights_file(tmp_path, form, path.stat().st_size))


def test_a_wrong_size_or_hash_is_refused_with_both_values(tmp_path: Path) -> None:
    _, intake = opened(tmp_path)
    path = write(tmp_path / "a")
    size = path.stat().st_size
    with pytest.raises(WeightsFileRefused, match=f"has {size} bytes, {size - 1} were announced"):
        intake.stage_file(b"c", "u", "a", size=size - 1, xxh3=None)
    intake.stage_file(b"c", "u", "a", size=size, xxh3="0" * 16)
    staged = finish(intake)
    assert isinstance(staged.error, WeightsFileRefused)
    assert "0000000000000000 was announced" in str(staged.error)


def test_a_pickle_or_a_cut_file_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    whole = write(tmp_path / "whole").read_bytes()
    for content in (code_that_makes(marker), b"", whole[:-7], b"\xff" * 100):
        _, intake = opened(tmp_path)
        (tmp_path / "a").write_bytes(content)
        intake.stage_file(b"c", "u", "a", size=len(content), xxh3=None)
        assert isinstance(finish(intake).error, WeightsFileRefused)
    assert not marker.exists()


def test_what_the_engine_refuses_reaches_the_caller_of_that_file(tmp_path: Path) -> None:
    _, intake = opened(tmp_path)
    path = write(tmp_path / "a", bogus=torch.zeros(1))
    intake.stage_file(b"c", "u", "a", size=path.stat().st_size, xxh3=None)
    assert isinstance(finish(intake).error, ManifestMismatch)


def test_one_update_at_a_time_and_only_by_its_id(tmp_path: Path) -> None:
    engine, intake = opened(tmp_path)
    with pytest.raises(UpdateBusy, match="u"):
        intake.begin("v", 2, None, partial=False)
    with pytest.raises(NoUpdate, match="'v' is not open"):
        intake.commit("v", None, *NO_CANARIES)
    intake.abort("v")
    intake.abort("u")
    intake.begin("v", 2, None, partial=False)
    assert engine.version == 0


def test_an_abort_in_the_middle_of_a_file_answers_its_caller_and_frees_everything(tmp_path: Path) -> None:
    _, intake = opened(tmp_path)
    path = write(tmp_path / "a")
    before = len(os.listdir("/proc/self/fd"))
    for call in (b"1", b"2"):
        intake.stage_file(call, "u", "a", size=path.stat().st_size, xxh3=None)
    assert intake.advance() is None
    intake.abort("u")
    for call in (b"1", b"2"):
        dropped = intake.advance()
        assert dropped is not None
        assert dropped.call_id == call
        assert isinstance(dropped.error, NoUpdate)
    assert not intake.busy
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_commit_before_staging_ended_is_refused_and_closes_the_update(tmp_path: Path) -> None:
    engine, intake = opened(tmp_path)
    path = write(tmp_path / "a")
    intake.stage_file(b"c", "u", "a", size=path.stat().st_size, xxh3=None)
    with pytest.raises(WeightUpdateError, match="still being staged"):
        intake.commit("u", None, *NO_CANARIES)
    assert engine.version == 0
    assert finish(intake).call_id == b"c", "the file's caller gets its answer"


def test_canaries_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    _, intake = opened(tmp_path)
    with pytest.raises(WeightUpdateError, match="do not fit"):
        intake.commit("u", None, np.arange(5), np.array([5]), np.zeros(5, np.float32), [1.0])
