"""Engine options are checked when made and resolved once against the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areno import Engine, EngineConfig, InvalidConfig
from areno.config import DeviceLimits, resolve
from tests.hostile_values import HOSTILE_VALUES, check_refusal


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_rows", 0),
        ("max_rows", True),
        ("page_size", 0),
        ("num_pages", -1),
        ("run_ahead", 4),
        ("ring_slots", 1),
        ("dtype", "float16"),
        ("device", "tpu"),
        ("decode_tables", "magic"),
        ("result_transport", "pigeon"),
        ("max_prefill_tokens", 0),
        ("canary_tolerance", float("nan")),
        ("seed", -1),
        ("tp", 0),
        ("tp", 65),
        ("tp", True),
        ("rank_timeout_s", 0.5),
        ("rank_timeout_s", float("nan")),
        ("rank_timeout_s", "30"),
    ],
)
def test_an_option_out_of_its_domain_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig) as refusal:
        EngineConfig(model="x", **{field: value})
    assert refusal.value.field == field and refusal.value.limit and refusal.value.remedy


def test_the_ring_must_hold_what_run_ahead_withholds() -> None:
    with pytest.raises(InvalidConfig, match="run_ahead=3 needs at least 8"):
        EngineConfig(model="x", run_ahead=3, ring_slots=4)


CPU = DeviceLimits(name="cpu", kind="cpu", kv_bytes=1 << 30)


def test_buckets_on_the_cpu_are_multiples_of_four_that_cover_every_row_count() -> None:
    for max_rows in (1, 3, 4, 12, 17, 64, 70, 256):
        resolved = resolve(EngineConfig(model="x", max_rows=max_rows), CPU, model_max_len=512, token_kv_elements=256)
        assert all(bucket % 4 == 0 for bucket in resolved.buckets) and resolved.buckets[-1] >= max_rows
        for rows in range(1, max_rows + 1):
            assert rows <= resolved.bucket_of(rows) < rows + 16


def test_a_cuda_device_has_buckets_from_one_row_on_and_defaults_of_its_own() -> None:
    card = DeviceLimits(name="cuda:0", kind="cuda", kv_bytes=1 << 40)
    resolved = resolve(EngineConfig(model="x", max_rows=20), card, model_max_len=512, token_kv_elements=256)
    assert resolved.buckets == (1, 2, 4, 8, 16, 20)
    assert (resolved.dtype, resolved.page_size, resolved.run_ahead, resolved.num_pages) == ("bfloat16", 64, 2, 20 * 8)
    assert not resolved.clears_pages
    small = replace(card, weight_bytes=1 << 30)
    assert resolve(EngineConfig(model="x"), small, model_max_len=512, token_kv_elements=256).run_ahead == 3
    rebuilt = EngineConfig(model="x", decode_tables="rebuilt")
    assert resolve(rebuilt, small, model_max_len=512, token_kv_elements=256).run_ahead == 0
    assert resolve(EngineConfig(model="x"), card, model_max_len=512, token_kv_elements=256).max_rows == 256


def test_a_device_without_room_for_a_page_refuses_with_a_remedy() -> None:
    full = DeviceLimits(name="a small card", kind="cuda", kv_bytes=2 * 64 * 256 * 2)
    with pytest.raises(InvalidConfig, match="0 pages of keys and values on a small card") as refusal:
        resolve(EngineConfig(model="x"), full, model_max_len=512, token_kv_elements=256)
    assert "gpu_memory_fraction" in str(refusal.value.remedy)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="at most 512"):
        resolve(EngineConfig(model="x", max_model_len=513), CPU, model_max_len=512, token_kv_elements=256)


def test_the_pool_defaults_to_what_rows_can_fill_within_a_gibibyte_but_never_less_than_one_context() -> None:
    def pages(elements: int, **options: Any) -> int:
        return resolve(EngineConfig(model="x", **options), CPU, model_max_len=8192, token_kv_elements=elements).num_pages

    assert pages(256, max_rows=4, max_model_len=512) == 4 * 32
    assert pages(11520, max_rows=64) == (1 << 30) // (16 * 46080)
    assert pages(11520, max_rows=64, dtype="bfloat16") == (1 << 30) // (8 * 46080)
    assert pages(2**18, max_rows=64) == 512


@pytest.mark.parametrize("field", EngineConfig.__dataclass_fields__)
def test_an_option_takes_or_refuses_whatever_it_is_given(field: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            EngineConfig(**{"model": "m", field: value})
        except InvalidConfig as error:
            check_refusal(error, (field, number))


@pytest.mark.parametrize("device", ["cuda:", "cuda:-1", "cuda:\u0663", "cuda:99999", "CPU", "cpu\n", 0, None])
def test_a_device_that_has_no_such_name_is_refused(device: Any) -> None:
    with pytest.raises(InvalidConfig, match="known: auto, cpu, cuda, cuda:N"):
        EngineConfig(model="m", device=device)


def test_an_engine_that_is_given_a_folder_in_place_of_its_config_says_what_to_pass() -> None:
    with pytest.raises(InvalidConfig, match=r"config is a str; .*; pass EngineConfig\(model=\.\.\.\)"):
        Engine("a/model")  # type: ignore[arg-type]
