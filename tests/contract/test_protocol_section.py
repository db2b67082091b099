"""The protocol section of rollout/README.md names everything that is on the wire between client and service."""

from __future__ import annotations

import re
from pathlib import Path

from rollout.wire import codec, messages
from rollout.wire.arrays import ARRAYS, MAX_BIAS_ENTRIES
from rollout.wire.generation_messages import MAX_MEMBERS, MAX_STOP_STRINGS
from rollout.wire.messages import MODELS
from rollout.wire.operations import CLIENT_REPLIES, CONTROL_REQUESTS, DATA_REQUESTS, Op
from rollout.wire.session_messages import EngineFacts
from tests.contract.test_wire_golden import CODES

README = (Path(__file__).resolve().parents[2] / "rollout" / "README.md").read_text()
SECTION = README[README.index("## Protocol, version 1") :]
OPS = sorted(DATA_REQUESTS | CONTROL_REQUESTS | CLIENT_REPLIES)
# Codes that a client makes by itself and never reads from the wire.
OWN_CODES = {
    "address_in_use", "checkpoint_invalid", "client_closed", "client_unusable", "forked_client", "insecure_address",
    "invalid_config", "no_service", "request_failed", "rollout_error", "server_unavailable", "unavailable", "unsupported_model",
}  # fmt: skip


def test_every_operation_stands_there_with_its_number() -> None:
    for op in OPS:
        assert re.search(rf"\b{op.name} {op.value}\b", SECTION) or op.name in ("ERROR", "DELTAS"), op.name
    assert f"### ERROR {Op.ERROR}" in SECTION and f"### DELTAS {Op.DELTAS}" in SECTION


def test_every_field_and_every_array_stands_there() -> None:
    for op in OPS:
        for name in (*MODELS[op].model_fields, *ARRAYS.get(op, {})):
            assert re.search(rf"`{name}`|\b{name} \[|`{name} ", SECTION), f"{op.name}: {name}"
    assert all(f"`{name}`" in SECTION for name in EngineFacts.model_fields)


def test_every_code_that_a_service_answers_stands_there() -> None:
    missing = [code for code in CODES if code not in OWN_CODES and f"`{code}`" not in SECTION]
    assert not missing


def test_the_limits_are_the_codecs() -> None:
    assert f"| frames of a message; bytes of all together | {codec.MAX_FRAMES};" in SECTION
    assert (
        f"{codec.MAX_DEPTH} levels, {codec.MAX_ITEMS:,} entries of a list or map, {codec.MAX_CONTAINERS:,} lists and maps in all" in SECTION
    )
    assert (messages.SMALL_BODY_BYTES, messages.LARGE_BODY_BYTES, codec.MAX_STRING) == (64 * 2**10, 16 * 2**20, 2**20)
    assert f"{MAX_MEMBERS:,}; {MAX_BIAS_ENTRIES:,} (the engine takes 256); {MAX_STOP_STRINGS} of" in SECTION
    dtypes = {dtype for specs in ARRAYS.values() for spec in specs.values() for dtype in spec.dtypes}
    assert all(f"`{dtype}`" in SECTION for dtype in dtypes)
