"""Canonical names and the parameter table's layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areno.weights.names import ParameterTable, TensorSpec, canonical_name, is_finite, list_names
from tests.fixtures_models import checkpoint_tensors, load_decoder, write_checkpoint

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        (Q, Q),
        (f"module.{Q}", Q),
        (f"_orig_mod.{Q}", Q),
        (f"module._orig_mod.{Q}", Q),
        (f"_orig_mod.module.module.{Q}", Q),
        ("layers.0.self_attn.q_proj.weight", Q),
        (f"model.{Q}", Q),
        (f"module.model.{Q}", Q),
        ("model.layers.0._orig_mod.self_attn.q_proj.weight", Q),
        ("model._orig_mod.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight", Q),
        ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.weight", Q),
        ("norm.weight", "model.norm.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("module.lm_head.weight", "lm_head.weight"),
        ("model.lm_head.weight", "lm_head.weight"),
        ("transformer.wte.weight", "model.transformer.wte.weight"),
    ],
)
def test_wrappers_and_the_model_prefix_do_not_matter(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical


def test_views_are_contiguous_rows_of_fused_storage_at_fixed_addresses(tmp_path: Path) -> None:
    decoder = load_decoder(write_checkpoint(tmp_path, "qwen2"))
    table, tensors = decoder.table, checkpoint_tensors(tmp_path)
    assert table.views.keys() == tensors.keys()
    attention = "model.layers.1.self_attn"
    for kind in ("weight", "bias"):
        fused = table.live[f"{attention}.qkv_proj.{kind}"]
        parts = [tensors[f"{attention}.{part}.{kind}"] for part in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(fused, torch.cat(parts))
    gate_up = table.live["model.layers.0.mlp.gate_up_proj.weight"]
    assert torch.equal(gate_up[:128], tensors["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(gate_up[128:], tensors["model.layers.0.mlp.up_proj.weight"])
    assert table.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    table.check_integrity()


def test_the_manifest_has_every_stored_tensor_and_no_tied_head(tmp_path: Path) -> None:
    tied = load_decoder(write_checkpoint(tmp_path, tie_word_embeddings=True), torch.bfloat16).table
    assert "lm_head.weight" not in tied.manifest()
    assert tied.manifest()["model.embed_tokens.weight"] == TensorSpec("bfloat16", (256, 64))
    assert tied.manifest().keys() == checkpoint_tensors(tmp_path).keys()


def test_integrity_notices_storage_that_moved() -> None:
    table = ParameterTable(torch.float32, torch.device("cpu"))
    table.allocate("a", (4, 2))
    table.live["a"] = table.live["a"].clone()
    with pytest.raises(AssertionError, match="live storage a moved"):
        table.check_integrity()


def test_new_storage_is_poisoned_and_names_are_allocated_once() -> None:
    table = ParameterTable(torch.bfloat16, torch.device("cpu"))
    storage = table.allocate("fused", (5, 3), {"a": 2, "b": 3})
    assert storage.isnan().all()
    for name, parts in (("fused", {"c": 5}), ("other", {"a": 5})):
        with pytest.raises(AssertionError, match="allocated twice"):
            table.allocate(name, (5, 3), parts)
    with pytest.raises(AssertionError, match="4 rows"):
        table.allocate("short", (5, 3), {"d": 4})


def test_finite_means_no_nan_and_no_infinity_anywhere() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(1000).to(dtype)
        assert is_finite(tensor) and is_finite(tensor[:0])
        for poison in (float("nan"), float("inf"), float("-inf")):
            poisoned = tensor.clone()
            poisoned[613] = poison
            assert not is_finite(poisoned)


def test_long_lists_of_names_are_counted_after_twenty() -> None:
    assert list_names(["b", "a"]) == "a, b"
    assert list_names(f"{i:03d}" for i in range(25)).endswith("018, 019 and 5 more")
