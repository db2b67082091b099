"""Errors cross the wire with all their parts, and anything can be said about any value."""

from __future__ import annotations

import msgpack
import pytest

from areno.errors import ManifestMismatch
from rollout.errors import Busy, InvalidRequest, RolloutError, error_fields, error_from_fields
from rollout.errors import ManifestMismatch as WireManifestMismatch


def test_an_error_survives_the_wire() -> None:
    error = Busy("full", field="f", value=3, limit="l", remedy="r")
    back = error_from_fields(error_fields(error))
    assert type(back) is Busy
    assert (back.what, back.field, back.value, back.limit, back.remedy, back.code) == ("full", "f", 3, "l", "r", "busy")
    assert isinstance(back, ConnectionError)


def test_an_engine_error_keeps_its_code_and_becomes_the_class_of_the_same_name() -> None:
    back = error_from_fields(error_fields(ManifestMismatch("m", field="x", remedy="r")))
    assert type(back) is WireManifestMismatch


def test_an_unknown_code_keeps_its_text() -> None:
    back = error_from_fields({"code": "of_the_future", "what": "w"})
    assert type(back) is RolloutError
    assert back.code == "of_the_future"


@pytest.mark.parametrize("value", [float("nan"), 2**80, "\ud800", {1, 2}, b"\xff", [1] * 10_000, object(), True, -(2**63)])
def test_any_offending_value_can_be_sent(value: object) -> None:
    assert len(msgpack.packb(error_fields(InvalidRequest("w\ud800", value=value)))) < 1000


def test_a_stranger_is_an_internal_error_with_its_type() -> None:
    assert error_fields(KeyError("k")) == {"code": "internal_error", "what": "KeyError: 'k'"}
