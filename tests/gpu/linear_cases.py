"""The products of the target models, and the tiles that `check_linear` times for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areno.kernels.linear import RowTiles, VectorTiles, default_tiles, row_class, shape_class

Tiles = VectorTiles | RowTiles


@dataclass(frozen=True, slots=True)
class Case:
    """One product of a model: `kind` is norm, glu, add or head."""

    name: str
    kind: str
    num_weight_rows: int
    in_size: int

    @property
    def num_out(self) -> int:
        return self.num_weight_rows // (2 if self.kind == "glu" else 1)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.kind == "head" else torch.bfloat16

    def traffic(self, rows: int) -> int:
        """Bytes that must move."""
        out = rows * self.num_out * (4 if self.kind in ("head", "add") else 2)
        return 2 * self.num_weight_rows * self.in_size + 2 * rows * self.in_size + out


CASES = (
    Case("0.6b qkv", "norm", 4096, 1024),
    Case("0.6b o", "add", 1024, 2048),
    Case("0.6b gate-up", "glu", 6144, 1024),
    Case("0.6b down", "add", 1024, 3072),
    Case("0.6b head", "head", 151936, 1024),
    Case("8b qkv", "norm", 6144, 4096),
    Case("8b o", "add", 4096, 4096),
    Case("8b gate-up", "glu", 24576, 4096),
    Case("8b down", "add", 4096, 12288),
    Case("8b head", "head", 151936, 4096),
)

# One row: block_n, block_k, warps.
VECTOR_GRID = {
    "narrow": ((1, 1024, 2), (1, 1024, 4), (2, 1024, 4), (2, 1024, 8), (4, 512, 4), (4, 1024, 8)),
    "short": ((2, 1024, 2), (2, 1024, 4), (4, 1024, 4), (4, 512, 4), (8, 512, 8), (8, 1024, 8)),
    "deep": ((1, 2048, 4), (2, 1024, 4), (2, 2048, 8), (4, 1024, 4), (4, 512, 4), (8, 512, 8), (4, 1024, 8)),
}
# More rows: block_n, block_k, warps_k, split, warps, stages.
ROW_GRID = {
    ("narrow", 8): (
        (16, 64, 4, 1, 4, 6), (16, 128, 4, 1, 4, 4), (16, 256, 1, 1, 1, 5), (16, 64, 4, 2, 4, 6),
        (32, 64, 4, 4, 4, 4), (64, 128, 1, 8, 4, 4),
    ),
    ("narrow", 32): (
        (16, 64, 4, 1, 4, 5), (32, 64, 4, 4, 4, 4), (64, 128, 1, 8, 4, 3), (64, 64, 1, 8, 4, 5),
    ),
    ("short", 8): (
        (16, 64, 4, 1, 4, 5), (32, 64, 4, 1, 4, 5), (16, 128, 1, 1, 1, 8), (32, 128, 1, 1, 2, 6),
        (64, 128, 1, 2, 4, 5), (64, 128, 1, 4, 4, 3),
    ),
    ("short", 32): (
        (64, 64, 1, 1, 4, 8), (64, 128, 1, 1, 4, 5), (64, 128, 1, 2, 4, 5), (64, 64, 1, 2, 4, 6),
        (128, 64, 1, 4, 4, 4),
    ),
    ("square", 8): (
        (64, 128, 1, 4, 4, 4), (64, 256, 1, 4, 4, 3), (64, 128, 1, 2, 4, 6), (32, 64, 4, 2, 4, 5),
        (64, 128, 1, 8, 4, 4), (128, 128, 1, 8, 4, 4),
    ),
    ("square", 32): (
        (64, 128, 1, 4, 4, 4), (64, 128, 1, 2, 4, 5), (128, 64, 1, 4, 4, 5), (64, 64, 1, 4, 4, 6),
        (128, 128, 1, 8, 8, 4),
    ),
    ("long", 8): (
        (64, 128, 1, 6, 4, 4), (64, 256, 1, 6, 4, 3), (64, 128, 1, 4, 4, 6), (32, 64, 4, 3, 4, 5),
        (64, 128, 1, 12, 4, 4), (128, 128, 1, 12, 4, 4),
    ),
    ("long", 32): (
        (64, 128, 1, 6, 4, 4), (64, 128, 1, 4, 4, 5), (128, 64, 1, 8, 4, 5), (64, 64, 1, 6, 4, 6),
        (128, 128, 1, 8, 8, 4),
    ),
    ("wide", 8): (
        (64, 128, 1, 1, 4, 4), (64, 256, 1, 1, 4, 3), (128, 128, 1, 1, 4, 4), (128, 128, 1, 1, 8, 4),
        (32, 64, 4, 1, 4, 5), (64, 128, 1, 2, 4, 4),
    ),
    ("wide", 32): (
        (64, 128, 1, 1, 4, 4), (64, 64, 1, 1, 4, 6), (128, 64, 1, 1, 4, 4), (128, 128, 1, 1, 8, 3),
    ),
}  # fmt: skip


def candidates(case: Case, rows: int) -> list[Tiles]:
    """Return the tiles to time, the table's own first."""
    shape = shape_class(case.num_weight_rows, case.in_size)
    default = default_tiles(rows, case.num_weight_rows, case.in_size)
    tiles: list[Tiles]
    if rows == 1:
        if case.in_size == 1024:
            shape = "short"
        grid = VECTOR_GRID[shape if shape in VECTOR_GRID else "deep"]
        tiles = [VectorTiles(*entry) for entry in grid if entry[0] >= 2 or case.kind != "glu"]
        tiles += [VectorTiles(default.block_n, default.block_k, default.num_warps, "")]
    else:
        shape = "wide" if shape == "head" else shape
        grid = ROW_GRID[shape, 8 if row_class(rows) <= 16 else 32]
        tiles = [RowTiles(*entry) for entry in grid[: 4 if rows == 16 else None]]
        first = RowTiles(*grid[0])
        tiles += [RowTiles(*grid[0], evict="evict_first")] if rows == 8 and first.warps_k == 1 else []
    return [default] + [entry for entry in tiles if entry != default]


def label(tiles: Tiles) -> str:
    if isinstance(tiles, VectorTiles):
        return f"{tiles.block_n}x{tiles.block_k},w{tiles.num_warps}{',keep' if not tiles.evict else ''}"
    text = f"{tiles.block_n}x{tiles.block_k}"
    text += f"*{tiles.warps_k}" if tiles.warps_k > 1 else ""
    return text + f",s{tiles.split},w{tiles.num_warps},p{tiles.num_stages}{',ef' if tiles.evict else ''}"
