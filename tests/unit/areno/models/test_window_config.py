"""Which layers have a window and how wide, as transformers reads the same config.json, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from areno.errors import CheckpointError, UnsupportedModel
from tests.unit.areno.models.test_model_config import read

FULL, SLIDING = "full_attention", "sliding_attention"
ON: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 128}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {**ON},
        {**ON, "max_window_layers": 0},
        {**ON, "max_window_layers": 1},
        {**ON, "max_window_layers": 3},
        {**ON, "max_window_layers": 9},
        {"use_sliding_window": True, "max_window_layers": 2},
        {**ON, "num_hidden_layers": 30},
        {**ON, "layer_types": [SLIDING, FULL, FULL, SLIDING]},
        {**ON, "layer_types": [FULL] * 4, "max_window_layers": 0},
        {**ON, "layer_types": [SLIDING] * 4, "max_window_layers": 4},
        {"layer_types": [FULL] * 4},
    ],
)
def test_every_layers_window_is_that_of_transformers(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    ours = read(tmp_path, family, **{"num_hidden_layers": 4, **keys})
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.windows == tuple(theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types)


def test_llama_has_no_windows_whatever_its_config_says(tmp_path: Path) -> None:
    assert read(tmp_path, "llama", **ON, max_window_layers=0).windows == (None, None)
    assert read(tmp_path, "llama", layer_types=[FULL, FULL]).windows == (None, None)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    keys = {"use_sliding_window": True, "max_window_layers": 1, "max_position_embeddings": 500}
    assert read(tmp_path, "qwen2", **keys, sliding_window=499).windows == (None, 499)
    assert read(tmp_path, "qwen2", **keys, sliding_window=500).windows == (None, None)
    assert read(tmp_path, "qwen2", **keys).windows == (None, None)


@pytest.mark.parametrize(
    ("keys", "field", "named"),
    [
        (
            {"layer_types": [FULL, SLIDING]},
            "use_sliding_window",
            "contradicts itself.*use_sliding_window=False.*set use_sliding_window to true",
        ),
        (
            {"use_sliding_window": True, "sliding_window": None, "layer_types": [FULL, SLIDING]},
            "sliding_window",
            "contradicts itself.*sliding_window=None.*set use_sliding_window to true",
        ),
        ({**ON, "layer_types": [SLIDING]}, "layer_types", "1 entries must be num_hidden_layers.*correct layer_types"),
        ({**ON, "layer_types": SLIDING}, "layer_types", "a list with a kind for each layer"),
        (
            {**ON, "sliding_window": 0, "max_window_layers": 0},
            "sliding_window",
            "sliding_window=0.*positive integer.*correct sliding_window",
        ),
        ({**ON, "sliding_window": 16.0, "max_window_layers": 0}, "sliding_window", "sliding_window=16.0.*positive integer"),
        ({**ON, "sliding_window": True, "max_window_layers": 0}, "sliding_window", "sliding_window=True.*positive integer"),
        ({**ON, "sliding_window": "16", "layer_types": [FULL, SLIDING]}, "sliding_window", "sliding_window='16'.*positive integer"),
        ({**ON, "max_window_layers": -1}, "max_window_layers", "max_window_layers=-1.*from 0 on"),
        ({**ON, "max_window_layers": None}, "max_window_layers", "max_window_layers=None.*from 0 on"),
        ({"use_sliding_window": "yes"}, "use_sliding_window", "use_sliding_window='yes'.*true or false"),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_that_contradict_themselves_are_refused(tmp_path: Path, family: str, keys: dict[str, Any], field: str, named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        read(tmp_path, family, **keys)
    assert caught.value.field == field and caught.value.remedy


def test_other_kinds_of_attention_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"layer_types='chunked_attention, linear_attention'.*known: full_attention, sliding_attention"
    ):
        read(tmp_path, "qwen3", **ON, layer_types=["linear_attention", "chunked_attention"])
