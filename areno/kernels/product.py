"""The Triton kernels behind `areno.kernels.linear`: products of few rows with torch.nn.Linear weights.

All stream each weight once, accumulate in fp32 and finish with the same fusions: RMS norm of the rows, bias, silu(gate) * up,
and the addition to a residual. `vector_product_kernel` gives one row a program for each tile of the weight: the most loads in
flight, but a norm is summed by every program again, which long rows pay in registers. `resident_product_kernel` norms one row
once for each program that stays, which then loops over tiles. `rows_product_kernel` takes up to 64 rows as the narrow
side of a dot whose wide side is the weight, with the norm's weight before the product and its scale after it.

Invariant: every sum has a fixed order (no float atomics), and a row's bits depend on no other row. With PDL a kernel touches
nothing before the kernel before it has ended, and lets the next one be placed when its own last loads are done: waiting
programs hold no slot that a program with work could have, and only the gap between launches is hidden.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives a kernel's arguments their types at each launch.

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def _weight_rows(tile, num_out, BLOCK_N: tl.constexpr, GLU: tl.constexpr):
    """The weight rows of one tile; with GLU gate and up rows alternate. Rows past the end repeat the last one."""
    index_N = tl.arange(0, BLOCK_N)
    if GLU:
        out_N = tl.minimum(tile * (BLOCK_N // 2) + index_N // 2, num_out - 1)
        row_N = out_N + (index_N % 2) * num_out
    else:
        row_N = tl.minimum(tile * BLOCK_N + index_N, num_out - 1)
    return row_N.to(tl.int64)


@triton.jit
def _load(pointer, col, K: tl.constexpr, MASK: tl.constexpr, EVICT: tl.constexpr):
    if MASK:
        return tl.load(pointer, mask=col < K, other=0.0, eviction_policy=EVICT)
    return tl.load(pointer, eviction_policy=EVICT)


@triton.jit
def _silu_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _store_vector(
    sum_N,
    residual_O,
    bias,
    out,
    tile,
    row_N,
    num_out,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ADD: tl.constexpr,
):
    """Add the bias, combine gate and up or add the residual, and store one tile of one row."""
    dtype = out.dtype.element_ty
    if BIAS:
        sum_N += tl.load(bias + row_N).to(tl.float32)
    if GLU:
        gate_O, up_O = tl.split(tl.reshape(sum_N, [BLOCK_N // 2, 2]))
        out_O = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        result_O = _silu_mul(gate_O, up_O).to(dtype)
    else:
        out_O = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        result_O = sum_N.to(dtype)
        if ADD:
            result_O = (result_O.to(tl.float32) + residual_O.to(tl.float32)).to(dtype)
    tl.store(out + out_O, result_O, mask=out_O < num_out)


@triton.jit
def vector_product_kernel(
    x,
    norm_weight,
    weight,
    bias,
    out,
    num_out,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ADD: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, a program for each tile: multiply elementwise, all of K unrolled so that loads run ahead, and sum once."""
    if PDL:
        tl_cuda.gdc_wait()
    tile = tl.program_id(0)
    row_N = _weight_rows(tile, num_out, BLOCK_N, GLU)
    col_K = tl.arange(0, BLOCK_K)
    weight_NK = weight + row_N[:, None] * K + col_K[None, :]
    residual_N = tl.zeros([BLOCK_N], out.dtype.element_ty)
    if ADD:
        residual_N = tl.load(out + row_N)
    sum_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square_K = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        x_K = _load(x + start + col_K, start + col_K, K, start + BLOCK_K > K, "").to(tl.float32)
        if NORM:
            square_K += x_K * x_K
            x_K *= _load(norm_weight + start + col_K, start + col_K, K, start + BLOCK_K > K, "").to(tl.float32)
        w_NK = _load(weight_NK + start, start + col_K[None, :], K, start + BLOCK_K > K, EVICT)
        sum_NK += w_NK.to(tl.float32) * x_K[None, :]
    if PDL:
        tl_cuda.gdc_launch_dependents()
    sum_N = tl.sum(sum_NK, 1)
    if NORM:
        sum_N *= tl.rsqrt(tl.sum(square_K, 0) / K + eps)
    _store_vector(sum_N, residual_N, bias, out, tile, row_N, num_out, BLOCK_N, BIAS, GLU, ADD)


@triton.jit
def resident_product_kernel(
    x,
    norm_weight,
    weight,
    bias,
    out,
    num_out,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRIPS: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ADD: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, programs that stay: x is normed once into registers, then tiles of whole weight rows come through shared memory."""
    if PDL:
        tl_cuda.gdc_wait()
    col_K = tl.arange(0, BLOCK_K)
    x_K = _load(x + col_K, col_K, K, BLOCK_K > K, "").to(tl.float32)
    if NORM:
        scale_K = _load(norm_weight + col_K, col_K, K, BLOCK_K > K, "").to(tl.float32)
        x_K = x_K * scale_K * tl.rsqrt(tl.sum(x_K * x_K, 0) / K + eps)
    for trip in tl.range(0, TRIPS, num_stages=STAGES):
        if PDL:
            if trip + 2 >= TRIPS:
                tl_cuda.gdc_launch_dependents()
        tile = trip * tl.num_programs(0) + tl.program_id(0)
        row_N = _weight_rows(tile, num_out, BLOCK_N, GLU)
        w_NK = _load(weight + row_N[:, None] * K + col_K[None, :], col_K[None, :], K, BLOCK_K > K, EVICT)
        residual_N = tl.zeros([BLOCK_N], out.dtype.element_ty)
        if ADD:
            residual_N = tl.load(out + row_N)
        sum_N = tl.sum(w_NK.to(tl.float32) * x_K[None, :], 1)
        _store_vector(sum_N, residual_N, bias, out, tile, row_N, num_out, BLOCK_N, BIAS, GLU, ADD)


@triton.jit
def _load_x(x_BK, col_K, live_B, K: tl.constexpr, MASK: tl.constexpr):
    live_BK = live_B & (col_K < K) if MASK else live_B
    return tl.load(x_BK, mask=live_BK, other=0.0)


@triton.jit
def _accumulate(
    x,
    norm_weight,
    weight,
    row_N,
    first,
    num_rows,
    stride_x,
    K: tl.constexpr,
    TRIPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    NORM: tl.constexpr,
    MASK: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Return this part's products [BLOCK_N, BLOCK_B] and sums of squares [BLOCK_B]: all warps share each tile."""
    lane_B = tl.arange(0, BLOCK_B)
    col_1K = first + tl.arange(0, BLOCK_K)[None, :]
    live_B = lane_B[:, None] < num_rows
    weight_NK = weight + row_N[:, None] * K + col_1K
    x_BK = x + lane_B[:, None] * stride_x + col_1K
    sum_NB = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    square_BG = tl.zeros([BLOCK_B, BLOCK_K // 8], tl.float32)
    if NORM:
        ahead_BK = _load_x(x_BK, col_1K, live_B, K, MASK)
        all_BK = tl.broadcast_to(col_1K, [BLOCK_B, BLOCK_K])
        scale_BK = _load(norm_weight + all_BK, all_BK, K, MASK, "")
    for trip in range(TRIPS):
        start = trip * BLOCK_K
        w_NK = _load(weight_NK + start, start + col_1K, K, MASK, EVICT)
        if NORM:
            wide_BK = ahead_BK.to(tl.float32)
            square_BG += tl.sum(tl.reshape(wide_BK * wide_BK, [BLOCK_B, BLOCK_K // 8, 8]), 2)
            a_BK = (wide_BK * scale_BK.to(tl.float32)).to(weight.dtype.element_ty)
            next_BK = start + BLOCK_K + all_BK
            ahead_BK = _load_x(x_BK + (start + BLOCK_K), next_BK, live_B, K, True)
            scale_BK = _load(norm_weight + next_BK, next_BK, K, True, "")
        else:
            a_BK = _load_x(x_BK + start, start + col_1K, live_B, K, MASK)
        sum_NB = tl.dot(w_NK, tl.trans(a_BK), sum_NB, input_precision="ieee")
    return sum_NB, tl.sum(square_BG, 1)


@triton.jit
def _accumulate_by_warp(
    x,
    norm_weight,
    weight,
    row_N,
    first,
    num_rows,
    stride_x,
    K: tl.constexpr,
    TRIPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WARPS_K: tl.constexpr,
    NORM: tl.constexpr,
    MASK: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Like `_accumulate`, but each warp takes its own BLOCK_K columns, for tiles of too few rows to share."""
    STEP: tl.constexpr = WARPS_K * BLOCK_K
    lane_B = tl.arange(0, BLOCK_B)
    col_W1K = first + tl.arange(0, WARPS_K)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    live_B = lane_B[None, :, None] < num_rows
    weight_WNK = weight + row_N[None, :, None] * K + col_W1K
    x_WBK = x + lane_B[None, :, None] * stride_x + col_W1K
    sum_WNB = tl.zeros([WARPS_K, BLOCK_N, BLOCK_B], tl.float32)
    square_WBG = tl.zeros([WARPS_K, BLOCK_B, BLOCK_K // 8], tl.float32)
    if NORM:
        ahead_WBK = _load_x(x_WBK, col_W1K, live_B, K, MASK)
        all_WBK = tl.broadcast_to(col_W1K, [WARPS_K, BLOCK_B, BLOCK_K])
        scale_WBK = _load(norm_weight + all_WBK, all_WBK, K, MASK, "")
    for trip in range(TRIPS):
        start = trip * STEP
        w_WNK = _load(weight_WNK + start, start + col_W1K, K, MASK, EVICT)
        if NORM:
            wide_WBK = ahead_WBK.to(tl.float32)
            square_WBG += tl.sum(tl.reshape(wide_WBK * wide_WBK, [WARPS_K, BLOCK_B, BLOCK_K // 8, 8]), 3)
            a_WBK = (wide_WBK * scale_WBK.to(tl.float32)).to(weight.dtype.element_ty)
            next_WBK = start + STEP + all_WBK
            ahead_WBK = _load_x(x_WBK + (start + STEP), next_WBK, live_B, K, True)
            scale_WBK = _load(norm_weight + next_WBK, next_WBK, K, True, "")
        else:
            a_WBK = _load_x(x_WBK + start, start + col_W1K, live_B, K, MASK)
        sum_WNB = tl.dot(w_WNK, tl.permute(a_WBK, (0, 2, 1)), sum_WNB, input_precision="ieee")
    return tl.sum(sum_WNB, 0), tl.sum(tl.sum(square_WBG, 2), 0)


@triton.jit
def _load_residual(out, tile, num_rows, num_out, stride_out, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, ADD: tl.constexpr):
    """What one tile of `out` holds, asked for early so that the wait for it is covered; without ADD zeros."""
    residual_BO = tl.zeros([BLOCK_B, BLOCK_N], out.dtype.element_ty)
    if ADD:
        lane_B, out_O = tl.arange(0, BLOCK_B), tile * BLOCK_N + tl.arange(0, BLOCK_N)
        live_BO = (lane_B[:, None] < num_rows) & (out_O[None, :] < num_out)
        residual_BO = tl.load(out + lane_B[:, None] * stride_out + out_O[None, :], mask=live_BO, other=0.0)
    return residual_BO


@triton.jit
def _store_rows(
    sum_NB,
    square_B,
    residual_BO,
    bias,
    out,
    tile,
    row_N,
    num_rows,
    num_out,
    stride_out,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ADD: tl.constexpr,
):
    """Scale, add the bias, combine gate and up or add the residual, and store one tile of `out` [B, N]."""
    dtype = out.dtype.element_ty
    lane_B = tl.arange(0, BLOCK_B)
    if NORM:
        sum_NB *= tl.rsqrt(square_B / K + eps)[None, :]
    if BIAS:
        sum_NB += tl.load(bias + row_N).to(tl.float32)[:, None]
    if GLU:
        gate_OB, up_OB = tl.split(tl.permute(tl.reshape(sum_NB, [BLOCK_N // 2, 2, BLOCK_B]), (0, 2, 1)))
        out_O = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        sum_BO = tl.trans(_silu_mul(gate_OB, up_OB))
    else:
        out_O = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        sum_BO = tl.trans(sum_NB)
    live_BO = (lane_B[:, None] < num_rows) & (out_O[None, :] < num_out)
    out_BO = out + lane_B[:, None] * stride_out + out_O[None, :]
    result_BO = sum_BO.to(dtype)
    if ADD:
        result_BO = (result_BO.to(tl.float32) + residual_BO.to(tl.float32)).to(dtype)
    tl.store(out_BO, result_BO, mask=live_BO)


@triton.jit
def rows_product_kernel(
    x,
    norm_weight,
    weight,
    bias,
    out,
    partials,
    arrivals,
    num_rows,
    num_out,
    stride_x,
    stride_out,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WARPS_K: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GLU: tl.constexpr,
    ADD: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to BLOCK_B rows: program `tile * SPLIT + part` multiplies one tile of the weight's rows over one part of K.

    With SPLIT > 1 the program of a tile that arrives last adds the parts in their order; `arrivals` is zero before and after.
    """
    if PDL:
        tl_cuda.gdc_wait()
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    STEP: tl.constexpr = WARPS_K * BLOCK_K
    TRIPS: tl.constexpr = (K + SPLIT * STEP - 1) // (SPLIT * STEP)
    MASK: tl.constexpr = K % (SPLIT * STEP) != 0
    first = part * (TRIPS * STEP)
    row_N = _weight_rows(tile, num_out, BLOCK_N, GLU)
    if WARPS_K == 1:
        sum_NB, square_B = _accumulate(
            x, norm_weight, weight, row_N, first, num_rows, stride_x, K, TRIPS, BLOCK_N, BLOCK_K, BLOCK_B, NORM, MASK, EVICT
        )
    else:
        sum_NB, square_B = _accumulate_by_warp(
            x, norm_weight, weight, row_N, first, num_rows, stride_x, K, TRIPS, BLOCK_N, BLOCK_K, BLOCK_B, WARPS_K, NORM, MASK, EVICT
        )
    if PDL:
        tl_cuda.gdc_launch_dependents()
    if SPLIT == 1:
        residual_BO = _load_residual(out, tile, num_rows, num_out, stride_out, BLOCK_N, BLOCK_B, ADD)
        _store_rows(
            *(sum_NB, square_B, residual_BO, bias, out, tile, row_N, num_rows, num_out, stride_out, eps),
            *(K, BLOCK_N, BLOCK_B, NORM, BIAS, GLU, ADD),
        )
    else:
        # One part in `partials`: BLOCK_N rows of products, then one row of squares.
        lane_B = tl.arange(0, BLOCK_B)
        cell_NB = tl.arange(0, BLOCK_N)[:, None] * BLOCK_B + lane_B[None, :]
        PART: tl.constexpr = (BLOCK_N + 1) * BLOCK_B
        mine = partials + (tile * SPLIT + part) * PART
        tl.store(mine + cell_NB, sum_NB)
        if NORM:
            tl.store(mine + BLOCK_N * BLOCK_B + lane_B, square_B)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            residual_BO = _load_residual(out, tile, num_rows, num_out, stride_out, BLOCK_N, BLOCK_B, ADD)
            total_NB = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
            total_B = tl.zeros([BLOCK_B], tl.float32)
            for index in tl.static_range(SPLIT):
                theirs = partials + (tile * SPLIT + index) * PART
                total_NB += tl.load(theirs + cell_NB, cache_modifier=".cg")
                if NORM:
                    total_B += tl.load(theirs + BLOCK_N * BLOCK_B + lane_B, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            _store_rows(
                *(total_NB, total_B, residual_BO, bias, out, tile, row_N, num_rows, num_out, stride_out, eps),
                *(K, BLOCK_N, BLOCK_B, NORM, BIAS, GLU, ADD),
            )
