"""Times of the row and sampler kernels, beside plain torch reductions over the same logits.

Timed: one captured graph of launches that rotate over logits of more than twice the L2, the median of its replays over the
launches; "pdl" is all of a draw with programmatic launch, then each kernel alone. Not timed: compiling, which
subprocesses do first, side by side, into Triton's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton

from areno.decode.deltas import DeltaPacker
from areno.decode.tables import DecodeTables
from areno.kernels.filters import FilterWorkspace, find_thresholds
from areno.kernels.reduce import FIELDS, Draw, Splits, reduce_logits
from areno.kernels.rows import LaneBuffers, apply_deltas, begin_step, pack_slot, slot_words
from areno.kernels.sample import finish
from areno.sampling.penalties import SlotTables
from areno.sampling.slot_content import SlotContent
from areno.sampling.variant import Variant
from tests.gpu.graph_time import time_graph

VOCAB, NUM_VALID, ROWS = 151_936, 151_669, 256
POOL_ROWS = 512
LANES = (1, 8, 64, 256)
COMPILERS = 12
KINDS: dict[str, tuple[Variant, bool]] = {
    "plain": (Variant(noise=True), True),
    "temperature": (Variant(noise=True, temperature=True), True),
    "no sums": (Variant(noise=True, temperature=True), False),
    "greedy no sums": (Variant(), False),
    "slots": (Variant(noise=True, temperature=True, slots=True), True),
    "filters": (Variant(noise=True, temperature=True, filters=True), True),
}
# (ids of a tile, warps, programs, registers) beside the table's own, by lanes
GRIDS: dict[int, list[tuple[int, int, int, int]]] = {
    1: [(512, 4, 320, 128), (1024, 4, 160, 128), (2048, 4, 80, 128), (2048, 8, 80, 96)],
    8: [(1024, 4, 528, 128), (1024, 4, 1200, 128), (2048, 4, 320, 128), (2048, 8, 320, 96)],
    64: [(1024, 4, 1200, 96), (2048, 4, 640, 96), (2048, 4, 1200, 96), (2048, 4, 528, 128), (4096, 8, 320, 96)],
    256: [(2048, 4, 640, 96), (2048, 4, 1280, 96), (2048, 4, 512, 128), (2048, 4, 2560, 128), (4096, 8, 256, 96), (4096, 8, 512, 128)],
}
TUNED = ("plain", "temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One draw to time: its kind, lanes and cut (None: the table's)."""

    kind: str
    lanes: int
    splits: Splits | None = None

    @property
    def config(self) -> str:
        cut = self.splits or Splits.of(self.lanes, VOCAB)
        registers = f" r{cut.registers}"
        return f"{'' if self.splits else '*'}b{cut.block} w{cut.warps} {cut.splits} x {cut.tiles}{registers}"


def all_cases(*, grid: bool) -> list[Case]:
    """Return the table's cut for every kind and size, and with `grid` other cuts for those that are tuned."""
    cases = [Case(kind=kind, lanes=lanes) for lanes in LANES for kind in KINDS]
    for lanes, cuts in GRIDS.items() if grid else ():
        for block, warps, programs, registers in cuts:
            splits = Splits.cut(lanes, VOCAB, block=block, warps=warps, programs=programs, registers=registers, more_registers=registers)
            cases += [Case(kind=kind, lanes=lanes, splits=splits) for kind in TUNED]
    return cases


class Bench:
    """Rows that never end, logits to rotate over and the scratch of all kinds of draw."""

    def __init__(self, pool_rows: int) -> None:
        device = torch.device("cuda")
        self.pool = torch.randn((pool_rows, VOCAB), device=device).mul_(2.5)
        slots = SlotTables(num_slots=32, vocab_size=VOCAB, max_forced=8, device=device)
        self.tables = DecodeTables(num_rows=ROWS, pages_per_row=64, page_size=64, slots=slots, device=device)
        self.tables.state.alive.fill_(True)
        self.tables.state.page_table.fill_(9)
        rng = np.random.default_rng(0)
        slots.fill([(slot, _content(rng)) for slot in range(32)])
        self.lanes = LaneBuffers.allocate(ROWS, device)
        self.lanes.running.fill_(True)
        self.partials = torch.zeros(ROWS * 512 * FIELDS.value, device=device)
        self.filters = FilterWorkspace.allocate(ROWS, VOCAB, device)
        self.ring = torch.zeros((8, 6, ROWS), dtype=torch.int32).pin_memory()
        self.counter = torch.ones((), dtype=torch.int32, device=device)

    def reset(self, kind: str) -> None:
        """Set what the rows ask for. Mutates: the rows."""
        field = self.tables.field
        field("length").fill_(9)
        field("remaining").fill_(1 << 30)
        field("seed").copy_(torch.arange(ROWS))
        field("temperature").fill_(0.0 if kind.startswith("greedy") else 1.0 if kind == "plain" else 0.8)
        field("top_k").fill_(50 if kind == "filters" else 0)
        field("top_p").fill_(0.95 if kind == "filters" else 1.0)
        # One lane in eight holds a slot.
        held = torch.arange(ROWS)
        field("sampling_slot").copy_(torch.where((held % 8 == 0) & (kind == "slots"), held // 8, -1))

    def draw(self, case: Case, index: int) -> Draw:
        """Return the draw of a launch over the pool's next rows."""
        sets = self.pool.shape[0] // case.lanes
        place = index % sets * case.lanes
        variant, sums = KINDS[case.kind]
        return Draw(
            lanes=case.lanes,
            logits=self.pool[place : place + case.lanes],
            state=self.tables.state,
            slots=self.tables.slots,
            variant=variant,
            num_valid_ids=NUM_VALID,
            sums=sums,
            running=self.lanes.running,
            starved=self.lanes.starved,
        )

    def reduce(self, case: Case, index: int, *, pdl: bool = False) -> Splits:
        draw = self.draw(case, index)
        thresholds = self.filters.thresholds if draw.variant.filters else None
        return reduce_logits(draw, self.partials, thresholds, splits=case.splits, pdl=pdl)

    def finish(self, case: Case, index: int, *, pdl: bool = False) -> None:
        finish(
            self.draw(case, index), self.partials, (case.splits or Splits.of(case.lanes, VOCAB)).splits, self.ring, self.counter, pdl=pdl
        )

    def filter(self, case: Case, index: int, *, pdl: bool = False) -> None:
        if KINDS[case.kind][0].filters:
            find_thresholds(self.draw(case, index), self.filters, self.counter, pdl=pdl)

    def whole(self, case: Case, index: int, *, pdl: bool = False) -> None:
        self.filter(case, index, pdl=pdl)
        self.reduce(case, index, pdl=pdl)
        self.finish(case, index, pdl=pdl)


def _content(rng: np.random.Generator) -> SlotContent:
    return SlotContent(
        forced_ids=np.zeros(0, dtype=np.int64),
        bias_ids=rng.permutation(VOCAB)[:20],
        bias_values=rng.normal(size=20),
        repetition=1.1,
        presence=0.1,
        frequency=0.1,
        prompt_ids=rng.integers(0, VOCAB, 500),
        output_ids=rng.integers(0, VOCAB, 100),
    )


def compile_share(share: int, count: int, *, grid: bool) -> None:
    """Launch every `count`-th case once, with and without programmatic launch, which leaves its kernels in Triton's cache."""
    bench = Bench(ROWS)
    for case in all_cases(grid=grid)[share::count]:
        bench.reset(case.kind)
        for pdl in (False, True) if case.splits is None else (True,):
            bench.whole(case, 0, pdl=pdl)
    torch.cuda.synchronize()


def start_compiling(*, grid: bool) -> list[subprocess.Popen[bytes]]:
    """Start to compile side by side, in processes of their own."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.gpu.check_rows", *(["--grid"] if grid else []), "--compile"]
    return [subprocess.Popen([*command, str(share), str(COMPILERS)], cwd=root, env=environment) for share in range(COMPILERS)]


def finish_compiling(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for them."""
    failed = [process.args for process in processes if process.wait()]
    assert not failed, f"compiling failed in {failed}"


def time_draws(bench: Bench, *, grid: bool) -> Iterator[dict]:
    """Time every case: the whole draw, with programmatic launch, and for the table's cuts each kernel alone."""
    for case in all_cases(grid=grid):
        bench.reset(case.kind)
        launches = max(8, min(128, POOL_ROWS // case.lanes))
        traffic = case.lanes * VOCAB * 4
        row: dict = {"name": case.kind, "lanes": case.lanes, "config": case.config}
        row["pdl_us"] = time_graph(partial(bench.whole, case, pdl=True), launches)
        if case.splits is None:
            row["us"] = time_graph(partial(bench.whole, case), launches)
            row["reduce_us"] = time_graph(partial(bench.reduce, case), launches)
            row["finish_us"] = time_graph(partial(bench.finish, case), launches)
            if KINDS[case.kind][0].filters:
                row["filter_us"] = time_graph(partial(bench.filter, case), launches)
        row["tb_per_s"] = traffic / row["pdl_us"] / 1e6
        yield row


def time_torch(bench: Bench) -> Iterator[dict]:
    """Time what torch needs for the sums and a greedy id alone: logsumexp and argmax."""
    for lanes in LANES:
        sets = bench.pool.shape[0] // lanes

        def step(index: int, lanes: int = lanes, sets: int = sets) -> object:
            logits = bench.pool[index % sets * lanes : index % sets * lanes + lanes]
            return torch.logsumexp(logits, 1), logits.argmax(1)

        us = time_graph(step, max(8, min(128, POOL_ROWS // lanes)))
        yield {"name": "torch logsumexp, argmax", "lanes": lanes, "config": "", "us": us, "tb_per_s": lanes * VOCAB * 4 / us / 1e6}


def _ignoring_index(step: Callable[[], object], index: int) -> object:
    return step()


def time_rows(bench: Bench) -> Iterator[dict]:
    """Time the prologue and delta slots; a slot of 256 operations is far larger than a usual one."""
    state = bench.tables.state
    for hidden in (1024, 4096):
        embedding = torch.randn((VOCAB, hidden), device="cuda").bfloat16()
        for lanes in (1, 256):
            x = torch.zeros((lanes, hidden), device="cuda").bfloat16()
            for pdl in (False, True):
                step = partial(begin_step, state, bench.lanes, bench.counter, embedding, x, page_size=64, pdl=pdl)
                us = time_graph(partial(_ignoring_index, step), 64)
                yield {"name": f"begin step, hidden {hidden}", "lanes": lanes, "config": "pdl" if pdl else "", "us": us}
    for name, rows, pages in (("set", 8, 8), ("set", 256, 8), ("grow", 256, 1)):
        packer = DeltaPacker()
        for row in range(rows):
            if name == "set":
                packer.set_row({"row": row, "temperature": 1.0, "remaining": 1 << 30}, np.arange(2, 2 + pages))
            else:
                packer.grow(row, 0, 3, np.arange(2, 2 + pages))
        slot = packer.take()[0]
        buffer = torch.zeros(slot_words(rows, rows * pages), dtype=torch.int32).pin_memory()
        counts = pack_slot(slot, buffer.numpy())
        us = time_graph(partial(_ignoring_index, partial(apply_deltas, buffer, *counts, state)), 16)
        yield {"name": f"{name}, {pages} pages each", "lanes": rows, "config": "", "us": us}


def timings(*, grid: bool = False) -> list[dict]:
    """Time all, with `grid` other cuts too, and print a table; `*` marks the cut that the kernels' own table chooses."""
    bench = Bench(POOL_ROWS)
    device = torch.cuda.get_device_properties(0)
    print(f"{device.name}, torch {torch.__version__}, triton {triton.__version__}; us per draw, with and without pdl")
    found = []
    for source in (time_torch(bench), time_draws(bench, grid=grid), time_rows(bench)):
        for row in source:
            found.append(row)
            parts = " ".join(f"{name[:-3]} {row[name]:.1f}" for name in ("reduce_us", "finish_us", "filter_us") if name in row)
            pdl = f" pdl {row['pdl_us']:7.2f}" if "pdl_us" in row else ""
            rate = f" {row['tb_per_s']:5.2f} TB/s" if "tb_per_s" in row else ""
            print(f"{row['name']:24} {row['lanes']:4} {row['config']:26} {row.get('us', 0):8.2f}{pdl}{rate} {parts}")
    return found
