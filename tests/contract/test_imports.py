"""What an import may load: light parts stay light, in a fresh interpreter each.

The static side (who may import whom) is import-linter's, in `make lint`; this is the dynamic side, lazy and transitive imports included.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "areno"}
SERVICE = {"zmq", "msgpack", "pydantic", "transformers", "rollout", "trainer_bridge"}


def modules_loaded_by(*names: str) -> set[str]:
    """Import `names` in a fresh interpreter and return everything that is loaded afterwards."""
    return modules_after_each(*names)[-1]


def modules_after_each(*names: str) -> list[set[str]]:
    """Import `names` one after the other in a fresh interpreter; return what is loaded after each."""
    script = f"import importlib, json, sys\nfor name in {names!r}: importlib.import_module(name); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"importing {names} failed:\n{done.stderr}"
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def top_levels(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("name", ["rollout", "rollout.client", "rollout.wire", "rollout.errors"])
def test_the_client_side_loads_no_torch_no_transformers_and_no_engine(name: str) -> None:
    assert not HEAVY & top_levels(modules_loaded_by(name))


def test_the_client_side_does_not_load_the_service_side() -> None:
    assert not {name for name in modules_loaded_by("rollout", "rollout.client", "rollout.wire") if name.startswith("rollout.service")}


def test_the_front_loads_no_torch_no_transformers_and_no_engine() -> None:
    assert not HEAVY & top_levels(modules_loaded_by("rollout.service.front"))


def test_the_engine_loads_neither_the_service_nor_its_libraries() -> None:
    assert not SERVICE & top_levels(modules_loaded_by("areno", "areno.config", "areno.engine"))


def test_importing_areno_alone_loads_no_torch() -> None:
    assert "torch" not in modules_loaded_by("areno", "areno.errors")


def test_planning_on_the_host_loads_no_torch_and_a_rank_shows_its_beat_before_it_does() -> None:
    names = ("areno.request", "areno.commands", "areno.kv.pool", "areno.kv.prefix", "areno.scheduler", "areno.ranks.follower")
    for name, loaded in zip(names, modules_after_each(*names), strict=True):
        assert "torch" not in loaded, name


def test_neither_the_digest_nor_the_bridge_loads_more_of_the_engine_than_the_digest() -> None:
    digest, bridge = modules_after_each("areno.weights.digest", "trainer_bridge")
    for loaded in (digest, bridge):
        assert {name for name in loaded if name.startswith("areno")} <= {"areno", "areno.weights", "areno.weights.digest"}
    assert not {"transformers", "safetensors"} & digest


def test_imports_are_inert() -> None:
    """No environment writes, no logging set-up, no warnings filters; what torch and transformers do themselves is done before."""
    script = (
        "import torch, transformers\n"
        "import importlib, logging, os, warnings\n"
        "def state(): return dict(os.environ), logging.getLogger().level, list(logging.getLogger().handlers), list(warnings.filters)\n"
        "before = state()\n"
        "for package in ('areno', 'rollout', 'trainer_bridge'):\n"
        "    module = importlib.import_module(package)\n"
        "    for name in module.__all__: getattr(module, name)\n"
        "    print(package, [b == a for b, a in zip(before, state())])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} [True, True, True, True]" for name in ("areno", "rollout", "trainer_bridge")]
