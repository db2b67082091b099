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
    script = f"import importlib, json, sys\nfor name in {names!r}: importlib.import_module(name)\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"importing {names} failed:\n{done.stderr}"
    return set(json.loads(done.stdout))


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


@pytest.mark.parametrize(
    "name", ["areno.scheduler", "areno.commands", "areno.request", "areno.kv.pool", "areno.kv.prefix", "areno.ranks.follower"]
)
def test_planning_on_the_host_loads_no_torch_and_a_rank_shows_its_beat_before_it_does(name: str) -> None:
    assert "torch" not in modules_loaded_by(name)


def test_the_digest_does_not_load_the_engine() -> None:
    loaded = {name for name in modules_loaded_by("areno.weights.digest") if name.startswith("areno")}
    assert loaded <= {"areno", "areno.weights", "areno.weights.digest"}


def test_importing_the_bridge_loads_of_the_engine_at_most_the_digest() -> None:
    loaded = {name for name in modules_loaded_by("trainer_bridge") if name.startswith("areno")}
    assert loaded <= {"areno", "areno.weights", "areno.weights.digest"}


@pytest.mark.parametrize("package", ["areno", "rollout", "trainer_bridge"])
def test_imports_are_inert(package: str) -> None:
    """No environment writes, no logging set-up, no warnings filters; what torch and transformers do themselves is done before."""
    script = (
        "import torch, transformers\n"
        "import logging, os, warnings\n"
        "before = (dict(os.environ), logging.getLogger().level, list(logging.getLogger().handlers), list(warnings.filters))\n"
        f"import {package}\n"
        f"for name in {package}.__all__: getattr({package}, name)\n"
        "after = (dict(os.environ), logging.getLogger().level, list(logging.getLogger().handlers), list(warnings.filters))\n"
        "print([b == a for b, a in zip(before, after)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[True, True, True, True]"
