"""Random rows over scattered pages for the attention checks on a card, and what plain torch says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from areno.kernels.attention import (
    PROGRAMS_PER_PROCESSOR,
    TILING,
    Tiling,
    WorkList,
    Workspace,
    build_work_list,
    decode_attention,
    decode_attention_fused,
)

CUDA = torch.device("cuda")
PAGE = 64


def programs() -> int:
    """Return how many programs walk over a work list."""
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(0).multi_processor_count


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).bfloat16()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one step and their store. Shapes: `q` [B, H, D], store [N, G, K, D], `table` [B, P] int32, `lengths` int32 [B]."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    running: torch.Tensor

    def pick(self, *rows: int) -> Rows:
        """Return some of the rows over the same store."""
        index = torch.tensor(rows, device=CUDA)
        return replace(self, q=self.q[index], table=self.table[index], lengths=self.lengths[index], running=self.running[index])

    @property
    def traffic(self) -> int:
        """Bytes of keys and values that a launch must read."""
        return 2 * int(self.lengths.sum()) * self.keys.shape[2] * self.keys.shape[3] * self.keys.element_size()


def allocate_store(pages: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random keys and values with a zero page 0."""
    keys, values = (torch.empty(pages, PAGE, kv_heads, dim, device=CUDA, dtype=dtype).normal_() for _ in range(2))
    keys[0], values[0] = 0.0, 0.0
    return keys, values


def place_rows(
    keys: torch.Tensor, values: torch.Tensor, lengths: Sequence[int], heads: int, *, count: int = 1, idle: Sequence[int] = ()
) -> list[Rows]:
    """Return `count` sets of rows of these lengths, each on pages of its own, scattered over the store."""
    width = max(lengths) // PAGE + 2
    needed = [length // PAGE + 1 for length in lengths]
    assert count * sum(needed) + 2 <= keys.shape[0], f"{count * sum(needed)} pages needed, the store has {keys.shape[0]}"
    pages = (torch.randperm(keys.shape[0] - 2, device=CUDA) + 2).to(torch.int32)
    running = torch.tensor([row not in idle for row in range(len(lengths))], device=CUDA, dtype=torch.uint8)
    sets, used = [], 0
    for _ in range(count):
        table = torch.zeros(len(lengths), width, dtype=torch.int32, device=CUDA)
        for row, number in enumerate(needed):
            table[row, :number] = pages[used : used + number]
            used += number
        q = torch.randn(len(lengths), heads, keys.shape[3], device=CUDA).to(keys.dtype)
        lengths_B = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
        sets.append(Rows(q=q, keys=keys, values=values, table=table, lengths=lengths_B, running=running))
    return sets


def poison(rows: Rows, idle: Sequence[int] = ()) -> None:
    """Fill every slot that no running row sees with NaN, page 0 aside. Mutates: the store."""
    seen = torch.zeros(rows.keys.shape[:2], dtype=torch.bool, device=CUDA)
    seen[0] = True
    for row, length in enumerate(rows.lengths.tolist()):
        if row not in idle:
            places = torch.arange(length, device=CUDA)
            seen[rows.table[row, places // PAGE].long(), places % PAGE] = True
    for store in (rows.keys, rows.values):
        store[~seen] = math.nan


def exact(rows: Rows, scale: float, window: int = 0) -> torch.Tensor:
    """Return attention in float64, row by row."""
    share = rows.q.shape[1] // rows.keys.shape[2]
    out = torch.zeros(rows.q.shape, dtype=torch.float64, device=CUDA)
    for row, length in enumerate(rows.lengths.tolist()):
        if not rows.running[row]:
            continue
        places = torch.arange(max(length - window, 0) if window else 0, length, device=CUDA)
        held = rows.table[row, places // PAGE].long(), places % PAGE
        k, v = (store[held].double().repeat_interleave(share, 1) for store in (rows.keys, rows.values))
        weights = (torch.einsum("hd,nhd->hn", rows.q[row].double(), k) * scale).softmax(-1)
        out[row] = torch.einsum("hn,nhd->hd", weights, v)
    return out


def gathered(rows: Rows, scale: float) -> torch.Tensor:
    """Attend in plain torch: gather all pages, mask, one fused attention call."""
    lanes, heads, dim = rows.q.shape
    kv_heads = rows.keys.shape[2]
    k, v = (
        store.index_select(0, rows.table.reshape(-1)).view(lanes, -1, kv_heads, dim).transpose(1, 2) for store in (rows.keys, rows.values)
    )
    mask = (torch.arange(k.shape[2], device=CUDA) < rows.lengths[:, None])[:, None, None]
    q = rows.q.view(lanes, kv_heads, heads // kv_heads, dim)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).view(lanes, heads, dim)


class Attention:
    """Launches attention over rows with one workspace. `listed` walks a work list made at `prepare`."""

    def __init__(self, lanes: int, heads: int, kv_heads: int, dim: int, longest: int, tiling: Tiling = TILING, programs: int = 0) -> None:
        self.tiling, self.chunks, self.programs = tiling, tiling.max_chunks(longest), programs
        self.workspace = Workspace.allocate(
            lanes=lanes, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, chunks=self.chunks, device=CUDA
        )
        self.work = WorkList.allocate(lanes=lanes, chunks=self.chunks, device=CUDA) if programs else None
        self.scale = dim**-0.5

    def prepare(self, rows: Rows, window: int = 0, *, pdl: bool = False) -> None:
        """Make the work list of these rows."""
        if self.work is not None:
            build_work_list(
                rows.lengths, rows.running, self.work, max_chunks=self.chunks, page_size=PAGE, window=window, tiling=self.tiling, pdl=pdl
            )

    def run(self, rows: Rows, out: torch.Tensor, *, window: int = 0, pdl: bool = False) -> None:
        """Attend. Mutates: `out`."""
        decode_attention(
            rows.q,
            rows.keys,
            rows.values,
            rows.table,
            rows.lengths,
            rows.running,
            out,
            self.workspace,
            scale=self.scale,
            max_chunks=self.chunks,
            window=window,
            work=self.work,
            num_programs=self.programs,
            tiling=self.tiling,
            pdl=pdl,
        )

    def run_fused(
        self, rows: Rows, qkv: torch.Tensor, weight: torch.Tensor | None, angles: torch.Tensor, out: torch.Tensor, *, pdl: bool = False
    ) -> None:
        """Norm, rotate, store and attend. Mutates: `out` and the store."""
        decode_attention_fused(
            qkv,
            weight,
            angles,
            rows.keys,
            rows.values,
            rows.table,
            rows.lengths,
            rows.running,
            out,
            self.workspace,
            eps=1e-6,
            scale=self.scale,
            max_chunks=self.chunks,
            work=self.work,
            num_programs=self.programs,
            tiling=self.tiling,
            pdl=pdl,
        )
