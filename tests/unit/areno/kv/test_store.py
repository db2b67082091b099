"""Page copies: lists are cut so that the copies of a part may run in any order, and the parts give what the whole list means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areno.kv.store import KVStore, independent_copies


def copies(rng: np.random.Generator, pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a list as admission makes it: a page that was read may be evicted and then be written, once."""
    read: list[int] = []
    written: set[int] = set()
    sources, targets = [], []
    for _ in range(int(rng.integers(1, 12))):
        clean = [page for page in range(pages) if page not in written]
        source = int(rng.choice(clean))
        evicted = [page for page in read if page not in written and page != source]
        target = int(rng.choice(evicted if evicted and rng.random() < 0.5 else [page for page in clean if page != source]))
        sources.append(source)
        targets.append(target)
        read.append(source)
        written.add(target)
    return np.array(sources), np.array(targets)


def test_parts_in_order_give_the_whole_lists_meaning_whatever_the_order_within() -> None:
    rng = np.random.default_rng(0)
    longest = 0
    for _ in range(300):
        sources, targets = copies(rng, 20)
        expected, found = np.arange(20), np.arange(20)
        expected[targets] = expected[sources]
        parts = independent_copies(sources, targets)
        longest = max(longest, len(parts))
        assert np.concatenate([np.arange(sources.size)[part] for part in parts]).tolist() == list(range(sources.size))
        for part in parts:
            assert not set(sources[part].tolist()) & set(targets[part].tolist()), "a page is read and written in one part"
            for place in rng.permutation(np.arange(sources.size)[part]):
                found[targets[place]] = found[sources[place]]
        assert found.tolist() == expected.tolist()
    assert longest > 2, "no list had to be cut"


def test_copies_without_a_hazard_stay_one_launch() -> None:
    assert independent_copies(np.array([4, 4, 5]), np.array([7, 8, 9])) == [slice(0, 3)]
    assert independent_copies(np.array([], dtype=np.int64), np.array([], dtype=np.int64)) == []


@pytest.mark.parametrize(("sources", "targets"), [([4, 7], [7, 8]), ([4], [4]), ([4, 5], [7, 7])])
def test_a_list_that_means_nothing_is_refused(sources: list[int], targets: list[int]) -> None:
    with pytest.raises(AssertionError, match=r"page \d is"):
        independent_copies(np.array(sources), np.array(targets))


def test_the_store_copies_keys_and_values_of_every_layer_and_touches_no_other_page() -> None:
    store = KVStore(num_layers=2, num_pages=9, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in (store.keys, store.values):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    before = store.keys.clone(), store.values.clone()
    store.copy(np.array([2, 3, 2]), np.array([6, 2, 8]))
    for tensor, old in zip((store.keys, store.values), before):
        assert torch.equal(tensor[:, [6, 2, 8]], old[:, [2, 3, 2]])
        assert torch.equal(tensor[:, [0, 1, 3, 4, 5, 7]], old[:, [0, 1, 3, 4, 5, 7]])


def test_a_copy_of_a_pages_head_leaves_zero_behind_it() -> None:
    store = KVStore(num_layers=2, num_pages=6, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in (store.keys, store.values):
        tensor.normal_()
        tensor[:, 3, 1:] = float("nan")
    store.copy(np.array([3, 2]), np.array([4, 5]), np.array([1, 4]))
    for tensor in (store.keys, store.values):
        assert torch.equal(tensor[:, 4, :1], tensor[:, 3, :1]) and not tensor[:, 4, 1:].any()
        assert torch.equal(tensor[:, 5], tensor[:, 2])
