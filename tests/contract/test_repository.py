"""What no file of the repository may hold, and what the READMEs promise: read from the files themselves."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("areno", "rollout", "trainer_bridge")
FOLDERS = (*PACKAGES, "examples", "tests")
LIMIT_BYTES = 4_000_000

# Assembled from parts, so that this file does not hold what it forbids.
FORBIDDEN_TEXT = {
    "a path of some machine": re.compile(
        "|".join(rf"(?<![\w.])/{name}/" for name in ("work", "root", "home", "tmp", "mnt", "opt")) + "|" + "C:" + r"\\"
    ),
    "the host of a package index": re.compile("pypi" + r"\.org|python" + r"hosted\.|download\." + "pytorch|hugging" + r"face\.co/"),
    "a reference to working notes": re.compile("DESIGN" + r"\.? ?\d|CASES" + r"\.md|STYLE" + r"\.md|\bC[0-9]{2}\b(?!\w)|\bissue ?#? ?\d+"),
}
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_BUILTINS = {"eval", "exec", "compile"}
# Calls by these names unpickle, whoever has them, or render a template outside a sandbox.
UNSAFE_NAMES = {
    "recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "recv_object_list",
    "send_object_list", "Environment", "NativeEnvironment", "Template", "from_string",
}  # fmt: skip
UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("yaml", "load"), ("pd", "read_pickle"), ("pandas", "read_pickle")}
# The rest of multiprocessing hands its arguments over as pickles.
SAFE_MULTIPROCESSING = ("multiprocessing.shared_memory", "multiprocessing.resource_tracker")


def tracked_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    yield from (path for path in ROOT.iterdir() if path.is_file())
    yield from (path for path in (ROOT / ".ci").iterdir() if path.is_file())


@functools.cache
def texts() -> tuple[tuple[Path, str], ...]:
    kinds = {".py", ".md", ".toml", ".txt", ".json", ".jinja", ""}
    paths = (path for path in tracked_files() if path.suffix in kinds and path.name not in ("LICENSE", ".git"))
    return tuple((path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths)


@functools.cache
def sources() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(text, filename=str(path))) for path, text in texts() if path.suffix == ".py")


def unsafe_uses(tree: ast.Module) -> Iterator[str]:
    """Name every import and call by which bytes could become code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (f"line {node.lineno}: import of {name}" for name in imported_names(node) if is_unsafe_module(name))
        elif isinstance(node, ast.Call):
            yield from (f"line {node.lineno}: {what}" for what in unsafe_parts(node))


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]


def is_unsafe_module(name: str) -> bool:
    top = name.partition(".")[0]
    return top in UNSAFE_MODULES or (top == "multiprocessing" and not name.startswith(SAFE_MULTIPROCESSING))


def unsafe_parts(call: ast.Call) -> Iterator[str]:
    function = call.func
    if isinstance(function, ast.Name) and function.id in UNSAFE_BUILTINS:
        yield f"call of {function.id}"
    if isinstance(function, ast.Attribute):
        owner = ast.unparse(function.value)
        if (owner, function.attr) in UNSAFE_CALLS or function.attr in UNSAFE_NAMES:
            yield f"call of {owner}.{function.attr}"
    for word in call.keywords:
        if word.arg == "allow_pickle" and not (isinstance(word.value, ast.Constant) and word.value.value is False):
            yield "allow_pickle"


@pytest.mark.parametrize("what", sorted(FORBIDDEN_TEXT))
def test_no_file_holds(what: str) -> None:
    pattern = FORBIDDEN_TEXT[what]
    found = [
        f"{path}:{number}: {line.strip()[:120]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


def test_no_source_turns_bytes_into_code() -> None:
    found = [f"{path}: {use}" for path, tree in sources() for use in unsafe_uses(tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import multiprocessing",
        "from multiprocessing import Pool",
        "from multiprocessing.connection import Client",
        "eval('1')",
        "exec('1')",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "compile('1', 'x', 'eval')",
        "socket.recv_pyobj()",
        "dist.broadcast_object_list([1])",
        "jinja2.Environment()",
    ],
)
def test_the_search_for_unsafe_uses_finds(source: str) -> None:
    assert list(unsafe_uses(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["model.eval()", "from multiprocessing import shared_memory", "import numpy as np\nnp.load('x', allow_pickle=False)"]
)
def test_the_search_for_unsafe_uses_lets_pass(source: str) -> None:
    assert not list(unsafe_uses(ast.parse(source)))


def test_no_file_is_larger_than_the_tiny_model_may_be() -> None:
    found = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked_files() if path.stat().st_size > LIMIT_BYTES}
    assert not found


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_explains_itself(package: str) -> None:
    assert (ROOT / package / "README.md").read_text(encoding="utf-8").startswith("# ")


def test_every_make_command_in_a_readme_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"demo", "test", "test-long", "lint", "bench"} <= targets
    for path, text in texts():
        if path.suffix == ".md":
            named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, flags=re.MULTILINE))
            assert named <= targets, f"{path} names targets that the Makefile lacks: {sorted(named - targets)}"


def test_the_first_screen_of_the_readme_has_what_a_newcomer_needs() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:60])
    for needed in ("make demo", "make test", "CUDA", "+--", "| "):
        assert needed in first_screen


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]


def test_every_module_says_what_it_owns() -> None:
    missing = [str(path) for path, tree in sources() if path.name != "__init__.py" and tree.body and not ast.get_docstring(tree)]
    assert not missing, f"modules without a docstring: {missing}"


def test_the_pins_cover_every_direct_dependency() -> None:
    def plain(requirement: str) -> str:
        return re.split(r"[=<>!~\[; ]", requirement)[0].lower().replace("_", "-")

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {plain(line) for group in (project["dependencies"], *project["optional-dependencies"].values()) for line in group}
    pinned = {plain(line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()}
    assert len(wanted) > 10
    assert not wanted - pinned


def test_make_bench_lists_the_benchmarks_where_it_knows_none_of_that_name(tmp_path: Path) -> None:
    (tmp_path / ".installed").touch()
    done = subprocess.run(
        ["make", "bench", "BENCH=nothing", f"VENV={tmp_path}", "SYSTEM_TORCH="], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    known = re.search(r"error: no benchmark is named 'nothing'; known: (.*)", done.stderr)
    assert known is not None, done.stderr
    listed = set(known[1].split())
    bench = ROOT / "tests" / "bench"
    recorded = {name for path in (bench / "baselines").glob("*.json") if (bench / f"{(name := path.name.partition('-')[0])}.py").exists()}
    assert len(recorded) > 9 and recorded <= listed, recorded - listed
    assert not listed & {"record", "loads", "scripted_engine"}
