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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("ranks", "size", "tokens", "turn"), [(2, 16, 6, 0), (2, 96, 3, 1), (4, 1024, 2, 0), (3, 40, 1, 1)])
def test_all_ranks_have_the_bits_of_a_sum_in_their_order(ranks: int, size: int, tokens: int, turn: int, dtype: torch.dtype) -> None:
    parts, signals = memory_of(ranks, size, dtype)
    weight, start = torch.rand(size).to(dtype), torch.randn(tokens, size).to(dtype)
    total = torch.zeros(tokens, size)
    for part in parts:
        total += part[turn, :tokens].float()
    expected, normed = start.clone(), torch.empty_like(start)
    add_rms_norm(expected, total.to(dtype), weight, 1e-5, normed)
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


def test_the_stop_word_ends_the_wait_for_a_rank_that_is_gone() -> None:
    parts, signals = memory_of(2, 16, torch.float32)
    x, out = torch.zeros(2, 16), torch.zeros(2, 16)
    peer_add_rms_norm(x, parts, signals, 0, torch.ones(16), 1e-5, out, rank=0, stop=torch.ones(1, dtype=torch.int32))
    assert not signals[0].any() and signals[1][0, :2, 0].tolist() == [1, 1]


def test_more_rows_than_there_is_memory_for_are_refused() -> None:
    parts, signals = memory_of(2, 16, torch.float32)
    x = torch.zeros(ROWS + 1, 16)
    with pytest.raises(AssertionError, match="7 tokens of 6"):
        peer_add_rms_norm(x, parts, signals, 0, torch.ones(16), 1e-5, x.clone(), rank=0, stop=torch.zeros(1, dtype=torch.int32))
