"""The few-row products on a card: correctness in bf16 against fp64, and times over a grid of tiles against cuBLAS.

`python -m tests.gpu.check_linear [ROWS ...]` checks, then times (1, 8 and 16 rows unless some are named) and prints a
line for each case: cuBLAS's plain product, the best tiles, the table's own tiles without and with programmatic launch,
the best product after a norm kernel of its own, and the runners-up; then layers of four dependent products by the tables.
Timed: one captured graph of launches rotating over weights of 400 MB and more, the median of its replays over the
launches. Not timed: compiling, which subprocesses do first, side by side, into Triton's cache.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
from torch.nn import functional

from areno.kernels.linear import (
    ResidentTiles,
    RowTiles,
    SplitWorkspace,
    Tiles,
    VectorTiles,
    allocate_workspace,
    fused_norm_gate_up,
    fused_norm_linear,
    linear_add,
)
from areno.kernels.norm import rms_norm
from tests.gpu.graph_time import time_graph
from tests.gpu.linear_cases import CASES, Case, Trial, label, trials

EPS = 1e-6
POOL_ELEMENTS = 650_000_000
ROTATED_BYTES = 400 << 20
TIMED_ROWS = (1, 8, 16)
ONE_ROW = (
    ("norm", 1023, ResidentTiles(4)),
    ("head", 40001, ResidentTiles(4)),
    ("glu", 2 * 2051, ResidentTiles(2, num_stages=4)),
    ("add", 1023, ResidentTiles(2, num_stages=4)),
    ("add", 1023, VectorTiles(1, 1024)),
)


def launch(
    case: Case,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: SplitWorkspace,
    tiles: Tiles | None,
    *,
    pdl: bool,
    bare: bool = False,
) -> None:
    """Launch the product of one case; a bare one has no norm."""
    if case.kind == "add":
        linear_add(x, weight, None, out, workspace=workspace, tiles=tiles, pdl=pdl)
    else:
        product = fused_norm_gate_up if case.kind == "glu" else fused_norm_linear
        product(x, None if bare else norm_weight, EPS, weight, None, out, workspace=workspace, tiles=tiles, pdl=pdl)


def attempt(
    case: Case,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    normed: torch.Tensor,
    workspace: SplitWorkspace,
    trial: Trial,
) -> None:
    """Launch what `trial` says; `normed` is memory like x for a norm of its own."""
    if trial.apart:
        rms_norm(x, norm_weight, EPS, normed, pdl=trial.pdl)
    source = normed if trial.apart else x
    launch(case, source, norm_weight, weight, out, workspace, trial.tiles, pdl=trial.pdl, bare=trial.apart)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(scale).bfloat16()


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def check_one(case: Case, rows: int, bias: bool, tiles: Tiles | None, workspace: SplitWorkspace) -> dict:
    """Compare one product with fp64, and its error with that of the same operations in plain torch."""
    x, weight = normal(rows, case.in_size), normal(case.num_weight_rows, case.in_size, scale=case.in_size**-0.5)
    norm_weight = None if case.kind == "add" else normal(case.in_size)
    bias_N = normal(case.num_weight_rows) if bias else None
    residual = normal(rows, case.num_out)
    guarded = torch.full((rows + 1, case.num_out + 16), torch.nan, device="cuda", dtype=case.out_dtype)
    out = guarded[:rows, : case.num_out]
    plain, exact = x, x.double()
    if norm_weight is not None:
        plain = functional.rms_norm(x, (case.in_size,), None, EPS).mul_(norm_weight)
        exact = exact / torch.sqrt(exact.square().mean(-1, keepdim=True) + EPS) * norm_weight.double()
    plain = functional.linear(plain, weight, bias_N)
    exact = functional.linear(exact, weight.double(), None if bias_N is None else bias_N.double())
    workspace.partials.fill_(torch.nan)
    if case.kind == "add":
        out.copy_(residual)
        plain, exact = residual + plain, residual.double() + exact
        linear_add(x, weight, bias_N, out, workspace=workspace, tiles=tiles)
    elif case.kind == "glu":
        plain = functional.silu(plain[:, : case.num_out]) * plain[:, case.num_out :]
        exact = functional.silu(exact[:, : case.num_out]) * exact[:, case.num_out :]
        fused_norm_gate_up(x, norm_weight, EPS, weight, bias_N, out, workspace=workspace, tiles=tiles)
    else:
        fused_norm_linear(x, norm_weight, EPS, weight, bias_N, out, workspace=workspace, tiles=tiles)
    error, plain_error = relative(out, exact), relative(plain, exact)
    where = f"{case} rows={rows} bias={bias} tiles={tiles}: error {error:.2e}, plain torch {plain_error:.2e}"
    assert error <= 1.05 * plain_error + 1e-5, where
    assert guarded[rows].isnan().all() and guarded[:, case.num_out :].isnan().all(), f"wrote outside: {where}"
    assert not workspace.arrivals.any(), f"left arrivals: {where}"
    return {"name": case.name, "rows": rows, "bias": bias, "error": error, "plain_error": plain_error}


def check_split_is_steady(workspace: SplitWorkspace) -> None:
    """Run split products 20 times over poisoned partials and compare all bits."""
    for case, tiles in ((CASES[6], RowTiles(64, 128, split=4)), (CASES[5], RowTiles(64, 128, split=2))):
        x, norm_weight, weight = normal(8, case.in_size), normal(case.in_size), normal(case.num_weight_rows, case.in_size)
        residual, first = normal(8, case.num_out), None
        for _ in range(20):
            workspace.partials.fill_(torch.nan)
            out = residual.clone()
            launch(case, x, norm_weight, weight, out, workspace, tiles, pdl=False)
            first = out if first is None else first
            assert torch.equal(out, first), f"{case}: {int((out != first).sum())} elements differ between runs"


class Layers:
    """Layers of four dependent products, each with weights of its own cut from `pool`."""

    def __init__(self, cases: Sequence[Case], rows: int, num_layers: int, pool: torch.Tensor, workspace: SplitWorkspace) -> None:
        self._cases = cases
        qkv, output, gate_up, _ = cases
        sizes = [case.num_weight_rows * case.in_size for case in cases] * num_layers
        parts = pool[: sum(sizes)].split(sizes)
        self._weights = [part.view(case.num_weight_rows, case.in_size) for case, part in zip(itertools.cycle(cases), parts)]
        self._workspace = workspace
        self.start, self._norm_weight = normal(rows, qkv.in_size), normal(qkv.in_size)
        self.residual, self._qkv, self._gated = self.start.clone(), normal(rows, qkv.num_out), normal(rows, gate_up.num_out)
        attended = self._qkv[:, : output.in_size]
        self._ends = ((self.residual, self._qkv), (attended, self.residual), (self.residual, self._gated), (self._gated, self.residual))

    def poison(self) -> None:
        for buffer in (self.residual, self._qkv, self._gated):
            buffer.fill_(torch.nan)

    def step(self, pdl: bool, _index: int = 0) -> None:
        torch.mul(self.start, 1.0, out=self.residual)
        for case, weight, (source, target) in zip(itertools.cycle(self._cases), self._weights, itertools.cycle(self._ends)):
            launch(case, source, self._norm_weight, weight, target, self._workspace, None, pdl=pdl)


def check_programmatic_chain(cases: Sequence[Case], rows: int, workspace: SplitWorkspace) -> None:
    """Replay layers of dependent products with programmatic launch and compare all bits with plain launches."""
    elements = sum(case.num_weight_rows * case.in_size for case in cases)
    layers = Layers(cases, rows, 2, normal(2 * elements, scale=0.02), workspace)
    layers.step(False)
    expected = layers.residual.clone()
    layers.step(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.step(True)
    for _ in range(20):
        layers.poison()
        graph.replay()
        differ = int((layers.residual != expected).sum())
        assert not differ, f"{cases[0].name}, {rows} rows: {differ} elements differ under programmatic launch"
    assert expected.isfinite().all()


def check() -> list[dict]:
    """Check random and target shapes, run-to-run bits of split products, and programmatic launch. Raises: AssertionError."""
    torch.manual_seed(0)
    workspace = allocate_workspace(torch.device("cuda"))
    results = []
    for index, rows in enumerate((1, 2, 7, 24, 64)):
        for offset, kind in enumerate(("norm", "add", "glu", "head")):
            num_out, in_size = ((257, 1040), (1023, 2064), (2050, 1024))[(index + offset) % 3]
            case = Case("random", kind, num_out * (2 if kind == "glu" else 1), in_size)
            results.append(check_one(case, rows, index % 2 == 0, None, workspace))
    for kind, num_weight_rows, tiles in ONE_ROW:
        results.append(check_one(Case("one row", kind, num_weight_rows, 2064), 1, True, tiles, workspace))
    for case in CASES:
        if case.kind != "head":
            results += [check_one(case, rows, False, None, workspace) for rows in (1, 8, 16)]
    check_split_is_steady(workspace)
    for cases, rows in itertools.product((CASES[:4], CASES[5:9]), (1, 8, 16)):
        check_programmatic_chain(cases, rows, workspace)
    return results


def time_case(case: Case, rows: int, pool: torch.Tensor, workspace: SplitWorkspace) -> list[dict]:
    """Time every trial of one case. Returns a row for each."""
    size = case.num_weight_rows * case.in_size
    sets = min(pool.numel() // size, triton.cdiv(ROTATED_BYTES, 2 * size))
    weights = [pool[index * size : (index + 1) * size].view(case.num_weight_rows, case.in_size) for index in range(sets)]
    launches = max(sets, 3) if size > 1 << 24 else 2 * sets
    x, norm_weight = normal(rows, case.in_size), normal(case.in_size)
    out = torch.zeros(rows, case.num_out, device="cuda", dtype=case.out_dtype)
    normed = torch.empty_like(x)

    def measure(trial: Trial) -> float:
        return time_graph(lambda index: attempt(case, x, norm_weight, weights[index % sets], out, normed, workspace, trial), launches)

    def plain(index: int) -> torch.Tensor:
        weight = weights[index % sets]
        return torch.mm(x, weight.t(), out_dtype=torch.float32) if case.kind == "head" else functional.linear(x, weight)

    cublas_us = time_graph(plain, launches)
    shared = {"name": case.name, "rows": rows, "shape": (case.num_weight_rows, case.in_size), "cublas_us": cublas_us}
    timed = []
    for trial in trials(case, rows):
        try:
            us = measure(trial)
        except triton.runtime.errors.OutOfResources as error:
            print(f"{case.name} rows={rows} {label(trial)}: {error}")
            continue
        shown = {"config": label(trial), "pdl": trial.pdl, "apart": trial.apart}
        timed.append({**shared, **shown, "us": us, "tb_per_s": case.traffic(rows) / us / 1e6})
    return timed


def time_layers(rows: int, pool: torch.Tensor, workspace: SplitWorkspace) -> list[dict]:
    """Time layers of four dependent products by the tables' tiles, without and with programmatic launch."""
    rows_out = []
    for cases in (CASES[:4], CASES[5:9]):
        num_layers = min(28, pool.numel() // sum(case.num_weight_rows * case.in_size for case in cases))
        layers = Layers(cases, rows, num_layers, pool, workspace)
        for pdl in (False, True):
            us = time_graph(functools.partial(layers.step, pdl), 1) / num_layers
            rows_out.append({"name": f"{cases[0].name.split()[0]} layer", "rows": rows, "pdl": pdl, "us": us})
    return rows_out


def compile_share(index: int, count: int, row_counts: tuple[int, ...]) -> None:
    """Launch every `count`-th trial once, so that its kernels are in Triton's cache on disk."""
    workspace = allocate_workspace(torch.device("cuda"))
    pool = torch.empty(POOL_ELEMENTS, device="cuda", dtype=torch.bfloat16)
    every = [(case, rows, trial) for rows in row_counts for case in CASES for trial in trials(case, rows)]
    for case, rows, trial in every[index::count]:
        weight = pool[: case.num_weight_rows * case.in_size].view(case.num_weight_rows, case.in_size)
        x, out = normal(rows, case.in_size), torch.zeros(rows, case.num_out, device="cuda", dtype=case.out_dtype)
        try:
            attempt(case, x, normal(case.in_size), weight, out, torch.empty_like(x), workspace, trial)
        except triton.runtime.errors.OutOfResources:
            continue
    torch.cuda.synchronize()


@functools.cache
def compile_all(row_counts: tuple[int, ...]) -> None:
    """Compile what `timings` needs in several processes. Blocks: until all have ended."""
    count = min(12, os.cpu_count() or 1)
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-m", "tests.gpu.check_linear", "--compile", str(count), *map(str, row_counts)]
    workers = [subprocess.Popen([*argv, "--share", str(index)], cwd=root) for index in range(count)]
    codes = [worker.wait() for worker in workers]
    assert not any(codes), f"compiling processes ended with {codes}"


def timings(row_counts: tuple[int, ...] = TIMED_ROWS) -> list[dict]:
    """Time all cases, print one line for each, then layers. Blocks: about half a minute."""
    compile_all(row_counts)
    torch.manual_seed(0)
    workspace = allocate_workspace(torch.device("cuda"))
    pool = torch.empty(POOL_ELEMENTS, device="cuda", dtype=torch.bfloat16).normal_()
    rows_out = []
    print("case         rows cublas |  best us TB/s config         | table's tiles: us, late | norm apart: us, config | runners-up")
    for rows in row_counts:
        for case in CASES:
            timed = time_case(case, rows, pool, workspace)
            rows_out += timed
            print(line(case, rows, timed))
    for rows in row_counts:
        timed = time_layers(rows, pool, workspace)
        rows_out += timed
        print("; ".join(f"{row['name']} {rows} rows{' late' if row['pdl'] else ''} {row['us']:.1f} us" for row in timed))
    return rows_out


def line(case: Case, rows: int, timed: list[dict]) -> str:
    """Return the printed line of one case."""
    default = label(trials(case, rows)[0])
    own = {row["config"]: row["us"] for row in timed if not row["apart"]}
    best, *rest = sorted((row for row in timed if not row["pdl"] and not row["apart"]), key=lambda row: row["us"])
    apart = min((row for row in timed if row["apart"]), key=lambda row: row["us"], default=None)
    others = "; ".join(f"{row['config']} {row['us']:.1f}" for row in rest[:4])
    return (
        f"{case.name:12} {rows:3} {best['cublas_us']:7.1f} | {best['us']:7.1f} {best['tb_per_s']:5.2f} {best['config']:16}"
        f" | {own.get(default, 0):.1f} {own.get(default + ' late', 0):.1f} {default}"
        f" | {'-' if apart is None else '{us:.1f} {config}'.format(**apart)}"
        f" | {others}"
    )


def main() -> None:
    arguments = sys.argv[1:]
    if "--compile" in arguments:
        share = int(arguments[arguments.index("--share") + 1])
        count, *shared = (int(word) for word in arguments[1 : arguments.index("--share")])
        compile_share(share, count, tuple(shared))
        return
    row_counts = tuple(int(word) for word in arguments) or TIMED_ROWS
    compile_all(row_counts)
    results = check()
    print(f"check_linear: {len(results)} products right, largest error {max(row['error'] for row in results):.1e}")
    timings(row_counts)


if __name__ == "__main__":
    main()
