"""The rope keys of config.json in both styles, as transformers reads them, and refusals of what isn't whole or isn't known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areno.errors import CheckpointError, UnsupportedModel
from areno.layers.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from areno.layers.rotary import frequencies
from tests.unit.areno.models.test_model_config import read

LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: list[dict[str, Any]] = [
    LINEAR,
    {"rope_type": "linear", "factor": 3},
    LLAMA3,
    {**LLAMA3, "factor": 32, "low_freq_factor": 0.5, "high_freq_factor": 7, "original_max_position_embeddings": 64},
    YARN,
    {"rope_type": "yarn", "factor": 2.0},
    {**YARN, "attention_factor": 1.25},
    {**YARN, "attention_factor": None, "beta_fast": None, "mscale": None},
    {**YARN, "attention_factor": 1.25, "mscale": 0.7, "mscale_all_dim": 0.3},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2},
    {**YARN, "mscale": 0.707},
    {**YARN, "mscale_all_dim": 0.707},
    {**YARN, "beta_fast": 16, "beta_slow": 2.5},
    {**YARN, "truncate": False},
    {**YARN, "factor": 1.0},
]


def styles(scaling: dict[str, Any], theta: float) -> list[dict[str, Any]]:
    """Return the keys of config.json that mean `scaling` with base `theta`, in every style."""
    old = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    return [
        {"rope_parameters": {**scaling, "rope_theta": theta}},
        {"rope_parameters": {**old, "rope_theta": theta}},
        {"rope_parameters": {**scaling, "type": scaling["rope_type"]}, "rope_theta": theta},
        {"rope_scaling": old, "rope_theta": theta},
        {"rope_scaling": scaling, "rope_theta": theta},
        {"rope_scaling": scaling, "rope_theta": theta, "rope_parameters": None},
        {"rope_scaling": old, "rope_parameters": {**scaling, "rope_theta": theta}, "rope_theta": theta},
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_style_of_scaling_means_what_it_means_to_transformers(tmp_path: Path, family: str, scaling: dict[str, Any]) -> None:
    first = None
    for keys in styles(scaling, 5e5):
        ours = read(tmp_path, family, max_position_embeddings=512, **keys)
        first = first or ours.rope
        assert ours.rope == first
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        expected, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
        torch.testing.assert_close(frequencies(ours.head_dim, ours.rope), expected, atol=0, rtol=2e-7)
        assert getattr(ours.rope.scaling, "magnitude", 1.0) == pytest.approx(magnitude, abs=1e-12)


def test_a_scaling_is_read_field_by_field(tmp_path: Path) -> None:
    assert read(tmp_path, rope_parameters={**LINEAR, "rope_theta": 7e4}).rope == Rope(theta=7e4, scaling=LinearScaling(factor=4.0))
    assert read(tmp_path, rope_scaling=LLAMA3).rope == Rope(
        theta=1e4, scaling=Llama3Scaling(factor=8.0, low_turns=1.0, high_turns=4.0, original_positions=128)
    )
    changed = {"attention_factor": 1, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    assert read(tmp_path, rope_scaling={**YARN, **changed}).rope.scaling == YarnScaling(
        factor=4.0, magnitude=1.0, fast_turns=16.0, slow_turns=2.0, original_positions=128, whole_dimensions=False
    )


def test_an_original_context_beside_the_rope_parameters_counts(tmp_path: Path) -> None:
    inside = read(tmp_path, rope_parameters=LLAMA3).rope
    without = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    assert read(tmp_path, rope_parameters=without, original_max_position_embeddings=128).rope == inside
    assert read(tmp_path, rope_parameters=LLAMA3, original_max_position_embeddings=128).rope == inside


def test_a_config_that_transformers_saved_is_read_back(tmp_path: Path) -> None:
    for scaling in SCALINGS:
        config = transformers.Qwen3Config(max_position_embeddings=512, rope_parameters={**scaling, "rope_theta": 1e6})
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
        rope = read(tmp_path, "qwen3", **{key: saved[key] for key in ("max_position_embeddings", "rope_parameters")}).rope
        torch.testing.assert_close(frequencies(128, rope), expected, atol=0, rtol=2e-7)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default", "rope_theta": 7e4}},
        {"rope_scaling": {"rope_theta": 7e4}, "rope_parameters": {"rope_theta": 1e4}},
        {"rope_theta": 5e5, "rope_parameters": {**YARN, "rope_theta": 1e6}},
    ],
)
def test_two_rope_bases_that_differ_are_refused_with_both_values(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"contradicts itself.*and.*delete the other") as caught:
        read(tmp_path, **keys)
    assert len(set(caught.value.value.values())) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}},
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_two_styles_that_disagree_are_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"rope_scaling and rope_parameters differ.*delete rope_scaling"):
        read(tmp_path, **keys)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type='dynamic'.*known: default, linear, llama3, yarn"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "rope_parameters.rope_type='longrope'.*known: default, linear, llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_parameters.rope_type='su'.*known: default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_parameters.rope_type=\['yarn'\].*known: default"),
        ({"rope_scaling": {"type": "default", "rope_type": "dynamic"}}, "rope_scaling.rope_type='dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of rope parameters"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
    ],
)
def test_other_rope_types_are_refused_by_name_with_the_known_ones(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, "qwen2", **keys)


def changed(scaling: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return `scaling` with changes; `...` takes a key away."""
    return {key: value for key, value in {**scaling, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("scaling", "field", "named"),
    [
        (changed(LINEAR, factor=...), "factor", "no {}.*rope type 'linear' needs factor.*add {} to config.json"),
        (changed(YARN, factor=...), "factor", "no {}.*rope type 'yarn' needs factor.*add {} to"),
        (changed(LLAMA3, factor=...), "factor", "no {}.*'llama3' needs factor, low_freq_factor.*add {} to"),
        (changed(LLAMA3, low_freq_factor=...), "low_freq_factor", "no {}.*add {} to"),
        (changed(LLAMA3, high_freq_factor=...), "high_freq_factor", "no {}.*add {} to"),
        (changed(LLAMA3, original_max_position_embeddings=...), "original_max_position_embeddings", "no {}.*add {} to"),
        (changed(LINEAR, factor=None), "factor", "{}=None.*positive finite number.*correct {}"),
        (changed(LINEAR, factor="4"), "factor", "{}='4'.*positive finite number.*correct {}"),
        (changed(LINEAR, factor=True), "factor", "{}=True.*positive finite number"),
        (changed(LINEAR, factor=0.5), "factor", "{}=0.5.*at least 1"),
        (changed(YARN, factor=-4.0), "factor", "{}=-4.0.*positive"),
        (changed(YARN, factor=float("nan")), "factor", "{}=nan.*positive finite"),
        (changed(LLAMA3, high_freq_factor=1.0), "high_freq_factor", "{}=1.0.*above low_freq_factor"),
        (changed(LLAMA3, low_freq_factor="1"), "low_freq_factor", "{}='1'.*positive finite"),
        (
            changed(LLAMA3, original_max_position_embeddings=128.0),
            "original_max_position_embeddings",
            "{}=128.0.*positive integer",
        ),
        (changed(YARN, original_max_position_embeddings=0), "original_max_position_embeddings", "{}=0.*positive integer"),
        (changed(YARN, attention_factor=0), "attention_factor", "{}=0.*positive finite"),
        (changed(YARN, beta_fast=1, beta_slow=2), "beta_fast", "{}=1.*not be below beta_slow"),
        (changed(YARN, beta_fast=[32]), "beta_fast", r"{}=\[32\].*positive finite"),
        (changed(YARN, mscale="1"), "mscale", "{}='1'.*positive finite"),
        (changed(YARN, truncate=1), "truncate", "{}=1.*true or false"),
        (changed(YARN, rope_theta=1), "rope_theta", "{}=1.*base above 1"),
        (changed(YARN, type="linear"), "rope_type", "{}='yarn'.*type='linear' says otherwise.*keep {}"),
        (changed(LINEAR, beta_fast=32), "beta_fast", "{}=32.*'linear' has no such parameter; known: factor.*set rope_.*rope_type to yarn"),
        (
            {"rope_type": "default", "factor": 2.0},
            "factor",
            "{}=2.0.*known: none but rope_theta.*delete {}, or set .*linear or llama3 or yarn",
        ),
        ({"factor": 2.0}, "factor", "{}=2.0.*'default' has no such parameter"),
        (changed(YARN, finetuned=True), "finetuned", "{}=True.*no such parameter.*delete {}$"),
    ],
)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
def test_a_scaling_that_is_not_whole_is_refused_with_field_and_remedy(
    tmp_path: Path, style: str, scaling: dict[str, Any], field: str, named: str
) -> None:
    name = f"{style}.{field}"
    with pytest.raises(CheckpointError, match=named.replace("{}", name)) as caught:
        read(tmp_path, "qwen3", **{style: scaling})
    assert caught.value.field == name and caught.value.remedy


@pytest.mark.parametrize("value", ["default", 4, ["yarn"], False])
def test_rope_parameters_that_are_no_object_are_refused(tmp_path: Path, value: object) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(CheckpointError, match=f"{key}=.*an object is needed"):
            read(tmp_path, **{key: value})


def test_two_original_contexts_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"original_max_position_embeddings=128 and original_max_position_embeddings=256.*delete the other"
    ):
        read(tmp_path, rope_parameters=YARN, original_max_position_embeddings=256)
