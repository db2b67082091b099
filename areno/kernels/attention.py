"""Decode attention over pages: one query token per lane, grouped query heads, a row cut into chunks.

One item of work is (lane, kv head, chunk). How a row is cut, and the order in which its chunks are merged, depend on its
own length alone, so a row's bits are equal in any company. Items reach programs in two ways: a plain grid with a bound
on the chunks of a lane, whose programs beyond a lane's last chunk end at once, or a fixed number of programs that walk
over a work list which `build_work_list` makes once per step for all layers. A row of one chunk writes its output; otherwise
each item leaves a partial result, and the last item of a (lane, kv head) to arrive merges them in the order of chunks
(or `combine` does so in a launch of its own). The count of arrivals is zero again when a launch ends.

A lane that does not run attends to one token of page 0. Tokens at or beyond a row's length are never read. The fused form
takes the layer's raw projection instead of q: every item norms and rotates its query heads, the item of the last chunk also
k, which it stores with v and merges from registers. It is long for a file because the forms share one body.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
# Triton gives a kernel's arguments their types at each launch.

# Triton knows no starred tuples.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areno.kernels.rope_kv import norm_rotate

LOG2E = math.log2(math.e)
COMBINED_AT_ONCE = 8
PROGRAMS_PER_PROCESSOR = 3
MAX_REGISTERS = 168
"""The most with which so many programs of four warps share a multiprocessor."""

CHUNK_BITS = tl.constexpr(16)
CHUNK_MASK = tl.constexpr(0xFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How rows are cut and chunks are computed; one engine keeps to one, since a row's bits depend on it.

    A row is cut into chunks of `short_chunk` tokens; while that makes more than `split` of them, the chunk doubles, up to
    `long_chunk`. A chunk is read `block` tokens at a time. Of a plain grid each program first asks for `prefetch` tokens to
    come to the L2, under programmatic launch while the kernel before it still runs. `dot` takes the matrix units, with the query
    heads of a kv head padded to 16; otherwise products are summed head by head.
    """

    short_chunk: int = 256
    long_chunk: int = 512
    split: int = 2
    block: int = 64
    dot: bool = True
    num_warps: int = 4
    num_stages: int = 3
    prefetch: int = 0

    def __post_init__(self) -> None:
        for name in ("short_chunk", "long_chunk", "block", "prefetch"):
            value = getattr(self, name)
            assert value & (value - 1) == 0, f"{name}={value} is not a power of two"
        assert self.block <= self.short_chunk <= self.long_chunk, "a chunk holds at least one block"

    @property
    def doublings(self) -> int:
        """How often the chunk of a long row may double."""
        return (self.long_chunk // self.short_chunk).bit_length() - 1

    def max_chunks(self, longest: int) -> int:
        """Return the most chunks of a row of at most `longest` tokens."""
        most, size = 1, self.short_chunk
        while longest > self.split * size and size < self.long_chunk:
            most, size = max(most, self.split), size * 2
        return max(most, -(-longest // size))


TILING = Tiling()


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results of the items of one launch, reused by the next.

    Shapes: `partials` [B, K, C, H / K, D] and `states` [B, K, C, 2, H / K] (maximum, sum) float32, `arrivals` [B, K] int32, zero
    between launches. B and C may exceed what a launch needs.
    """

    partials: torch.Tensor
    states: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, *, lanes: int, num_heads: int, num_kv_heads: int, head_dim: int, chunks: int, device: torch.device) -> Workspace:
        """Allocate for `lanes` rows of at most `chunks` chunks each (`Tiling.max_chunks` of the longest)."""
        share = num_heads // num_kv_heads
        shape = (lanes, num_kv_heads, chunks)
        return cls(
            torch.empty((*shape, share, head_dim), device=device),
            torch.empty((*shape, 2, share), device=device),
            torch.zeros((lanes, num_kv_heads), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class WorkList:
    """Chunks of all lanes of a step, long chunks first. Shapes: `items` [B * C] int32 (lane << 16 | chunk), `count` [1] int32."""

    items: torch.Tensor
    count: torch.Tensor

    @classmethod
    def allocate(cls, *, lanes: int, chunks: int, device: torch.device) -> WorkList:
        """Allocate for `lanes` rows of at most `chunks` chunks each."""
        assert lanes <= 1 << 15 and chunks <= 1 << 16, f"{lanes} lanes of {chunks} chunks do not fit an item's 32 bits"
        return cls(
            torch.zeros(lanes * chunks, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


@triton.jit
def _cut(length, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, DOUBLINGS: tl.constexpr, SPLIT: tl.constexpr):
    """Return a row's first block, its tokens per chunk and its number of chunks."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
    span = length - first
    chunk = tl.where(span > 0, SHORT, SHORT)
    for doubling in tl.static_range(DOUBLINGS):
        chunk = tl.where(span > (SPLIT * SHORT << doubling), SHORT << (doubling + 1), chunk)
    return first, chunk, (span + chunk - 1) // chunk


@triton.jit
def _load_pages(table, start, end, row, G: tl.constexpr, BLOCK: tl.constexpr):
    """Return the page of the block at `start`: a scalar within one page, else one for each token."""
    if BLOCK <= G:
        page = tl.load(table + start // G, mask=start < end, other=0)
    else:
        page = tl.load(table + (start + row) // G, mask=start + row < end, other=0)
    return page


@triton.jit
def _block_base(page, running, start, row, stride_page, stride_token, G: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a block's tokens begin in the store: a scalar within one page, else [BLOCK, 1]."""
    base = tl.where(running, page, 0).to(tl.int64) * stride_page
    if BLOCK <= G:
        return base + (start % G) * stride_token
    else:
        return (base + ((start + row) % G) * stride_token)[:, None]


@triton.jit
def _within_block(stride_token, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a block's elements lie from its base on, the same for all blocks."""
    column = tl.arange(0, D)[None, :]
    if BLOCK <= G:
        return tl.arange(0, BLOCK)[:, None] * stride_token + column
    else:
        return column


@triton.jit
def _prefetch(
    keys, values, page_table, lengths, lane, kv_head, index, width, stride_page, stride_token, stride_head,
    G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, DOUBLINGS: tl.constexpr,
    SPLIT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Ask for the first tokens of a chunk to be brought into the L2. It may read the state of the step before: a hint only."""
    length = tl.maximum(tl.load(lengths + lane, volatile=True), 1)
    first, chunk, _ = _cut(length, WINDOW, BLOCK, SHORT, DOUBLINGS, SPLIT)
    begin = first + index * chunk
    if begin < length:
        LINE: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = 1 if D < LINE else D // LINE
        token = tl.minimum(begin + tl.arange(0, TOKENS), length - 1)
        page = tl.load(page_table + lane.to(tl.int64) * width + token // G).to(tl.int64)
        place = (page * stride_page + (token % G) * stride_token + kv_head * stride_head)[:, None] + tl.arange(0, LINES)[None, :] * LINE
        for store in tl.static_range(2):
            address = ((keys if store == 0 else values) + place).to(tl.int64)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _attend_dot(
    q, keys, values, table, running, begin, end, floor, m, total, acc, scale,
    stride_page, stride_token, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Merge tokens [begin, end) that are not below `floor` into the state of all heads, products on the matrix units."""
    row = tl.arange(0, BLOCK)
    # The sum is kept per column of a block, so that only its end crosses warps.
    sums = tl.where(row[None, :] == 0, total[:, None], 0.0)
    # Carried from block to block: a load of it in the loop would take half of the stages from keys and values.
    within = _within_block(stride_token, G, D, BLOCK)
    page = _load_pages(table, begin, end, row, G, BLOCK)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        base = _block_base(page, running, start, row, stride_page, stride_token, G, BLOCK)
        page = _load_pages(table, start + BLOCK, end, row, G, BLOCK)
        token = start + row
        seen = (token >= floor) & (token < end)
        k = tl.load(keys + base + within, mask=seen[:, None], other=0.0)
        v = tl.load(values + base + within, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        sums = sums * alpha[:, None] + p
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return m, tl.sum(sums, 1), acc


@triton.jit
def _attend_plain(
    q, keys, values, table, running, begin, end, floor, m, total, acc, scale,
    stride_page, stride_token, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do as `_attend_dot`, with products summed head by head in fp32."""
    row = tl.arange(0, BLOCK)
    head = tl.arange(0, HEADS)
    maxima, sums, sides, queries = (), (), (), ()
    for h in tl.static_range(SHARE):
        maxima = maxima + (tl.sum(tl.where(head == h, m, 0.0), 0),)
        sums = sums + (tl.where(row == 0, tl.sum(tl.where(head == h, total, 0.0), 0), 0.0),)
        sides = sides + (tl.sum(tl.where(head[:, None] == h, acc, 0.0), 0),)
        queries = queries + (tl.sum(tl.where(head[:, None] == h, q.to(tl.float32), 0.0), 0) * scale,)
    within = _within_block(stride_token, G, D, BLOCK)
    page = _load_pages(table, begin, end, row, G, BLOCK)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        base = _block_base(page, running, start, row, stride_page, stride_token, G, BLOCK)
        page = _load_pages(table, start + BLOCK, end, row, G, BLOCK)
        token = start + row
        seen = (token >= floor) & (token < end)
        k = tl.load(keys + base + within, mask=seen[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + base + within, mask=seen[:, None], other=0.0).to(tl.float32)
        new_maxima, new_sums, new_sides = (), (), ()
        for h in tl.static_range(SHARE):
            scores = tl.where(seen, tl.sum(k * queries[h][None, :], 1), float("-inf"))
            m_new = tl.maximum(maxima[h], tl.max(scores, 0))
            alpha = tl.exp2(maxima[h] - m_new)
            p = tl.exp2(scores - m_new)
            new_maxima = new_maxima + (m_new,)
            new_sums = new_sums + (sums[h] * alpha + p,)
            new_sides = new_sides + (sides[h] * alpha + tl.sum(p[:, None] * v, 0),)
        maxima, sums, sides = new_maxima, new_sums, new_sides
    for h in tl.static_range(SHARE):
        m = tl.where(head == h, maxima[h], m)
        total = tl.where(head == h, tl.sum(sums[h], 0), total)
        acc = tl.where(head[:, None] == h, sides[h][None, :], acc)
    return m, total, acc


@triton.jit
def _combine(
    partials, states, out, lane_head, first_part, parts, D: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Merge the partial results of one (lane, kv head) in the order of chunks and write its output."""
    column = tl.arange(0, D)
    head = tl.arange(0, WIDTH)
    present = head < SHARE
    m = tl.full([WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    acc = tl.zeros([WIDTH, D], tl.float32)
    for start in range(0, parts, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        inside = (part < parts)[:, None] & present[None, :]
        state = states + (first_part + part)[:, None] * (2 * SHARE) + head[None, :]
        # Other programs wrote these during this launch: past the first cache, which may hold older lines.
        maxima = tl.load(state, mask=inside, other=0.0, cache_modifier=".cg")
        sums = tl.load(state + SHARE, mask=inside, other=0.0, cache_modifier=".cg")
        place = ((first_part + part)[:, None, None] * SHARE + head[None, :, None]) * D + column[None, None, :]
        sides = tl.load(partials + place, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        maxima = tl.where((part < parts)[:, None], maxima, float("-inf"))
        m_new = tl.maximum(m, tl.max(maxima, 0))
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(maxima - m_new[None, :])
        total = total * alpha + tl.sum(weight * sums, 0)
        acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * sides, 0)
        m = m_new
    result = acc / tl.where(present, total, 1.0)[:, None]
    place = (lane_head * SHARE + head)[:, None] * D + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=present[:, None])


@triton.jit
def _finish(
    m, total, acc, lane_head, index, parts, out, partials, states, arrivals, max_parts,
    D: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, INLINE: tl.constexpr,
):  # fmt: skip
    """Write the output of a row of one chunk; else leave a partial result, and merge all as the last to arrive."""
    column = tl.arange(0, D)[None, :]
    head = tl.arange(0, HEADS)
    present = head < SHARE
    if parts == 1:
        result = acc / tl.where(present, total, 1.0)[:, None]
        place = (lane_head * SHARE + head)[:, None] * D + column
        tl.store(out + place, result.to(out.dtype.element_ty), mask=present[:, None])
    else:
        first_part = lane_head.to(tl.int64) * max_parts
        part = first_part + index
        tl.store(partials + (part * SHARE + head)[:, None] * D + column, acc, mask=present[:, None])
        tl.store(states + part * (2 * SHARE) + head, m, mask=present)
        tl.store(states + part * (2 * SHARE) + SHARE + head, total, mask=present)
        if INLINE:
            # All threads' stores precede the one that counts; its acquire and the broadcast order the reads below.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + lane_head, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                _combine(partials, states, out, lane_head, first_part, parts, D, SHARE, WIDTH, AT_ONCE)
                tl.store(arrivals + lane_head, 0)


@triton.jit
def _item(
    lane, kv_head, index, q, keys, values, page_table, lengths, running, out, partials, states, arrivals, weight, angles,
    scale, eps, width, max_parts, stride_page, stride_token, stride_head,
    K: tl.constexpr, SHARE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, DOUBLINGS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, AT_ONCE: tl.constexpr, DOT: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr, INLINE: tl.constexpr,
):  # fmt: skip
    """Do chunk `index` of a lane's kv head, or nothing when the row has fewer chunks."""
    runs = tl.load(running + lane) != 0
    length = tl.where(runs, tl.load(lengths + lane), 1)
    first, chunk, parts = _cut(length, WINDOW, BLOCK, SHORT, DOUBLINGS, SPLIT)
    if index < parts:
        floor = length * 0
        if WINDOW > 0:
            floor = tl.maximum(length - WINDOW, 0)
        begin = first + index * chunk
        end = tl.minimum(begin + chunk, length)
        table = page_table + lane.to(tl.int64) * width
        lane_head = lane * K + kv_head
        head = tl.arange(0, HEADS)
        column = tl.arange(0, D)[None, :]
        m = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, D], tl.float32)
        if FUSED:
            row = q + lane.to(tl.int64) * ((SHARE + 2) * K * D)
            angle = angles + (length - 1).to(tl.int64) * (2 * D)
            query = norm_rotate(row, kv_head * SHARE + head, weight, angle, eps, head < SHARE, NORM, D)
            if index == parts - 1:
                only = tl.arange(0, 1)
                new_key = norm_rotate(row, SHARE * K + kv_head + only, weight, angle, eps, only == 0, NORM, D)
                new_value = tl.load(row + (SHARE * K + K + kv_head) * D + column)
                page = tl.load(table + (length - 1) // G).to(tl.int64)
                place = page * stride_page + ((length - 1) % G) * stride_token + kv_head * stride_head + column
                tl.store(keys + place, new_key, mask=runs & (column >= 0))
                tl.store(values + place, new_value, mask=runs & (column >= 0))
                m = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * scale
                total = total + 1.0
                # A lane that does not run attends to a zero token.
                m = tl.where(runs, m, 0.0)
                acc = acc + tl.where(runs, new_value.to(tl.float32), 0.0)
            end = tl.minimum(end, length - 1)
        else:
            place = (lane_head * SHARE + head)[:, None] * D + column
            query = tl.load(q + place, mask=(head < SHARE)[:, None], other=0.0)
        keys += kv_head * stride_head
        values += kv_head * stride_head
        if DOT:
            m, total, acc = _attend_dot(
                query, keys, values, table, runs, begin, end, floor, m, total, acc, scale,
                stride_page, stride_token, G, D, HEADS, SHARE, BLOCK, STAGES,
            )  # fmt: skip
        else:
            m, total, acc = _attend_plain(
                query, keys, values, table, runs, begin, end, floor, m, total, acc, scale,
                stride_page, stride_token, G, D, HEADS, SHARE, BLOCK, STAGES,
            )  # fmt: skip
        _finish(m, total, acc, lane_head, index, parts, out, partials, states, arrivals, max_parts, D, HEADS, SHARE, WIDTH, AT_ONCE, INLINE)


@triton.jit(do_not_specialize=["width", "max_parts"])
def _decode_kernel(
    q, keys, values, page_table, lengths, running, out, partials, states, arrivals, weight, angles, items, count,
    scale, eps, width, max_parts, stride_page, stride_token, stride_head,
    K: tl.constexpr, SHARE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, DOUBLINGS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, AT_ONCE: tl.constexpr, DOT: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr, INLINE: tl.constexpr,
    LISTED: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH > 0 and not LISTED:
        _prefetch(
            keys, values, page_table, lengths, tl.program_id(1), tl.program_id(0), tl.program_id(2), width,
            stride_page, stride_token, stride_head, G, D, WINDOW, BLOCK, SHORT, DOUBLINGS, SPLIT, PREFETCH,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    if LISTED:
        # Heads are neighbours, since their tokens are: programs that run together read whole lines of the store.
        for work in range(tl.program_id(0), tl.load(count) * K, tl.num_programs(0)):
            item = tl.load(items + work // K)
            _item(
                item >> CHUNK_BITS, work % K, item & CHUNK_MASK,
                q, keys, values, page_table, lengths, running, out, partials, states, arrivals, weight, angles,
                scale, eps, width, max_parts, stride_page, stride_token, stride_head, K, SHARE, G, D, HEADS, WIDTH, WINDOW, BLOCK,
                SHORT, DOUBLINGS, SPLIT, STAGES, AT_ONCE, DOT, FUSED, NORM, INLINE,
            )  # fmt: skip
    else:
        _item(
            tl.program_id(1), tl.program_id(0), tl.program_id(2),
            q, keys, values, page_table, lengths, running, out, partials, states, arrivals, weight, angles,
            scale, eps, width, max_parts, stride_page, stride_token, stride_head, K, SHARE, G, D, HEADS, WIDTH, WINDOW, BLOCK,
            SHORT, DOUBLINGS, SPLIT, STAGES, AT_ONCE, DOT, FUSED, NORM, INLINE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["max_parts"])
def _combine_kernel(
    partials, states, out, lengths, running, max_parts,
    K: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    SHORT: tl.constexpr, DOUBLINGS: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lane = tl.program_id(1)
    length = tl.where(tl.load(running + lane) != 0, tl.load(lengths + lane), 1)
    _, _, parts = _cut(length, WINDOW, BLOCK, SHORT, DOUBLINGS, SPLIT)
    if parts > 1:
        lane_head = lane * K + tl.program_id(0)
        _combine(partials, states, out, lane_head, lane_head.to(tl.int64) * max_parts, parts, D, SHARE, WIDTH, AT_ONCE)


@triton.jit(do_not_specialize=["num_lanes"])
def _work_kernel(
    lengths, running, items, count, num_lanes,
    LANES: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, DOUBLINGS: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program c writes the items of chunk c of every lane that has one; all programs count alike."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0)
    lane = tl.arange(0, LANES)
    inside = lane < num_lanes
    runs = tl.load(running + lane, mask=inside, other=0) != 0
    length = tl.where(runs, tl.load(lengths + lane, mask=inside, other=1), 1)
    _, chunk, parts = _cut(length, WINDOW, BLOCK, SHORT, DOUBLINGS, SPLIT)
    base = index * 0
    for step in tl.static_range(DOUBLINGS + 1):
        chosen = inside & (chunk == SHORT << (DOUBLINGS - step))
        mine = tl.where(chosen, parts, 0)
        place = base + tl.cumsum(mine, 0) - mine
        tl.store(items + place + index, (lane << CHUNK_BITS) | index, mask=chosen & (index < parts))
        base += tl.sum(mine, 0)
    if index == 0:
        tl.store(count, base)


def build_work_list(
    lengths_B: torch.Tensor,
    running_B: torch.Tensor,
    work: WorkList,
    *,
    max_chunks: int,
    page_size: int,
    window: int = 0,
    tiling: Tiling = TILING,
    pdl: bool = False,
) -> None:
    """List the chunks of a step for the layers of one window. Shapes: [B]. Mutates: `work`."""
    (lanes,) = lengths_B.shape
    assert page_size & (page_size - 1) == 0, f"G={page_size} must be a power of two"
    assert running_B.shape == (lanes,) and lanes * max_chunks <= work.items.numel(), f"{lanes} lanes of {max_chunks} chunks do not fit"
    extra = {"launch_pdl": True} if pdl else {}
    _work_kernel[(max_chunks,)](
        lengths_B,
        running_B,
        work.items,
        work.count,
        lanes,
        LANES=triton.next_power_of_2(lanes),
        WINDOW=window,
        BLOCK=tiling.block,
        SHORT=tiling.short_chunk,
        DOUBLINGS=tiling.doublings,
        SPLIT=tiling.split,
        PDL=pdl,
        **extra,
    )


def decode_attention(
    q_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_RP: torch.Tensor,
    lengths_B: torch.Tensor,
    running_B: torch.Tensor,
    out_BHD: torch.Tensor,
    workspace: Workspace,
    *,
    scale: float,
    max_chunks: int,
    window: int = 0,
    work: WorkList | None = None,
    num_programs: int = 0,
    separate: bool = False,
    tiling: Tiling = TILING,
    pdl: bool = False,
) -> None:
    """Attend with one query per lane to the tokens of its row, this step's included.

    With `work`, `num_programs` programs walk over that list; without, the grid has `max_chunks` chunks for each lane (no row
    may have more). `separate` merges chunks in a second launch.

    Shapes: `q_BHD` and `out_BHD` [B, H, D]; `keys` and `values` [N, G, K, D] in any strides with D contiguous; `page_table_RP` [R, P];
    `lengths_B` int32 >= 1, `running_B` bool or uint8. `window` 0 sees all tokens.
    Mutates: `out_BHD`, `workspace`.
    """
    assert q_BHD.shape == out_BHD.shape and q_BHD.is_contiguous() and q_BHD.dtype == keys.dtype, f"q has shape {tuple(q_BHD.shape)}"
    _launch(
        q_BHD, None, None, 0.0, keys, values, page_table_RP, lengths_B, running_B, out_BHD, workspace,
        scale=scale, max_chunks=max_chunks, window=window, work=work, num_programs=num_programs, separate=separate, tiling=tiling, pdl=pdl,
    )  # fmt: skip


def decode_attention_fused(
    qkv_BC: torch.Tensor,
    qk_norm_weight: torch.Tensor | None,
    angles: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_RP: torch.Tensor,
    lengths_B: torch.Tensor,
    running_B: torch.Tensor,
    out_BHD: torch.Tensor,
    workspace: Workspace,
    *,
    eps: float,
    scale: float,
    max_chunks: int,
    window: int = 0,
    work: WorkList | None = None,
    num_programs: int = 0,
    separate: bool = False,
    tiling: Tiling = TILING,
    pdl: bool = False,
) -> None:
    """Norm, rotate, store and attend: `rope_kv` and `decode_attention` in one launch. A lane that does not run stores nothing.

    Shapes: `qkv_BC` [B, (H + 2K) * D], `qk_norm_weight` [H + K, D] or None, `angles` [positions, 2, 1, D]; the rest as there.
    Mutates: `out_BHD`, `workspace`, and in `keys` and `values` the slot of each running lane's token.
    """
    lanes, num_heads, head_dim = out_BHD.shape
    num_kv_heads = keys.shape[2]
    assert qkv_BC.shape == (lanes, (num_heads + 2 * num_kv_heads) * head_dim), f"qkv has shape {tuple(qkv_BC.shape)}"
    assert qkv_BC.is_contiguous() and qkv_BC.dtype == keys.dtype and angles.is_contiguous(), "qkv and the angles must be contiguous"
    assert angles.shape[1:] == (2, 1, head_dim), f"angles have shape {tuple(angles.shape)}"
    if qk_norm_weight is not None:
        assert qk_norm_weight.shape == (num_heads + num_kv_heads, head_dim) and qk_norm_weight.is_contiguous()
    _launch(
        qkv_BC, qk_norm_weight, angles, eps, keys, values, page_table_RP, lengths_B, running_B, out_BHD, workspace,
        scale=scale, max_chunks=max_chunks, window=window, work=work, num_programs=num_programs, separate=separate, tiling=tiling, pdl=pdl,
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    weight: torch.Tensor | None,
    angles: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_RP: torch.Tensor,
    lengths_B: torch.Tensor,
    running_B: torch.Tensor,
    out_BHD: torch.Tensor,
    workspace: Workspace,
    *,
    scale: float,
    max_chunks: int,
    window: int,
    work: WorkList | None,
    num_programs: int,
    separate: bool,
    tiling: Tiling,
    pdl: bool,
) -> None:
    lanes, num_heads, head_dim = out_BHD.shape
    _, page_size, num_kv_heads, _ = keys.shape
    share = num_heads // num_kv_heads
    assert head_dim & (head_dim - 1) == 0 and page_size & (page_size - 1) == 0, f"D={head_dim} and G={page_size} must be powers of two"
    assert keys.stride() == values.stride() and keys.stride(3) == 1, "keys and values need equal strides with D contiguous"
    assert out_BHD.is_contiguous() and page_table_RP.stride(1) == 1, "the output and the page table's rows must be contiguous"
    assert lengths_B.shape == running_B.shape == (lanes,) and page_table_RP.shape[0] >= lanes, f"{lanes} lanes"
    assert workspace.partials.shape[1:] == (num_kv_heads, workspace.states.shape[2], share, head_dim), "the workspace is of another model"
    assert workspace.partials.shape[0] >= lanes and workspace.partials.shape[2] >= max_chunks, "the workspace is too small"
    assert work is None or num_programs > 0, "a work list needs a number of programs"
    width = triton.next_power_of_2(share)
    extra = {"launch_pdl": True} if pdl else {}
    grid = (num_kv_heads, lanes, max_chunks) if work is None else (num_programs,)
    _decode_kernel[grid](
        q, keys, values, page_table_RP, lengths_B, running_B, out_BHD, workspace.partials, workspace.states, workspace.arrivals,
        weight, angles, None if work is None else work.items, None if work is None else work.count,
        scale * LOG2E, eps, page_table_RP.stride(0), workspace.partials.shape[2], keys.stride(0), keys.stride(1), keys.stride(2),
        K=num_kv_heads, SHARE=share, G=page_size, D=head_dim, HEADS=max(width, 16) if tiling.dot else width, WIDTH=width,
        WINDOW=window, BLOCK=tiling.block, SHORT=tiling.short_chunk, DOUBLINGS=tiling.doublings, SPLIT=tiling.split,
        STAGES=tiling.num_stages, AT_ONCE=COMBINED_AT_ONCE, DOT=tiling.dot, FUSED=angles is not None, NORM=weight is not None,
        INLINE=not separate, LISTED=work is not None, PREFETCH=tiling.prefetch if q.is_cuda else 0, PDL=pdl,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=MAX_REGISTERS if tiling.num_warps == 4 else None, **extra,
    )  # fmt: skip
    if separate:
        _combine_kernel[(num_kv_heads, lanes)](
            workspace.partials, workspace.states, out_BHD, lengths_B, running_B, workspace.partials.shape[2],
            K=num_kv_heads, SHARE=share, D=head_dim, WIDTH=width, WINDOW=window, BLOCK=tiling.block, SHORT=tiling.short_chunk,
            DOUBLINGS=tiling.doublings, SPLIT=tiling.split, AT_ONCE=COMBINED_AT_ONCE, PDL=pdl, **extra,
        )  # fmt: skip
