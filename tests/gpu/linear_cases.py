"""The products of the target models, and the tiles that `check_linear` times for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areno.kernels.linear import ResidentTiles, RowTiles, Tiles, VectorTiles, default_tiles, shape_class


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

# One row: block_n, block_k, warps; block_n 1 holds no gate and up.
VECTOR_GRID = {
    "narrow": ((4, 1024, 8), (2, 1024, 4), (4, 512, 4), (1, 1024, 4), (1, 2048, 4), (2, 2048, 8)),
    "short": ((4, 1024, 4), (8, 1024, 8), (2, 1024, 4), (4, 512, 4), (1, 1024, 4)),
    "deep": (
        (1, 512, 2),
        (1, 1024, 2),
        (1, 1024, 4),
        (1, 2048, 2),
        (1, 2048, 4),
        (1, 2048, 8),
        (2, 512, 2),
        (2, 512, 4),
        (2, 1024, 4),
        (2, 2048, 4),
        (2, 2048, 8),
        (4, 1024, 4),
    ),
    "normed": ((2, 1024, 4), (4, 512, 4)),
}
# One row of 4096: block_n, warps, stages, programs of a multiprocessor.
RESIDENT_GRID = ((4, 8, 3, 3), (4, 8, 3, 2), (2, 8, 4, 4), (2, 8, 3, 4), (2, 4, 4, 4), (8, 8, 3, 1))
# More rows: block_n, block_k, warps_k, split, warps, stages.
ROW_GRID = {
    "narrow": ((16, 64, 4, 1, 4, 6), (16, 128, 4, 1, 4, 4), (16, 64, 4, 2, 4, 6), (32, 64, 4, 4, 4, 4), (64, 128, 1, 8, 4, 4)),
    "short": ((16, 64, 4, 1, 4, 5), (32, 64, 4, 1, 4, 5), (64, 128, 1, 2, 4, 5), (64, 128, 1, 4, 4, 3)),
    "square": ((64, 128, 1, 4, 4, 4), (64, 128, 1, 2, 4, 6), (64, 256, 1, 4, 4, 3), (64, 128, 1, 8, 4, 4), (32, 64, 4, 2, 4, 5)),
    "long": ((64, 128, 1, 6, 4, 4), (64, 128, 1, 4, 4, 6), (64, 256, 1, 6, 4, 3), (64, 128, 1, 12, 4, 4)),
    "wide": ((64, 128, 1, 1, 4, 4), (64, 256, 1, 1, 4, 3), (128, 128, 1, 1, 4, 4), (64, 128, 1, 1, 4, 6)),
}  # fmt: skip
# From 32 rows on, where the rows' own loads count too.
MANY_ROW_GRID = {
    "narrow": (
        (64, 128, 1, 8, 4, 4), (64, 128, 1, 4, 4, 4), (32, 128, 1, 4, 4, 4), (32, 128, 1, 4, 4, 6), (64, 64, 1, 8, 4, 6),
        (32, 256, 1, 4, 4, 3), (32, 64, 1, 4, 4, 6), (16, 128, 1, 2, 4, 4), (64, 128, 1, 8, 8, 4),
    ),
    "short": (
        (64, 128, 1, 2, 4, 4), (64, 128, 1, 1, 4, 4), (32, 128, 1, 1, 4, 4), (32, 256, 1, 1, 4, 3), (64, 64, 1, 2, 4, 6),
        (64, 64, 1, 1, 4, 8), (128, 128, 1, 2, 8, 3), (64, 256, 1, 2, 4, 3), (32, 128, 1, 1, 8, 4), (64, 128, 1, 1, 8, 4),
    ),
    "square": ((64, 128, 1, 2, 4, 5), (64, 128, 1, 4, 4, 4), (128, 128, 1, 4, 8, 3), (64, 128, 1, 2, 8, 5), (128, 64, 1, 4, 8, 4)),
    "long": ((64, 128, 1, 4, 4, 5), (64, 128, 1, 8, 4, 4), (128, 128, 1, 4, 8, 3), (128, 64, 1, 4, 8, 4)),
    "wide": ((64, 128, 1, 1, 4, 4), (128, 128, 1, 1, 8, 3), (128, 64, 1, 1, 8, 4), (128, 64, 1, 1, 4, 4), (64, 64, 1, 1, 4, 6)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to compute a case: with `apart` the norm is a kernel of its own before the product."""

    tiles: Tiles
    pdl: bool = False
    apart: bool = False


def trials(case: Case, rows: int) -> list[Trial]:
    """Return what to time: the table's tiles, also with late dependents, the grid, and products after a norm of their own."""
    normed, shape = case.kind != "add", shape_class(case.num_weight_rows, case.in_size)
    default = default_tiles(rows, case.num_weight_rows, case.in_size, normed=normed)
    bare = default_tiles(rows, case.num_weight_rows, case.in_size)
    if rows == 1:
        fused, split = vector_tiles(case, shape, normed)
    else:
        grid = ROW_GRID if rows < 32 else MANY_ROW_GRID
        fused = [RowTiles(*entry) for entry in grid["wide" if shape.endswith("head") else shape]]
        split = [bare]
    found = [Trial(default), Trial(default, pdl=True)] + [Trial(tiles) for tiles in fused if tiles != default]
    return found + ([Trial(tiles, apart=True) for tiles in split] if normed else [])


def vector_tiles(case: Case, shape: str, normed: bool) -> tuple[list[Tiles], list[Tiles]]:
    """Return the tiles of one row to time in a product of its kind, and after a norm of its own."""
    least = 2 if case.kind == "glu" else 1
    if case.in_size < 2048 or shape == "narrow":
        grid = VECTOR_GRID["short" if case.in_size < 2048 else shape]
        return [VectorTiles(*entry) for entry in grid if entry[0] >= least], []
    resident: list[Tiles] = [ResidentTiles(*entry) for entry in RESIDENT_GRID] if case.in_size == 4096 else []
    bare: list[Tiles] = [VectorTiles(*entry) for entry in VECTOR_GRID["deep"] if entry[0] >= least]
    if not normed:
        return bare + resident[:3], []
    if case.kind == "head":
        bare = bare[2:5]
    return [VectorTiles(*entry) for entry in VECTOR_GRID["normed"]] + resident, bare


def label(trial: Trial) -> str:
    tiles = trial.tiles
    if isinstance(tiles, VectorTiles):
        text = f"{tiles.block_n}x{tiles.block_k},w{tiles.num_warps}"
    elif isinstance(tiles, ResidentTiles):
        text = f"{tiles.block_n}xK,w{tiles.num_warps},p{tiles.num_stages},m{tiles.num_programs}"
    else:
        text = f"{tiles.block_n}x{tiles.block_k}" + (f"*{tiles.warps_k}" if tiles.warps_k > 1 else "")
        text += f",s{tiles.split},w{tiles.num_warps},p{tiles.num_stages}"
    return text + (" late" if trial.pdl else "")
