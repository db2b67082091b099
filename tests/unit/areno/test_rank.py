"""What a device refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from areno import EngineConfig, InvalidConfig, UnsupportedModel
from areno.config import DeviceLimits, resolve
from areno.models.model_config import read_model_config
from areno.rank import _choose_transport, check_kernels, find_device
from tests.fixtures_models import write_checkpoint

CARD = DeviceLimits(name="cuda:0", kind="cuda", kv_bytes=1 << 34)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_a_device_that_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(InvalidConfig, match="does not exist") as refusal:
        find_device("cuda:99")
    assert refusal.value.field == "device" and refusal.value.remedy


def test_auto_is_a_cuda_device_if_there_is_one() -> None:
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert find_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("options", "changes", "error", "field"),
    [
        ({}, {"head_dim": 24}, UnsupportedModel, "head_dim"),
        ({}, {"hidden_size": 72}, UnsupportedModel, "hidden_size"),
        ({"page_size": 24}, {"head_dim": 16}, InvalidConfig, "page_size"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(
    folder: Path, options: dict[str, Any], changes: dict[str, Any], error: type[Exception], field: str
) -> None:
    config = EngineConfig(model=str(folder), device="cuda", **options)
    model = dataclasses.replace(read_model_config(folder), **changes)
    resolved = resolve(config, CARD, model_max_len=model.max_position_embeddings, token_kv_elements=1024)
    with pytest.raises(error, match=field) as refusal:
        check_kernels(config, resolved, model)
    assert "cpu" in str(refusal.value)


@pytest.mark.parametrize(("path", "run_ahead"), [("resident", 2), ("rebuilt", 0)])
def test_only_rows_that_live_on_a_card_run_ahead_of_their_results(folder: Path, path: str, run_ahead: int) -> None:
    model = dataclasses.replace(read_model_config(folder), head_dim=16)
    config = EngineConfig(model=str(folder), device="cuda", decode_tables=path)
    resolved = resolve(config, CARD, model_max_len=model.max_position_embeddings, token_kv_elements=1024)
    check_kernels(config, resolved, model)
    assert resolved.run_ahead == run_ahead
    asked = dataclasses.replace(config, run_ahead=1)
    assert resolve(asked, CARD, model_max_len=model.max_position_embeddings, token_kv_elements=1024).run_ahead == 1


def test_rebuilt_rows_of_a_card_refuse_mapped_results_and_say_that_they_copy(folder: Path) -> None:
    cuda = torch.device("cuda", 0)
    config = EngineConfig(model=str(folder), device="cuda", decode_tables="rebuilt")
    found = _choose_transport(config, cuda)
    assert found.kind == "copy" and "rebuilt" in found.reason
    with pytest.raises(InvalidConfig, match="result_transport") as refusal:
        _choose_transport(dataclasses.replace(config, result_transport="mapped"), cuda)
    assert refusal.value.field == "result_transport" and "resident" in str(refusal.value.remedy)
