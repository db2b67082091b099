"""The probe's kernel: every word, and none behind the last."""

from __future__ import annotations

import pytest
import torch

from areno.kernels.echo import echo


@pytest.mark.parametrize("count", [1, 255, 256, 700])
def test_words_are_stored_changed_by_the_mask_and_no_others(count: int) -> None:
    source = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(count))
    target = torch.full((count + 64,), 9, dtype=torch.int32)
    echo(source, target[:count], 0x5A5A_A5A5)
    assert torch.equal(target[:count], source ^ 0x5A5A_A5A5) and target[count:].tolist() == [9] * 64
