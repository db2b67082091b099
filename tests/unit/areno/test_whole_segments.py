"""Storage that fills the units in which a CUDA device's memory is taken."""

from __future__ import annotations

import pytest
import torch

from areno.whole_segments import SMALLEST_BYTES, UNIT_BYTES, full_segment, whole_bytes

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("num_bytes", "taken"),
    [
        (0, 0),
        (SMALLEST_BYTES - 1, SMALLEST_BYTES - 1),
        (SMALLEST_BYTES, SMALLEST_BYTES),
        (SMALLEST_BYTES + 1, SMALLEST_BYTES + UNIT_BYTES),
        (10**9, 477 * UNIT_BYTES),
    ],
)
def test_large_storage_takes_whole_units_on_a_cuda_device(num_bytes: int, taken: int) -> None:
    assert whole_bytes(num_bytes, CUDA) == taken
    assert whole_bytes(num_bytes, torch.device("cpu")) == num_bytes


def test_a_tensor_is_contiguous_and_full_and_takes_no_more_than_it_holds_on_the_cpu() -> None:
    made = full_segment((3, 5, 7), float("nan"), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert made.shape == (3, 5, 7) and made.is_contiguous() and bool(made.isnan().all())
    assert made.untyped_storage().nbytes() == made.nbytes == 210
