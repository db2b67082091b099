"""From a fused projection to attention's inputs: norm q and k, rotate them, store k and v into pages.

One launch per layer serves a decode step (one token per lane) and packed prefill tokens alike; only `slots` says where
a token goes. The order of rounding is that of the torch layers and so of Hugging Face's models: normalise in fp32, round
to the model's dtype, multiply by the weight in that dtype, then turn. `norm_rotate` is shared with the attention kernel
that takes raw projections.

Slots number tokens as page * G + offset; tokens without an owner name a slot of the sink page.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives a kernel's arguments their types at each launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rotate_loaded(x, partner, weight, partner_weight, angle, eps, NORM: tl.constexpr, D: tl.constexpr):
    """Norm and turn heads [heads, D]; `partner` holds the same heads with their halves exchanged, `angle` points at cos."""
    dtype = x.dtype
    column = tl.arange(0, D)[None, :]
    if NORM:
        wide = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        x = (wide * inverse).to(dtype)
        x = (x.to(tl.float32) * weight.to(tl.float32)).to(dtype)
        partner = (partner.to(tl.float32) * inverse).to(dtype)
        partner = (partner.to(tl.float32) * partner_weight.to(tl.float32)).to(dtype)
    cos = tl.load(angle + column).to(tl.float32)
    sin = tl.load(angle + D + column).to(tl.float32)
    turned = (x.to(tl.float32) * cos).to(dtype)
    return (turned.to(tl.float32) + partner.to(tl.float32) * sin).to(dtype)


@triton.jit
def norm_rotate(row, head, weight, angle, eps, mask, NORM: tl.constexpr, D: tl.constexpr):
    """Load, norm and turn the heads `head` [heads] of one projected token at `row`."""
    column = tl.arange(0, D)[None, :]
    other = (column + D // 2) % D
    base = head[:, None] * D
    x = tl.load(row + base + column, mask=mask[:, None], other=0.0)
    partner = tl.load(row + base + other, mask=mask[:, None], other=0.0)
    scale = x
    partner_scale = x
    if NORM:
        scale = tl.load(weight + base + column, mask=mask[:, None], other=0.0)
        partner_scale = tl.load(weight + base + other, mask=mask[:, None], other=0.0)
    return rotate_loaded(x, partner, scale, partner_scale, angle, eps, NORM, D)


@triton.jit
def _rope_kv_kernel(
    qkv,
    weight,
    angles,
    positions,
    slots,
    q_out,
    keys,
    values,
    eps,
    stride_page,
    stride_token,
    stride_head,
    H: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, D)[None, :]
    other = (column + D // 2) % D
    base = head[:, None] * D
    turns = head < H + K
    inside = head < H + 2 * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = base
    partner_scale = base
    if NORM:
        scale = tl.load(weight + base + column, mask=turns[:, None], other=0.0)
        partner_scale = tl.load(weight + base + other, mask=turns[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    row = qkv + token * ((H + 2 * K) * D)
    x = tl.load(row + base + column, mask=inside[:, None], other=0.0)
    partner = tl.load(row + base + other, mask=turns[:, None], other=0.0)
    turned = rotate_loaded(x, partner, scale, partner_scale, angles + position * (2 * D), eps, NORM, D)

    tl.store(q_out + token * (H * D) + base + column, turned, mask=(head < H)[:, None])
    place = (slot // G) * stride_page + (slot % G) * stride_token
    is_key = (head >= H) & turns
    is_value = (head >= H + K) & inside
    tl.store(keys + place + (head - H)[:, None] * stride_head + column, turned, mask=is_key[:, None])
    tl.store(values + place + (head - H - K)[:, None] * stride_head + column, x, mask=is_value[:, None])


def rope_kv(
    qkv_TC: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    angles: torch.Tensor,
    qk_norm_weight: torch.Tensor | None,
    q_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    eps: float = 0.0,
    heads_per_program: int = 4,
    num_warps: int = 1,
    pdl: bool = False,
) -> None:
    """Norm, rotate and store one layer's projections.

    Shapes: `qkv_TC` [T, (H + 2K) * D], `angles` [positions, 2, 1, D] (cos, signed sin), `qk_norm_weight` [H + K, D] or None,
    `q_THD` [T, H, D], `keys` and `values` [N, G, K, D] in any strides with D contiguous.
    Mutates: `q_THD` and the slots of `keys` and `values`.
    """
    tokens, num_heads, head_dim = q_THD.shape
    _, page_size, num_kv_heads, _ = keys.shape
    assert head_dim & (head_dim - 1) == 0, f"head_dim={head_dim} is not a power of two"
    assert qkv_TC.shape == (tokens, (num_heads + 2 * num_kv_heads) * head_dim), f"qkv has shape {tuple(qkv_TC.shape)}"
    assert qkv_TC.is_contiguous() and q_THD.is_contiguous() and angles.is_contiguous(), "qkv, q and the angles must be contiguous"
    assert angles.shape[1:] == (2, 1, head_dim), f"angles have shape {tuple(angles.shape)}"
    assert keys.stride() == values.stride() and keys.stride(3) == 1, "keys and values need equal strides with D contiguous"
    assert positions_T.shape == slots_T.shape == (tokens,), "one position and one slot per token"
    if qk_norm_weight is not None:
        assert qk_norm_weight.shape == (num_heads + num_kv_heads, head_dim) and qk_norm_weight.is_contiguous()
    extra = {"launch_pdl": True} if pdl else {}
    _rope_kv_kernel[(tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads_per_program))](
        qkv_TC,
        qk_norm_weight,
        angles,
        positions_T,
        slots_T,
        q_THD,
        keys,
        values,
        eps,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        H=num_heads,
        K=num_kv_heads,
        G=page_size,
        D=head_dim,
        HEADS=heads_per_program,
        NORM=qk_norm_weight is not None,
        PDL=pdl,
        num_warps=num_warps,
        **extra,
    )
