"""Copies of whole pages against plain indexing, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from areno.kernels.pages import copy_pages


@pytest.mark.parametrize("shape", [(3, 7, 4, 2, 16), (2, 9, 2, 4, 1030)])
def test_pages_are_copied_in_every_layer_and_no_others_change(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(shape, generator=draw) for _ in range(2))
    expected = [keys.clone(), values.clone()]
    sources, targets = torch.tensor([2, 5, 2]), torch.tensor([6, 1, 4])
    for store in expected:
        store[:, targets] = store[:, sources]
    copy_pages(keys, values, sources, targets)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_an_empty_list_changes_nothing() -> None:
    keys, values = torch.ones(1, 2, 3), torch.ones(1, 2, 3)
    none = torch.zeros(0, dtype=torch.int64)
    copy_pages(keys, values, none, none)
    assert (keys == 1).all() and (values == 1).all()
