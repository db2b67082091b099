"""The decoder against transformers: fp32 to 1e-4, bf16 within its rounding, whole prompts, chunks and single tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.models.model_config import read_model_config
from areno.models.registry import build_model
from tests.fixtures_models import DenseCache, decoder_logprobs, load_decoder, reference_logprobs, tiny_model, write_checkpoint

IDS = np.random.default_rng(7).integers(0, 256, 96)
LONG_IDS = np.random.default_rng(8).integers(0, 256, 400)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 24}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"rms_norm_eps": 1e-3}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_fp32_logprobs_are_those_of_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    decoder = load_decoder(write_checkpoint(tmp_path, family, **overrides))
    expected = reference_logprobs(tmp_path, IDS)
    np.testing.assert_allclose(decoder_logprobs(decoder, IDS), expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(decoder_logprobs(decoder, IDS, 0.7), reference_logprobs(tmp_path, IDS, 0.7), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_chunks_and_single_tokens_give_the_whole_prompts_logprobs(tmp_path: Path, family: str) -> None:
    decoder = load_decoder(write_checkpoint(tmp_path, family))
    expected = reference_logprobs(tmp_path, IDS)
    np.testing.assert_allclose(decoder_logprobs(decoder, IDS, chunks=(7, 16, 1, 40)), expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(decoder_logprobs(decoder, IDS, chunks=(32,) + (1,) * 63), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_bf16_logprobs_stay_within_the_rounding_of_activations(tmp_path: Path, family: str, tied: bool) -> None:
    decoder = load_decoder(write_checkpoint(tmp_path, family, tie_word_embeddings=tied), torch.bfloat16)
    rounded_weights = tiny_model(family, tie_word_embeddings=tied).bfloat16().float()
    gap = np.abs(decoder_logprobs(decoder, IDS) - reference_logprobs(rounded_weights, IDS))
    assert gap.max() < 0.05 and gap.mean() < 0.01, (gap.max(), gap.mean())


def test_the_bf16_head_gives_fp32_logits_that_were_never_rounded_to_bf16(tmp_path: Path) -> None:
    decoder = load_decoder(write_checkpoint(tmp_path), torch.bfloat16)
    hidden_SH = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits_SV = decoder.logits(hidden_SH)
    exact_SV = hidden_SH.double() @ decoder.table.views["lm_head.weight"].double().t()
    assert logits_SV.dtype == torch.float32
    assert (logits_SV - exact_SV).abs().max() < 1e-5
    assert (logits_SV.bfloat16() - exact_SV).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_rope_base_of_the_config_holds_at_400_tokens(tmp_path: Path, family: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    decoder = load_decoder(write_checkpoint(tmp_path, family, rope_parameters=rope))
    expected = reference_logprobs(tmp_path, LONG_IDS)
    np.testing.assert_allclose(decoder_logprobs(decoder, LONG_IDS), expected, atol=1e-4, rtol=0)
    other_base = reference_logprobs(tiny_model(family), LONG_IDS)
    assert np.abs(other_base - expected).max() > 0.3, "the base must matter, or this test proves nothing"


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {**LLAMA3, "factor": 8.0},
    {**LLAMA3, "factor": 2.5, "low_freq_factor": 0.5, "high_freq_factor": 9.0},
    YARN,
    {**YARN, "attention_factor": 1.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 2.0},
    {**YARN, "truncate": False},
    {**YARN, "truncate": False, "beta_fast": 6.0, "beta_slow": 2.0},
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_stretched_positions_hold_far_beyond_the_original_context(tmp_path: Path, family: str, scaling: dict[str, Any]) -> None:
    decoder = load_decoder(write_checkpoint(tmp_path, family, rope_parameters={**scaling, "rope_theta": 1e4}))
    expected = reference_logprobs(tmp_path, LONG_IDS)
    np.testing.assert_allclose(decoder_logprobs(decoder, LONG_IDS), expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(decoder_logprobs(decoder, LONG_IDS, chunks=(100, 1, 150)), expected, atol=1e-4, rtol=0)
    plain = reference_logprobs(tiny_model(family), LONG_IDS)
    assert np.abs(plain - expected).max() > 0.3, "the scaling must matter, or this test proves nothing"


def test_a_scaling_in_the_old_keys_gives_the_same_logprobs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, rope_parameters={**YARN, "rope_theta": 5e5})
    expected = reference_logprobs(tmp_path, LONG_IDS)
    raw = json.loads((tmp_path / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    np.testing.assert_allclose(decoder_logprobs(load_decoder(tmp_path), LONG_IDS), expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(reference_logprobs(tmp_path, LONG_IDS), expected, atol=1e-6, rtol=0)


def test_stretched_positions_in_bf16_stay_within_the_rounding_of_activations(tmp_path: Path) -> None:
    rope = {**YARN, "rope_theta": 1e4}
    decoder = load_decoder(write_checkpoint(tmp_path, rope_parameters=dict(rope)), torch.bfloat16)
    gap = np.abs(decoder_logprobs(decoder, IDS) - reference_logprobs(tiny_model(rope_parameters=dict(rope)).bfloat16().float(), IDS))
    assert gap.max() < 0.05 and gap.mean() < 0.01, (gap.max(), gap.mean())


def test_losing_one_projection_is_far_outside_the_tolerance(tmp_path: Path) -> None:
    decoder = load_decoder(write_checkpoint(tmp_path))
    before = decoder_logprobs(decoder, IDS)
    decoder.table.views["model.layers.1.self_attn.q_proj.weight"].zero_()
    assert np.abs(decoder_logprobs(decoder, IDS) - before).max() > 0.05


def test_int32_ids_and_positions_are_as_good_as_int64(tmp_path: Path) -> None:
    decoder = load_decoder(write_checkpoint(tmp_path))
    ids, positions = torch.as_tensor(IDS), torch.arange(len(IDS))
    wide = decoder.forward(ids, positions, DenseCache())
    assert torch.equal(wide, decoder.forward(ids.int(), positions.int(), DenseCache()))


def test_a_model_that_was_never_loaded_answers_nan(tmp_path: Path) -> None:
    for family in ("llama", "qwen3"):
        config = read_model_config(write_checkpoint(tmp_path / family, family))
        decoder = build_model(config, dtype=torch.float32, device=torch.device("cpu"))
        assert np.isnan(decoder_logprobs(decoder, IDS)).all()


def test_a_bounded_rotary_table_changes_nothing_below_its_bound(tmp_path: Path) -> None:
    config = read_model_config(write_checkpoint(tmp_path))
    decoder, full = build_model(config, dtype=torch.float32, device=torch.device("cpu"), num_positions=96), load_decoder(tmp_path)
    for name, view in full.table.views.items():
        decoder.table.views[name].copy_(view)
    assert np.array_equal(decoder_logprobs(decoder, IDS), decoder_logprobs(full, IDS))
    with pytest.raises((IndexError, RuntimeError)):
        decoder.forward(torch.tensor([1]), torch.tensor([96]), DenseCache())


def test_weights_made_in_inference_mode_can_be_written_outside_of_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    with torch.inference_mode():
        decoder = load_decoder(tmp_path, torch.bfloat16)
    decoder.table.views["lm_head.weight"].zero_()
    decoder.table.rebuild_derived()
    assert decoder.logits(torch.ones(1, 64, dtype=torch.bfloat16)).abs().max() == 0
