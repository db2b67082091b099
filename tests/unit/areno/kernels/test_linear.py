"""The few-row products against fp64 torch, in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional

from areno.kernels import linear
from areno.kernels.linear import (
    ResidentTiles,
    RowTiles,
    VectorTiles,
    allocate_workspace,
    default_tiles,
    fused_norm_gate_up,
    fused_norm_linear,
    linear_add,
    row_class,
    shape_class,
)
from tests.crossed import every_pair

EPS = 1e-6
ROWS = [RowTiles(16, 32), RowTiles(16, 16, warps_k=2), RowTiles(32, 16, split=3), RowTiles(16, 16, warps_k=2, split=2)]
ONE_ROW = [VectorTiles(4, 64), VectorTiles(2, 32), ResidentTiles(4), ResidentTiles(2)]
CASES = [(1, tiles) for tiles in ONE_ROW] + [(rows, tiles) for rows, tiles in zip((2, 8, 5, 17), ROWS)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(x: torch.Tensor, norm_weight: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x = x.double()
    if norm_weight is not None:
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * norm_weight.double()
    return functional.linear(x, weight.double(), None if bias is None else bias.double())


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.isfinite().all()
    assert (out.double() - expected).norm() <= 1e-6 * expected.norm()


@every_pair(shape=[(16, 96), (21, 80)], case=CASES, norm=[True, False])
def test_product_with_norm_and_bias_equals_fp64(shape, case, norm):
    (num_out, in_size), (rows, tiles) = shape, case
    x, weight, bias = draw(rows, in_size), draw(num_out, in_size, seed=1), draw(num_out, seed=2)
    norm_weight = draw(in_size, seed=3) if norm else None
    out = torch.full((rows + 1, num_out + 3), torch.nan)
    workspace = allocate_workspace(x.device, num_cells=1 << 16, num_tiles=16)
    workspace.partials.fill_(torch.nan)
    fused_norm_linear(x, norm_weight, EPS, weight, bias, out[:rows, :num_out], workspace=workspace, tiles=tiles)
    assert_close(out[:rows, :num_out], reference(x, norm_weight, weight, bias))
    assert out[rows].isnan().all() and out[:, num_out:].isnan().all()
    assert not workspace.arrivals.any()


@pytest.mark.parametrize(("rows", "tiles"), CASES)
def test_gate_up_equals_fp64(rows, tiles):
    size, in_size = 13, 80
    x, norm_weight, weight = draw(rows, in_size), draw(in_size, seed=1), draw(2 * size, in_size, seed=2)
    bias_N = draw(2 * size, seed=3) if rows % 2 else None
    out = torch.full((rows, size), torch.nan)
    fused_norm_gate_up(x, norm_weight, EPS, weight, bias_N, out, workspace=allocate_workspace(x.device), tiles=tiles)
    gate, up = reference(x, norm_weight, weight, bias_N).chunk(2, -1)
    assert_close(out, functional.silu(gate) * up)


@pytest.mark.parametrize(("rows", "tiles"), CASES)
def test_residual_addition_equals_fp64(rows, tiles):
    num_out, in_size = 21, 96
    x, weight, residual = draw(rows, in_size), draw(num_out, in_size, seed=1), draw(rows, num_out, seed=2)
    bias_N = draw(num_out, seed=3) if rows % 2 else None
    expected = reference(x, None, weight, bias_N) + residual.double()
    linear_add(x, weight, bias_N, residual, workspace=allocate_workspace(x.device), tiles=tiles)
    assert_close(residual, expected)


@pytest.mark.parametrize("kind", ["norm", "glu", "add"])
def test_resident_programs_walk_over_all_tiles(kind, monkeypatch):
    monkeypatch.setattr(linear, "_MULTIPROCESSORS", 2)
    num_out, in_size, tiles = 45, 80, ResidentTiles(4, num_programs=1)
    x, weight, norm_weight = draw(1, in_size), draw(2 * num_out if kind == "glu" else num_out, in_size, seed=1), draw(in_size, seed=2)
    out = torch.full((1, num_out), torch.nan)
    if kind == "add":
        out = draw(1, num_out, seed=3)
        expected = reference(x, None, weight, None) + out.double()
        linear_add(x, weight, None, out, tiles=tiles)
    elif kind == "glu":
        gate, up = reference(x, norm_weight, weight, None).chunk(2, -1)
        expected = functional.silu(gate) * up
        fused_norm_gate_up(x, norm_weight, EPS, weight, None, out, tiles=tiles)
    else:
        expected = reference(x, norm_weight, weight, None)
        fused_norm_linear(x, norm_weight, EPS, weight, None, out, tiles=tiles)
    assert_close(out, expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_product_is_rounded_before_it_meets_the_residual(rows):
    weight, x = torch.full((16, 16), 1.0, dtype=torch.float16), torch.zeros(rows, 16, dtype=torch.float16)
    x[:, 0], x[:, 1] = 2048.0, 1.0  # 2049 rounds to 2048 in fp16, and 2048 + 1 does so again; 2050 is a number
    residual = torch.full((rows, 16), 1.0, dtype=torch.float16)
    linear_add(x, weight, None, residual)
    assert (residual == 2048.0).all()


@pytest.mark.parametrize("rows", [1, 4])
def test_half_precision_rows_give_fp32_logits(rows):
    x, weight, norm_weight = draw(rows, 64).half(), draw(20, 64, seed=1).half(), draw(64, seed=2).half()
    logits = torch.full((rows, 20), torch.nan)
    fused_norm_linear(x, norm_weight, EPS, weight, None, logits)
    expected = reference(x, norm_weight, weight, None)
    assert (logits.double() - expected).norm() <= (1e-6 if rows == 1 else 1e-3) * expected.norm()


@pytest.mark.parametrize("tiles", ROWS)
def test_other_rows_do_not_change_a_row(tiles):
    x, weight, norm_weight = draw(8, 96), draw(32, 96, seed=1), draw(96, seed=2)
    other = x.clone()
    other[:3], other[4:] = 100 * draw(3, 96, seed=3), -draw(4, 96, seed=4)
    outs = [torch.full((8, 32), torch.nan) for _ in range(2)]
    for rows, out in zip((x, other), outs):
        fused_norm_linear(rows, norm_weight, EPS, weight, None, out, workspace=allocate_workspace(x.device), tiles=tiles)
    assert torch.equal(outs[0][3], outs[1][3])


@pytest.mark.parametrize("rows", [1, 2, 24, 64])
@pytest.mark.parametrize(("num_out", "in_size"), [(5, 16), (24, 48), (20, 272)])
def test_tiles_of_the_tables_fit_small_weights(num_out, in_size, rows):
    x, weight = draw(rows, in_size), draw(num_out, in_size, seed=1)
    for tiles in (None, default_tiles(rows, num_out, in_size)):
        out = torch.full((rows, num_out), torch.nan)
        fused_norm_linear(x, None, EPS, weight, None, out, workspace=allocate_workspace(x.device), tiles=tiles)
        assert_close(out, reference(x, None, weight, None))


def test_split_shrinks_to_the_workspace():
    x, weight = draw(8, 128), draw(32, 128, seed=1)
    out = torch.full((8, 32), torch.nan)
    workspace = allocate_workspace(x.device, num_cells=2 * 2 * 17 * 8, num_tiles=2)
    fused_norm_linear(x, None, EPS, weight, None, out, workspace=workspace, tiles=RowTiles(16, 16, split=8))
    assert_close(out, reference(x, None, weight, None))


def test_every_target_shape_has_tiles_of_its_class():
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
    classes = ["short", "narrow", "short", "narrow", "square", "square", "wide", "long"]
    assert [shape_class(*shape) for shape in shapes] == classes
    assert {row_class(rows) for rows in range(1, 65)} == {1, 8, 16, 32, 64}
    for rows in (1, 2, 16, 24, 64):
        for num_weight_rows, in_size in [*shapes, (151936, 1024), (151936, 4096)]:
            tiles = default_tiles(rows, num_weight_rows, in_size)
            assert isinstance(tiles, VectorTiles) == (rows == 1)
            normed = default_tiles(rows, num_weight_rows, in_size, normed=True)
            assert isinstance(normed, ResidentTiles) == (rows == 1 and in_size == 4096) or in_size == 12288


@pytest.mark.parametrize("rows", [1, 2, 24])
@pytest.mark.parametrize("normed", [True, False])
def test_gate_and_up_find_tiles_of_whole_pairs_whatever_their_size(rows, normed):
    sizes = (512, 2048, 12288, 24576, 1 << 17)
    assert all(
        default_tiles(rows, weight_rows, in_size, normed=normed, glu=True).block_n % 2 == 0
        for weight_rows in sizes
        for in_size in (1024, 4096, 5120, 12288, 16384)
    )


def test_gate_and_up_of_one_row_and_a_square_weight_are_multiplied():
    x, weight = draw(1, 2048), draw(2048, 2048, seed=1) / 45
    out = torch.full((1, 1024), torch.nan)
    fused_norm_gate_up(x, None, EPS, weight, None, out)
    gate, up = (x @ weight.t()).chunk(2, dim=1)
    assert_close(out, torch.nn.functional.silu(gate) * up)


def test_resident_tiles_of_longer_rows_fill_no_more_memory():
    sizes = {in_size: default_tiles(1, 1 << 15, in_size, normed=True) for in_size in (2048, 4096, 5120, 8192, 16384, 32768)}
    assert [getattr(sizes[in_size], "block_n", 0) for in_size in (2048, 4096, 5120, 8192, 16384)] == [4, 4, 2, 2, 2]
    assert isinstance(sizes[32768], VectorTiles)


def test_more_rows_than_the_kernels_take_are_refused():
    with pytest.raises(AssertionError, match="use cuBLAS"):
        linear_add(draw(65, 16), draw(16, 16), None, draw(65, 16))
