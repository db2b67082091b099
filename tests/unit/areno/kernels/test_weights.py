"""Passes over many tensors at once, in Triton's interpreter: digests, flags and exchanges against torch, tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from areno.kernels import weights
from areno.kernels.weights import Exchange, Run, copy_runs, inspect_pairs
from areno.weights.digest import MASK64, bits_of, digest


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BLOCK", 64)
    monkeypatch.setattr(weights, "BLOCKS", 2)


def _pairs(dtype: torch.dtype, sizes: list[int], offset: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = [(torch.randn(size + offset, generator=generator) * 50).to(dtype)[offset:] for size in sizes for _ in range(2)]
    return list(zip(made[::2], made[1::2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0, 1])
def test_each_tensors_digest_and_flags_are_its_own(dtype: torch.dtype, offset: int) -> None:
    """Equal, changed, NaN and infinite tensors of sizes around a span, aligned or not, in one launch."""
    pairs = _pairs(dtype, [1, 63, 127, 128, 129, 400, 300, 300], offset)
    pairs[3] = (pairs[3][0], pairs[3][0].clone())
    pairs[5][0][399] = float("nan")
    pairs[6][0][0] = -float("inf")
    pairs[7] = (pairs[7][0], pairs[7][0].clone())
    pairs[7][1][250] += 1
    rows = inspect_pairs(pairs).tolist()
    for number, (row, (staged, live)) in enumerate(zip(rows, pairs)):
        assert row[0] & MASK64 == digest(staged)
        assert bool(row[1]) == bool(torch.isfinite(staged).all()) == (number not in (5, 6))
        assert bool(row[2]) == (not torch.equal(bits_of(staged), bits_of(live))) == (number != 3)


def test_flags_of_one_tensor_do_not_reach_its_neighbours_and_shapes_do_not_matter() -> None:
    pairs = [
        (torch.ones(20, 30), torch.ones(20, 30)),
        (torch.full((7, 11), float("nan")), torch.ones(7, 11)),
        (torch.ones(3), torch.ones(3)),
    ]
    assert [row[1:] for row in inspect_pairs(pairs).tolist()] == [[1, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("offset", [0, 1])
def test_runs_are_copied_and_nothing_beside_them(dtype: torch.dtype, offset: int) -> None:
    """Sizes around a span, whole numbers of wide words and not, in one call."""
    pairs = _pairs(dtype, [1, 63, 128, 129, 1024, 400], offset)
    homes = [torch.cat([target, target[:1]]) for target, _ in pairs]
    ends = [home[-1].clone() for home in homes]
    copy_runs(torch.device("cpu"), [Run(home.data_ptr(), source.data_ptr(), source.nbytes) for home, (_, source) in zip(homes, pairs)])
    for home, end, (_, source) in zip(homes, ends, pairs):
        assert torch.equal(bits_of(home[:-1]), bits_of(source)) and torch.equal(bits_of(home[-1:]), bits_of(end.reshape(1)))
    copy_runs(torch.device("cpu"), [])


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_getting_ready_launches_what_an_update_does_in_the_forms_of_large_tensors(
    dtype: torch.dtype, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = {name: [] for name in ("_copy_kernel", "_inspect_kernel", "_swap_kernel")}

    class Recorder:
        def __init__(self, name: str) -> None:
            self._name, self._kernel = name, getattr(weights, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                launched[self._name].append((options["WORD"], options["ALIGNED"], options.get("PARTS"), options.get("STRIDED")))
                self._kernel[grid](*arguments, **options)

            return launch

    for name in launched:
        monkeypatch.setattr(weights, name, Recorder(name))
    weights.warm_up(dtype, torch.device("cpu"), cut=cut)
    word = weights._WORDS[dtype.itemsize][0]
    assert launched["_swap_kernel"] == [(weights._WORDS[8][0], True, None, None)]
    assert launched["_inspect_kernel"] == [(word, True, cut, None)]
    assert set(launched["_copy_kernel"]) == {(weights._WORDS[8][0], True, None, strided) for strided in {False, cut}}


def test_runs_without_bytes_and_more_runs_than_one_launch_takes_are_copied() -> None:
    sources = [torch.arange(size, dtype=torch.float32) for size in [0, 3, 150, 0, *range(1, 150), 0]]
    targets = [torch.full_like(source, -1.0) for source in sources]
    copy_runs(torch.device("cpu"), [Run(target.data_ptr(), source.data_ptr(), source.nbytes) for target, source in zip(targets, sources)])
    assert all(torch.equal(target, source) for target, source in zip(targets, sources))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shapes", [[(5, 40, 3, 16), (1, 9, 2, 7), (64, 16, 0, 8)], [(7, 129, 128, 1), (33, 65, 1, 63), (4, 200, 0, 200)]])
def test_columns_of_rows_are_put_one_row_after_the_other(dtype: torch.dtype, shapes: list[tuple[int, int, int, int]]) -> None:
    """Rows, their length, the first column and how many, beside a run that is not cut."""
    sources = [torch.randint(0, 200, (rows, length)).to(dtype) for rows, length, _, _ in shapes]
    wanted = [source[:, first : first + width].contiguous() for source, (_, _, first, width) in zip(sources, shapes)]
    targets = [torch.zeros_like(want) for want in wanted]
    item = dtype.itemsize
    runs = [
        Run(target.data_ptr(), source.data_ptr() + first * item, width * item, rows, length * item)
        for target, source, (rows, length, first, width) in zip(targets, sources, shapes)
    ]
    copy_runs(torch.device("cpu"), runs)
    assert all(torch.equal(target, want) for target, want in zip(targets, wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize(("sizes", "offset"), [([128, 1024, 64], 0), ([1, 77, 129, 300], 0), ([5, 200], 1)])
def test_contents_change_places_and_come_back(dtype: torch.dtype, sizes: list[int], offset: int) -> None:
    pairs = _pairs(dtype, sizes, offset)
    before = [(one.clone(), other.clone()) for one, other in pairs]
    exchange = Exchange(pairs)
    exchange.run()
    for (one, other), (was, other_was) in zip(pairs, before):
        assert torch.equal(bits_of(one), bits_of(other_was)) and torch.equal(bits_of(other), bits_of(was))
    exchange.run()
    assert all(torch.equal(bits_of(one), bits_of(was)) for (one, _), (was, _) in zip(pairs, before))
