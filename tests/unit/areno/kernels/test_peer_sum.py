"""The sum over ranks inside a norm, in Triton's interpreter: one rank's launch, with the others' parts and signals set by hand."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from areno.kernels.norm import add_rms_norm
from areno.kernels.peer_sum import peer_add_rms_norm

ROWS = 6


def memory_of(ranks: int, size: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(ranks)
    parts = [torch.randn(2, ROWS, size, generator=draw).to(dtype) for _ in range(ranks)]
    return parts, [torch.zeros(2, ROWS, ranks, dtype=torch.int32) for _ in range(ranks)]


def added_up(parts: list[torch.Tensor], turn: int, tokens: int) -> torch.Tensor:
    """Return the sum of all parts in the order of the ranks, in fp32."""
    total = torch.zeros(tokens, parts[0].shape[2])
    for part in parts:
        total += part[turn, :tokens].float()
    return total


def reference(start: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return residual and norm as one rank's kernel makes them of a sum that is there."""
    expected, normed = start.clone(), torch.empty_like(start)
    add_rms_norm(expected, total.to(start.dtype), weight, 1e-5, normed)
    return expected, normed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("ranks", "size", "tokens", "turn"), [(2, 16, 6, 0), (2, 96, 3, 1), (4, 1024, 2, 0), (3, 40, 1, 1)])
def test_all_ranks_have_the_bits_of_a_sum_in_their_order(ranks: int, size: int, tokens: int, turn: int, dtype: torch.dtype) -> None:
    parts, signals = memory_of(ranks, size, dtype)
    weight, start = torch.rand(size).to(dtype), torch.randn(tokens, size).to(dtype)
    expected, normed = reference(start, added_up(parts, turn, tokens), weight)
    for rank in range(ranks):
        for peer in range(ranks):
            signals[rank][turn, :tokens, peer] = int(peer != rank)
        x, out = start.clone(), torch.full_like(start, math.nan)
        peer_add_rms_norm(x, parts, signals, turn, weight, 1e-5, out, rank=rank, stop=torch.zeros(1, dtype=torch.int32))
        assert torch.equal(x, expected) and torch.equal(out, normed)
        assert not signals[rank].any(), "signals are taken back"
        told = [peer for peer in range(ranks) if signals[peer].any()]
        assert told == [peer for peer in range(ranks) if peer != rank]
        for peer in told:
            wanted = torch.zeros_like(signals[peer])
            wanted[turn, :tokens, rank] = 1
            assert torch.equal(signals[peer], wanted)
            signals[peer].zero_()


@pytest.mark.parametrize(("ranks", "size", "tokens", "turn"), [(4, 96, 6, 0), (4, 64, 5, 1), (3, 40, 4, 0), (2, 16, 2, 1)])
def test_shared_sums_are_added_once_and_handed_on(ranks: int, size: int, tokens: int, turn: int) -> None:
    dtype = torch.float16
    parts, signals = memory_of(ranks, size, dtype)
    weight, start = torch.rand(size).to(dtype), torch.randn(tokens, size).to(dtype)
    total = added_up(parts, turn, tokens)
    expected, normed = reference(start, total, weight)
    adder = torch.arange(tokens) % ranks
    other = 1 - turn
    kept = [part.clone() for part in parts]
    for rank in range(ranks):
        own = adder == rank
        for memory, part in zip(parts, kept, strict=True):
            memory.copy_(part)
        # What the others would have done: their parts are there for rows of this rank, their sums for theirs.
        parts[rank][turn, :tokens][~own] = total[~own].to(dtype)
        for peer in range(ranks):
            signals[rank][turn, :tokens, peer] = ((adder == peer) | own).int() * int(peer != rank)
        x, out = start.clone(), torch.full_like(start, math.nan)
        stop = torch.zeros(1, dtype=torch.int32)
        peer_add_rms_norm(x, parts, signals, turn, weight, 1e-5, out, rank=rank, stop=stop, shared=True)
        assert torch.equal(x, expected) and torch.equal(out, normed)
        assert not signals[rank].any(), "signals are taken back"
        for peer in range(ranks):
            if peer == rank:
                continue
            wanted = torch.zeros_like(signals[peer])
            wanted[turn, :tokens, rank] = (own | (adder == peer)).int()
            assert torch.equal(signals[peer], wanted), "told by rows: each hears of sums of this rank's and of parts of its own rows"
            signals[peer].zero_()
            written = parts[peer][turn, :tokens]
            assert torch.equal(written[own], total[own].to(dtype)) and torch.equal(written[~own], kept[peer][turn, :tokens][~own])
            assert torch.equal(parts[peer][other], kept[peer][other]) and torch.equal(parts[peer][turn, tokens:], kept[peer][turn, tokens:])


def test_the_stop_word_ends_the_wait_for_a_rank_that_is_gone() -> None:
    parts, signals = memory_of(2, 16, torch.float32)
    x, out = torch.zeros(2, 16), torch.zeros(2, 16)
    peer_add_rms_norm(x, parts, signals, 0, torch.ones(16), 1e-5, out, rank=0, stop=torch.ones(1, dtype=torch.int32))
    assert not signals[0].any() and signals[1][0, :2, 0].tolist() == [1, 1]
    peer_add_rms_norm(x, parts, signals, 0, torch.ones(16), 1e-5, out, rank=0, stop=torch.ones(1, dtype=torch.int32), shared=True)
    assert not signals[0].any() and signals[1][0, :2, 0].tolist() == [1, 1]


def test_more_rows_than_there_is_memory_for_are_refused() -> None:
    parts, signals = memory_of(2, 16, torch.float32)
    x = torch.zeros(ROWS + 1, 16)
    stop = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="7 tokens of 6"):
        peer_add_rms_norm(x, parts, signals, 0, torch.ones(16), 1e-5, x.clone(), rank=0, stop=stop)
    with pytest.raises(AssertionError, match="1 tokens are not shared by 2 ranks"):
        peer_add_rms_norm(x[:1], parts, signals, 0, torch.ones(16), 1e-5, x[:1].clone(), rank=0, stop=stop, shared=True)
