"""Service options are validated when made, and unknown ones are refused."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest

import areno
from rollout.config import ENGINE_OPTIONS, ServiceConfig
from rollout.errors import InvalidConfig
from rollout.service.engine_host import checked_options
from tests.hostile_values import HOSTILE_VALUES, check_refusal
from tests.option_pairs import ENGINE_EDGES, pairs


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


EDGES: dict[str, list[Any]] = {
    **ENGINE_EDGES,
    "address": ["ipc:///x", "tcp://127.0.0.1:0", "bogus", "tcp://"],
    "insecure": [True],
    "engine_options": [{"max_rows": 3}, {"model": "q"}, {"max_row": 2}, {"a": {"b": [1, {"c": None}]}}, {1: 2}, {"a": {1: 2}}, {"a": (1,)}],
    "lease_s": [0.2, 1e6],
    "max_record_bytes": [2**16, 2**62],
    "max_client_record_bytes": [2**16, 2**62],
    "metrics_port": [0, 65535],
    "keep_last": ["/x"],
    "engine": ["a:b"],
}


def test_no_two_options_of_a_service_raise_what_is_no_refusal_and_its_processes_read_both_as_they_were_given() -> None:
    names = list(ServiceConfig.__dataclass_fields__)
    taken = 0
    for given in pairs(names, lambda given: ServiceConfig(**{"model": "m", **given}), edges=EDGES, refusal=InvalidConfig, each=3):
        try:
            config = ServiceConfig(**{"model": "m", **given}).resolved()
        except InvalidConfig as error:
            check_refusal(error, given)
            continue
        assert ServiceConfig.from_json(config.to_json()) == config, given
        assert {name: getattr(config, name) for name in given if name in ENGINE_OPTIONS} == {
            name: value for name, value in given.items() if name in ENGINE_OPTIONS
        }, given
        try:
            checked_options(config.engine_arguments())
        except areno.InvalidConfig as error:
            check_refusal(error, given)
        taken += 1
    assert taken > 1000


@pytest.mark.parametrize("options", [{1: 2}, {None: 1}, {"a": {2: 3}}, {"a": (1,)}, {"a": math.nan}, {"a": object()}, {"a": np.int64(1)}])
def test_engine_options_that_json_would_change_or_cannot_hold_are_refused_when_they_are_given(options: Any) -> None:
    with pytest.raises(InvalidConfig, match="engine_options") as refused:
        ServiceConfig(model="m", engine_options=options)
    check_refusal(refused.value, options)


@pytest.mark.parametrize("value", [(1,), [8], {"a": 1}, math.inf, np.int64(8), object()])
def test_an_engine_option_is_one_plain_value(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="max_rows") as refused:
        ServiceConfig(model="m", max_rows=value)
    check_refusal(refused.value, value)
