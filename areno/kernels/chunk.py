"""The Triton code behind `areno.kernels.attention`: how a row is cut, how a chunk is attended to, how chunks are merged.

One item of work is (lane, kv head, chunk). `_item` does one: it attends over the chunk's tokens on the matrix units, with
the query heads of a kv head padded to 16, then `_finish` writes the output of a row of one chunk, or leaves a partial
result and, as the last to arrive, merges all of them in the order of chunks. `decode_kernel` hands items to programs by a
plain grid or from a work list, which `work_kernel` makes.

Invariant: a row's cut and every order of summation depend on its own length alone. Tokens at or beyond it are never read.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
# Triton gives a kernel's arguments their types at each launch.

import triton
import triton.language as tl

from areno.kernels.rope_kv import norm_rotate

CHUNK_BITS = tl.constexpr(16)
CHUNK_MASK = tl.constexpr(0xFFFF)


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
def _attend(
    q, keys, values, table, running, begin, end, floor, m, total, acc, scale,
    stride_page, stride_token, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
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
    D: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
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
    STAGES: tl.constexpr, AT_ONCE: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr,
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
        m, total, acc = _attend(
            query, keys, values, table, runs, begin, end, floor, m, total, acc, scale, stride_page, stride_token, G, D, BLOCK, STAGES
        )
        _finish(m, total, acc, lane_head, index, parts, out, partials, states, arrivals, max_parts, D, HEADS, SHARE, WIDTH, AT_ONCE)


@triton.jit(do_not_specialize=["width", "max_parts"])
def decode_kernel(
    q, keys, values, page_table, lengths, running, out, partials, states, arrivals, weight, angles, items, count,
    scale, eps, width, max_parts, stride_page, stride_token, stride_head,
    K: tl.constexpr, SHARE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, DOUBLINGS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, AT_ONCE: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if LISTED:
        # Heads are neighbours, since their tokens are: programs that run together read whole lines of the store.
        for work in range(tl.program_id(0), tl.load(count) * K, tl.num_programs(0)):
            item = tl.load(items + work // K)
            _item(
                item >> CHUNK_BITS, work % K, item & CHUNK_MASK,
                q, keys, values, page_table, lengths, running, out, partials, states, arrivals, weight, angles,
                scale, eps, width, max_parts, stride_page, stride_token, stride_head, K, SHARE, G, D, HEADS, WIDTH, WINDOW, BLOCK,
                SHORT, DOUBLINGS, SPLIT, STAGES, AT_ONCE, FUSED, NORM,
            )  # fmt: skip
    else:
        _item(
            tl.program_id(1), tl.program_id(0), tl.program_id(2),
            q, keys, values, page_table, lengths, running, out, partials, states, arrivals, weight, angles,
            scale, eps, width, max_parts, stride_page, stride_token, stride_head, K, SHARE, G, D, HEADS, WIDTH, WINDOW, BLOCK,
            SHORT, DOUBLINGS, SPLIT, STAGES, AT_ONCE, FUSED, NORM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_lanes"])
def work_kernel(
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
