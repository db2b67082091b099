"""What calls refuse before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.client.operations import weights_begin
from rollout.errors import InvalidRequest


@pytest.mark.parametrize("spec", [3, None, {"dtype": "float32"}, {"dtype": "float32", "shape": [1.5]}, {"dtype": "float32", "shape": 4}])
def test_a_manifest_entry_that_is_no_dtype_and_shape_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(InvalidRequest, match="manifest") as refusal:
        weights_begin({"a.weight": spec}, trainer_step=None, restore=None, partial=False)
    assert refusal.value.field == "manifest.a.weight" and refusal.value.remedy


def test_a_manifest_goes_as_names_with_dtype_and_shape() -> None:
    operation = weights_begin({"a": {"dtype": "float32", "shape": (2, 3)}}, trainer_step=None, restore=None, partial=False)
    assert operation.fields["manifest"] == {"a": {"dtype": "float32", "shape": [2, 3]}}
