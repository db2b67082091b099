"""Service options are validated when made, and unknown ones are refused."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rollout.config import ServiceConfig
from rollout.errors import InvalidConfig
from tests.hostile_values import HOSTILE_VALUES, check_refusal


def test_a_config_survives_json() -> None:
    config = ServiceConfig(model="m", max_rows=8, engine="a:b", engine_options={"step_s": 0.1}, lease_s=2)
    assert ServiceConfig.from_json(config.to_json()) == config


def test_only_given_engine_options_reach_the_engine() -> None:
    config = ServiceConfig(model="m", run_ahead=2, prefix_cache=False, kept_ids=True, threads=3)
    assert config.engine_arguments() == {"model": "m", "run_ahead": 2, "prefix_cache": False, "kept_ids": True}


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown option 'max_row'; known: model, .*max_rows"):
        ServiceConfig.from_fields({"model": "m", "max_row": 1})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"max_rows": 1}'])
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig):
        ServiceConfig.from_json(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""), ("lease_s", 0.1), ("lease_s", float("nan")), ("lease_s", True), ("flush_interval_s", -1), ("credit_bytes", 5),
        ("host_credit_bytes", 5),
        ("max_message_bytes", 1), ("max_record_bytes", 1.5), ("max_requests", 0), ("max_restarts", -1), ("threads", 0), ("engine", "x"),
    ],
)  # fmt: skip
def test_an_option_outside_its_domain_is_refused_with_name_limit_and_remedy(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig) as refused:
        ServiceConfig(**{"model": "m", name: value})
    assert refused.value.field == name
    assert "allowed" in str(refused.value.limit)
    assert refused.value.remedy == f"change {name}"


def test_an_engine_without_threads_of_its_own_leaves_half_of_the_cores_to_a_trainer() -> None:
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ServiceConfig(model="m").resolved().threads == half
    assert ServiceConfig(model="m", threads=7).resolved().threads == 7


def test_paths_are_filled_in_from_the_state_folder(tmp_path: Any) -> None:
    config = ServiceConfig(model="m", state_dir=str(tmp_path)).resolved()
    assert config.address == f"ipc://{tmp_path}/run/service"
    assert str(config.weights_dir).startswith(f"{tmp_path}/weights/")
    other = ServiceConfig(model="m", state_dir=str(tmp_path), address=f"ipc://{tmp_path}/other").resolved()
    assert other.weights_dir != config.weights_dir, "two services never share a weights folder by default"
    assert config.model.startswith("/")


@pytest.mark.parametrize("name", ServiceConfig.__dataclass_fields__)
def test_an_option_takes_or_refuses_whatever_it_is_given(name: str) -> None:
    for number, value in enumerate(HOSTILE_VALUES):
        try:
            resolved = ServiceConfig(**{"model": "m", name: value}).resolved()
            assert isinstance(resolved.to_json(), str)
        except InvalidConfig as error:
            check_refusal(error, (name, number))


@pytest.mark.parametrize("value", [1e9, 10**400, float("inf")])
def test_seconds_beyond_every_timer_are_refused(value: float) -> None:
    with pytest.raises(InvalidConfig, match="lease_s"):
        ServiceConfig(model="m", lease_s=value)
