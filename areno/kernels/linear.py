"""Products of a decode step: few rows against torch.nn.Linear weights, fused with what stands around them.

A dense layer becomes [norm + qkv], [attention], [o + residual], [norm + gate_up + silu * mul], [down + residual]. The decode
graphs call these launchers for small buckets; from about 32 rows on cuBLAS is faster. One row goes through
`vector_product_kernel` or, where a long row is normed, `resident_product_kernel`, more through `rows_product_kernel` (all
in `product.py`), with tiles from the tables here.

Invariant: nothing is allocated and nothing depends on timing; tiles follow from shapes alone, and a row's bits depend on its
bucket but on no other row. `pdl` hides the gap between two launches and changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from areno.kernels.product import resident_product_kernel, rows_product_kernel, vector_product_kernel

MAX_ROWS = 64
_MULTIPROCESSORS = 132
_MAX_UNROLLED = 16
# Weights in one tile of a program that stays: two tiles fill 64 KB, and three programs a multiprocessor.
_MAX_RESIDENT = 1 << 14


@dataclass(frozen=True, slots=True)
class VectorTiles:
    """How one row is multiplied: weight rows and columns of one tile, warps, and the eviction hint of weight loads."""

    block_n: int
    block_k: int
    num_warps: int = 4
    evict: str = "evict_first"


@dataclass(frozen=True, slots=True)
class ResidentTiles:
    """How one long row is multiplied by programs that stay: whole weight rows of a tile, warps, and the programs of a multiprocessor.

    `num_stages` - 1 tiles of a program are in flight, in shared memory: 2 * block_n * in_size bytes each.
    """

    block_n: int
    num_warps: int = 8
    num_stages: int = 3
    num_programs: int = 3
    evict: str = "evict_first"


@dataclass(frozen=True, slots=True)
class RowTiles:
    """How more rows are multiplied. `warps_k` > 1 gives each warp its own block_k columns; `split` parts of K meet in memory."""

    block_n: int
    block_k: int
    warps_k: int = 1
    split: int = 1
    num_warps: int = 4
    num_stages: int = 4
    evict: str = ""


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Memory in which the parts of a split K meet: one for each stream, shared by all products on it.

    Shapes: partials [cells] fp32, arrivals [tiles] int32, zero between products.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor


def allocate_workspace(device: torch.device, *, num_cells: int = 1 << 22, num_tiles: int = 1 << 12) -> SplitWorkspace:
    """Allocate what `SplitWorkspace` describes; products that need more split K less."""
    return SplitWorkspace(
        partials=torch.empty(num_cells, dtype=torch.float32, device=device),
        arrivals=torch.zeros(num_tiles, dtype=torch.int32, device=device),
    )


Tiles = VectorTiles | ResidentTiles | RowTiles

_VECTOR_TILES = {
    "narrow": VectorTiles(4, 1024, 8),
    "short": VectorTiles(4, 1024),
    "square": VectorTiles(1, 1024),
    "long": VectorTiles(1, 2048),
    "wide": VectorTiles(2, 1024),
    "head": VectorTiles(4, 1024),
    "deep head": VectorTiles(1, 1024),
}
# With a norm, in place of the table above.
_RESIDENT_TILES = {
    "square": ResidentTiles(4),
    "wide": ResidentTiles(4),
    "deep head": ResidentTiles(4),
}
_ROW_TILES = {
    ("narrow", 8): RowTiles(16, 64, warps_k=4, num_stages=6),
    ("narrow", 16): RowTiles(16, 128, warps_k=4),
    ("narrow", 32): RowTiles(64, 128, split=8, num_stages=3),
    ("narrow", 64): RowTiles(64, 128, split=8),
    ("short", 8): RowTiles(64, 128, split=2, num_stages=5),
    ("short", 16): RowTiles(16, 64, warps_k=4, num_stages=5),
    ("short", 32): RowTiles(64, 128, split=2, num_stages=5),
    ("short", 64): RowTiles(64, 128, split=2),
    ("square", 8): RowTiles(64, 128, split=4),
    ("square", 16): RowTiles(64, 128, split=4),
    ("square", 32): RowTiles(64, 128, split=4),
    ("square", 64): RowTiles(64, 128, split=2, num_stages=5),
    ("long", 8): RowTiles(64, 128, split=4, num_stages=6),
    ("long", 16): RowTiles(64, 128, split=4, num_stages=6),
    ("long", 32): RowTiles(64, 128, split=4, num_stages=5),
    ("long", 64): RowTiles(64, 128, split=4, num_stages=5),
    ("wide", 8): RowTiles(64, 256, num_stages=3),
    ("wide", 16): RowTiles(64, 128),
    ("wide", 32): RowTiles(64, 128),
    ("wide", 64): RowTiles(128, 128, num_warps=8, num_stages=3),
    ("head", 8): RowTiles(64, 256, num_stages=3),
    ("head", 16): RowTiles(64, 256, num_stages=3),
    ("head", 32): RowTiles(128, 128, num_warps=8, num_stages=3),
    ("head", 64): RowTiles(128, 128, num_warps=8, num_stages=3),
}
# Without tensor cores: small, so that the products unrolled in registers are.
_FP32_TILES = RowTiles(32, 32, split=4)


def shape_class(num_weight_rows: int, in_size: int) -> str:
    """Name the class of weights that share tiles: see the tables."""
    if num_weight_rows >= 1 << 16:
        return "head" if in_size < 2048 else "deep head"
    if num_weight_rows < 2048:
        return "narrow"
    if in_size < 2048:
        return "short"
    if num_weight_rows >= 1 << 14:
        return "wide"
    return "long" if in_size >= 8192 else "square"


def row_class(num_rows: int) -> int:
    """Return the rows that the kernels compute for `num_rows`: 1, 8, 16, 32 or 64."""
    assert 1 <= num_rows <= MAX_ROWS, f"{num_rows} rows; at most {MAX_ROWS}: use cuBLAS for more"
    return 1 if num_rows == 1 else max(8, triton.next_power_of_2(num_rows))


def default_tiles(
    num_rows: int, num_weight_rows: int, in_size: int, dtype: torch.dtype = torch.bfloat16, *, normed: bool = False, glu: bool = False
) -> Tiles:
    """Return the tables' tiles for this many rows, normed or not, and a weight of this shape, cut down to a small weight.

    With `glu` a tile holds pairs of a gate's and an up's row.
    """
    rows, shape = row_class(num_rows), shape_class(num_weight_rows, in_size)
    columns = triton.next_power_of_2(in_size)
    if rows == 1:
        if normed and shape in _RESIDENT_TILES and columns <= _MAX_RESIDENT and dtype != torch.float32:
            resident = _RESIDENT_TILES[shape]
            return replace(resident, block_n=max(2, min(resident.block_n, _MAX_RESIDENT // columns)))
        vector = _VECTOR_TILES[shape]
        least = triton.next_power_of_2(triton.cdiv(in_size, _MAX_UNROLLED))
        return replace(vector, block_n=max(vector.block_n, 2 if glu else 1), block_k=max(least, min(vector.block_k, columns)))
    tiles = _FP32_TILES if dtype == torch.float32 else _ROW_TILES[shape.removeprefix("deep "), rows]
    block_k = max(16, min(tiles.block_k, columns // tiles.warps_k))
    return replace(tiles, block_k=block_k, split=max(1, min(tiles.split, in_size // (block_k * tiles.warps_k))))


def fused_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    workspace: SplitWorkspace | None = None,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> None:
    """Write linear(rms_norm(x)) to `out`, whose dtype may be fp32 (the head); without a norm weight linear(x).

    The norm's weight is applied before the product and its scale after the accumulation: one rounding of x where Hugging
    Face's order has two. Without a workspace K is never split.

    Shapes: x [B, in], norm_weight [in], weight [N, in], bias [N], out [B, N]. Mutates: out, workspace.
    """
    _launch(x, norm_weight, eps, weight, bias, out, workspace, tiles, pdl)


def fused_norm_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    workspace: SplitWorkspace | None = None,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> None:
    """Write silu(gate) * up to `out`, where gate and up are linear(rms_norm(x)), kept in fp32 until the end.

    Shapes: x [B, in], norm_weight [in], weight [2I, in] with the gate's rows first, bias [2I], out [B, I].
    Mutates: out, workspace.
    """
    _launch(x, norm_weight, eps, weight, bias, out, workspace, tiles, pdl, glu=True)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    workspace: SplitWorkspace | None = None,
    tiles: Tiles | None = None,
    pdl: bool = False,
) -> None:
    """Add linear(x), rounded to the residual's dtype first, to `residual`.

    Shapes: x [B, in], weight [N, in], bias [N], residual [B, N]. Mutates: residual, workspace.
    """
    _launch(x, None, 0.0, weight, bias, residual, workspace, tiles, pdl, add=True)


def _launch(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: SplitWorkspace | None,
    tiles: Tiles | None,
    pdl: bool,
    *,
    glu: bool = False,
    add: bool = False,
) -> None:
    num_rows, in_size = x.shape
    num_weight_rows = weight.shape[0]
    num_out = out.shape[1]
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, out {tuple(out.shape)}"
    assert weight.shape[1] == in_size and weight.is_contiguous() and in_size % 16 == 0, shapes
    assert num_weight_rows == num_out * (2 if glu else 1) and out.shape[0] == num_rows, shapes
    assert x.stride(1) == 1 and out.stride(1) == 1, "rows of x and out must be contiguous"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, weight {weight.dtype}"
    assert norm_weight is None or norm_weight.shape == (in_size,), "one norm weight for each input"
    assert bias is None or bias.shape == (num_weight_rows,), "one bias for each row of the weight"
    normed = norm_weight is not None
    tiles = tiles or default_tiles(num_rows, num_weight_rows, in_size, weight.dtype, normed=normed, glu=glu)
    flags = {"NORM": normed, "BIAS": bias is not None, "GLU": glu, "ADD": add, "EVICT": tiles.evict, "PDL": pdl}
    options = flags | {"num_warps": tiles.num_warps} | ({"launch_pdl": True} if pdl else {})
    num_tiles = triton.cdiv(num_weight_rows, tiles.block_n)
    assert num_rows == 1 or isinstance(tiles, RowTiles), f"{tiles} for {num_rows} rows"
    shared = (x, norm_weight, weight, bias, out)
    if isinstance(tiles, VectorTiles):
        vector_product_kernel[(num_tiles,)](*shared, num_out, eps, in_size, tiles.block_n, tiles.block_k, **options)
        return
    if isinstance(tiles, ResidentTiles):
        trips = triton.cdiv(num_tiles, _MULTIPROCESSORS * tiles.num_programs)
        resident_product_kernel[(triton.cdiv(num_tiles, trips),)](
            *(*shared, num_out, eps, in_size, tiles.block_n, triton.next_power_of_2(in_size), trips, tiles.num_stages), **options
        )
        return
    block_b = max(8, row_class(num_rows))
    split = _affordable_split(tiles, num_tiles, block_b, workspace)
    partials, arrivals = (workspace.partials, workspace.arrivals) if workspace is not None else (None, None)
    rows_product_kernel[(num_tiles * split,)](
        *(*shared, partials, arrivals),
        *(num_rows, num_out, x.stride(0), out.stride(0), eps),
        *(in_size, tiles.block_n, tiles.block_k, block_b, tiles.warps_k, split),
        num_stages=tiles.num_stages,
        **options,
    )


def _affordable_split(tiles: RowTiles, num_tiles: int, block_b: int, workspace: SplitWorkspace | None) -> int:
    """Return the parts of K that `workspace` has room for, at most those asked for."""
    if workspace is None or num_tiles > workspace.arrivals.numel():
        return 1
    cells = num_tiles * (tiles.block_n + 1) * block_b
    return max(1, min(tiles.split, workspace.partials.numel() // cells))
