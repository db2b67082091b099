"""Causal attention of packed prompt chunks over pages, of fixed shape so that a CUDA graph can hold it.

A chunk is some new tokens of one sequence; their keys and values and all before them (cached prefix, earlier chunks) are in
the store already. Chunks are cut into blocks of at most `block_m` tokens (`cut_blocks`), and one program attends with a
block's tokens and `fold` query heads of one kv head, its rows being tokens x heads. Every length is read on the device; an
entry without tokens ends its program at once. Rows of q that belong to no block are neither read nor written: the caller
zeroes the output once. With a workspace the keys of a block are split among programs, for launches of few blocks over many
keys; the last to arrive merges them in their order.

Invariant: keys are visited in blocks that begin at multiples of `block_n`, and a hidden key adds an exact zero. So a token's bits
never depend on other chunks, and without splits nor on how its sequence was cut. Values beyond a block's last token are never used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a block is computed: query heads of a program, keys read at a time, warps, and stages of the loads' pipeline."""

    fold: int
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2


def pick_tiling(head_dim: int, share: int, block_m: int, dtype: torch.dtype) -> Tiling:
    """Return the tiling for D, g = H / K and tokens per block: as many query heads in a program as 64 rows hold.

    64 rows are one warp group's product; two such programs share a multiprocessor and hide each other's waits.
    """
    if dtype == torch.float32:
        return Tiling(fold=1, block_n=32, num_warps=8, num_stages=1)
    fold = max(size for size in range(1, share + 1) if share % size == 0 and (size == 1 or size * block_m <= 64))
    return Tiling(fold=fold, num_warps=4 if fold * block_m <= 64 else 8, num_stages=3 if head_dim <= 128 else 2)


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Partial results of the splits of one launch, reused by the next.

    Shapes: `partials` [NB, H * M, S, D] and `states` [NB, H * M, S, 2] (maximum, sum) float32 as memory, where M is the rows a program has
    for each query head; `arrivals` [NB, H] int32, zero between launches. Larger ones serve smaller launches of as many splits. A split
    has at least `least_keys` keys.
    """

    splits: int
    least_keys: int
    partials: torch.Tensor
    states: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(
        cls, *, num_blocks: int, block_m: int, num_heads: int, head_dim: int, splits: int, device: torch.device, least_keys: int = 256
    ) -> SplitWorkspace:
        """Allocate for launches of `num_blocks` entries whose keys are split in at most `splits` parts."""
        # A program's rows are rounded up to a power of two.
        rows = num_blocks * num_heads * max(2 * block_m, 16)
        return cls(
            splits,
            least_keys,
            torch.empty(rows * splits * head_dim, device=device),
            torch.empty(rows * splits * 2, device=device),
            torch.zeros(num_blocks * num_heads, dtype=torch.int32, device=device),
        )


def cut_blocks(starts: np.ndarray, counts: np.ndarray, page_offsets: np.ndarray, block_m: int) -> np.ndarray:
    """Return the entries of packed chunks, those that read most keys first. Shapes: [C] each, result int32 [n, 4].

    Chunk i holds positions starts[i]..starts[i] + counts[i] - 1 and follows chunk i - 1 in the packed tokens; its sequence's pages
    begin at page_offsets[i]. An entry is (first packed token, tokens, position of the first, page offset).
    """
    starts, counts, page_offsets = (np.asarray(given, dtype=np.int64) for given in (starts, counts, page_offsets))
    parts = -(-counts // block_m)
    chunk = np.repeat(np.arange(counts.size), parts)
    before = (np.arange(chunk.size) - np.repeat(np.cumsum(parts) - parts, parts)) * block_m
    first = (np.cumsum(counts) - counts)[chunk] + before
    tokens = np.minimum(counts[chunk] - before, block_m)
    position = starts[chunk] + before
    entries = np.stack((first, tokens, position, page_offsets[chunk]), axis=1).astype(np.int32)
    return entries[np.argsort(-(position + tokens), kind="stable")]


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    block_m: int = 64,
    pdl: bool = False,
    workspace: SplitWorkspace | None = None,
    tiling: Tiling | None = None,
) -> None:
    """Attend with packed tokens to all positions up to their own, or to the last `window` of them.

    Shapes: `q` and `out` [T, H, D]; `keys` and `values` [N, G, K, D] in any equal strides with D contiguous; `blocks` int32 [NB, 4]
    (`cut_blocks`; zero tokens mark an unused entry), none of more than `block_m` tokens; `pages` int32 [M].
    Mutates: the rows of `out` that belong to a block; others keep what they hold. Also `workspace`.
    """
    _, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = keys.shape
    share = num_heads // num_kv_heads
    assert q.shape == out.shape and q.is_contiguous() and out.is_contiguous(), f"q has shape {tuple(q.shape)}, out {tuple(out.shape)}"
    assert num_heads == share * num_kv_heads and keys.shape == values.shape and keys.shape[3] == head_dim, f"{keys.shape=} for {q.shape=}"
    assert q.dtype == keys.dtype == values.dtype == out.dtype, f"q is {q.dtype}, keys are {keys.dtype}"
    assert head_dim & (head_dim - 1) == 0 and page_size & (page_size - 1) == 0, f"D={head_dim} and G={page_size} must be powers of two"
    assert keys.stride() == values.stride() and keys.stride(3) == 1, "keys and values need equal strides with D contiguous"
    assert blocks.shape[1:] == (4,) and blocks.is_contiguous() and blocks.dtype == torch.int32, f"blocks have shape {tuple(blocks.shape)}"
    assert pages.is_contiguous() and pages.dtype == torch.int32, "pages must be contiguous int32"
    assert scale > 0, f"scale={scale} must be positive: the largest score is found before scaling"
    tiling = pick_tiling(head_dim, share, block_m, q.dtype) if tiling is None else tiling
    assert share % tiling.fold == 0, f"{tiling.fold} query heads of a program do not divide the {share} of a kv head"
    rows, groups = max(triton.next_power_of_2(block_m * tiling.fold), 16), num_heads // tiling.fold
    splits, least, partials, states, arrivals = 1, 1, None, None, None
    if workspace is not None:
        splits, least = workspace.splits, -(-workspace.least_keys // tiling.block_n)
        partials, states, arrivals = workspace.partials, workspace.states, workspace.arrivals
        needed = blocks.shape[0] * groups * splits * rows
        assert states.numel() >= 2 * needed and partials.numel() >= needed * head_dim and arrivals.numel() >= blocks.shape[0] * groups, (
            f"the workspace is too small for {blocks.shape[0]} blocks of {rows} rows in {splits} splits"
        )
    prefill_kernel[(groups, blocks.shape[0], splits)](
        q, keys, values, blocks, pages, out, partials, states, arrivals, scale * LOG2E, keys.stride(0), keys.stride(1), keys.stride(2),
        H=num_heads, SHARE=share, FOLD=tiling.fold, G=page_size, D=head_dim, ROWS=rows, BLOCK_N=tiling.block_n, WINDOW=window,
        SPLITS=splits, LEAST=least, STAGES=tiling.num_stages, PDL=pdl,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _load_pages(table, start, end, key, G: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of the keys at `start`: a scalar within one page, else one for each key."""
    if BLOCK_N <= G:
        page = tl.load(table + start // G, mask=start < end, other=0)
    else:
        page = tl.load(table + (start + key) // G, mask=start + key < end, other=0)
    return page


@triton.jit
def _attend(
    query, keys, values, table, start, position, begin, stop, end, scale, stride_page, stride_token,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return the rows' state (maximum, sum, weighted values) over the keys of [begin, stop) that are before `end`."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    key = tl.arange(0, BLOCK_N)
    column = tl.arange(0, D)[None, :]
    # Carried from block to block: a load of it in the loop would take half of the stages from keys and values.
    page = _load_pages(table, begin, end, key, G, BLOCK_N)
    for at in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        base = page.to(tl.int64) * stride_page
        if BLOCK_N <= G:
            source = base + (at % G) * stride_token + (key[:, None] * stride_token + column)
        else:
            source = (base + ((at + key) % G) * stride_token)[:, None] + column
        page = _load_pages(table, at + BLOCK_N, end, key, G, BLOCK_N)
        written = (at + key < end)[:, None]
        k = tl.load(keys + source, mask=written, other=0.0)
        v = tl.load(values + source, mask=written, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        partly = at + BLOCK_N > start + 1
        if WINDOW > 0:
            partly |= at < end - WINDOW
        if partly:
            hidden = (at + key)[None, :] > position[:, None]
            if WINDOW > 0:
                hidden |= (at + key)[None, :] <= position[:, None] - WINDOW
            scores = tl.where(hidden, float("-inf"), scores)
        m_new = tl.maximum(m, tl.max(scores, 1) * scale)
        if WINDOW > 0 or SPLITS > 1:
            # A row may have seen nothing yet.
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            shift = m_new
        alpha = tl.exp2(m - shift)
        p = tl.exp2(scores * scale - shift[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return m, total, acc


@triton.jit
def _merge(partials, states, first_part, parts, ROWS: tl.constexpr, D: tl.constexpr):
    """Return the sum and the weighted values of all splits of a program's rows, taken in their order."""
    row = tl.arange(0, ROWS)
    place = row[:, None] * D + tl.arange(0, D)[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for part in range(first_part, first_part + parts):
        # Other programs wrote these during this launch: past the first cache, which may hold older lines.
        maximum = tl.load(states + part * (2 * ROWS) + row, cache_modifier=".cg")
        own = tl.load(states + part * (2 * ROWS) + ROWS + row, cache_modifier=".cg")
        side = tl.load(partials + part * (ROWS * D) + place, cache_modifier=".cg")
        m_new = tl.maximum(m, maximum)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - shift)
        weight = tl.exp2(maximum - shift)
        total = total * alpha + own * weight
        acc = acc * alpha[:, None] + side * weight[:, None]
        m = m_new
    return total, acc


@triton.jit(do_not_specialize_on_alignment=["blocks", "pages"])
def prefill_kernel(
    q, keys, values, blocks, pages, out, partials, states, arrivals, scale, stride_page, stride_token, stride_head,
    H: tl.constexpr, SHARE: tl.constexpr, FOLD: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with FOLD query heads of one block's tokens. Heads are neighbours in the grid, since their keys are in the store."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    entry = blocks + tl.program_id(1) * 4
    count = tl.load(entry + 1)
    start = tl.load(entry + 2)
    end = start + count
    begin = start * 0
    if WINDOW > 0:
        begin = tl.maximum(start + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    stop = end
    parts = tl.where(count > 0, 1, 0)
    if SPLITS > 1:
        num_blocks = (end - begin + BLOCK_N - 1) // BLOCK_N
        each = tl.maximum((num_blocks + SPLITS - 1) // SPLITS, LEAST)
        parts = tl.where(count > 0, (num_blocks + each - 1) // each, 0)
        begin += tl.program_id(2) * each * BLOCK_N
        stop = tl.minimum(begin + each * BLOCK_N, end)
    if tl.program_id(2) < parts:
        head = tl.program_id(0) * FOLD
        kv_offset = (head // SHARE).to(tl.int64) * stride_head
        row = tl.arange(0, ROWS)
        packed = tl.load(entry).to(tl.int64) * (H * D) + head * D
        place = ((row // FOLD) * (H * D) + (row % FOLD) * D)[:, None] + tl.arange(0, D)[None, :]
        present = row < count * FOLD
        query = tl.load(q + packed + place, mask=present[:, None], other=0.0)
        m, total, acc = _attend(
            query, keys + kv_offset, values + kv_offset, pages + tl.load(entry + 3), start, start + row // FOLD, begin, stop, end,
            scale, stride_page, stride_token, G, D, ROWS, BLOCK_N, WINDOW, SPLITS, STAGES,
        )  # fmt: skip
        last = parts == 1
        if SPLITS > 1:
            if parts > 1:
                program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
                first_part = program.to(tl.int64) * SPLITS
                part = first_part + tl.program_id(2)
                tl.store(partials + part * (ROWS * D) + row[:, None] * D + tl.arange(0, D)[None, :], acc)
                tl.store(states + part * (2 * ROWS) + row, m)
                tl.store(states + part * (2 * ROWS) + ROWS + row, total)
                # All threads' stores precede the one that counts; its acquire and the broadcast order the reads below.
                tl.debug_barrier()
                last = tl.atomic_add(arrivals + program, 1, sem="acq_rel", scope="gpu") == parts - 1
                if last:
                    total, acc = _merge(partials, states, first_part, parts, ROWS, D)
                    tl.store(arrivals + program, 0)
        if last:
            result = acc / tl.where(present, total, 1.0)[:, None]
            tl.store(out + packed + place, result.to(out.dtype.element_ty), mask=present[:, None])
