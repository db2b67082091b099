"""Page copies on the card give what the whole list means, also where a page is read first and written later in the list."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areno.kv.store import KVStore

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_with_pages_that_are_evicted_on_the_way(dtype: torch.dtype) -> None:
    store = KVStore(num_layers=3, num_pages=40, page_size=64, num_kv_heads=8, head_dim=128, dtype=dtype, device=torch.device("cuda"))
    for tensor in (store.keys, store.values):
        tensor.copy_(torch.randn(tensor.shape, device="cuda"))
    rng = np.random.default_rng(0)
    for _ in range(20):
        order = rng.permutation(np.arange(2, 40))
        # Each page is read before it is written: 0 -> 1, 2 -> 0, 3 -> 2, ...; and one page is read several times.
        sources, targets = np.append(order[[0, 2, 3, 4, 5]], [order[9]] * 3), order[[1, 0, 2, 3, 4, 6, 7, 8]]
        expected = [tensor.clone() for tensor in (store.keys, store.values)]
        for tensor in expected:
            tensor[:, targets] = tensor[:, sources]
        store.copy(sources, targets)
        assert torch.equal(store.keys, expected[0]) and torch.equal(store.values, expected[1])
