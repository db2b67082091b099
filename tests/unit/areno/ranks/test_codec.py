"""Every entry of the log comes out of its bytes as it went in, and bytes that are no entry are refused."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from areno import commands
from areno.decode.deltas import PAGE_OP, ROW_OP, DeltaSlot
from areno.errors import EngineFailure
from areno.ranks import operations as ops
from areno.ranks.codec import pack, unpack
from areno.sampling.slot_content import SlotContent
from areno.sampling.variant import Variant

INT64 = st.integers(-(2**63), 2**63 - 1)
REAL = st.floats(allow_nan=False)


def array_of(dtype: Any) -> st.SearchStrategy[np.ndarray]:
    return arrays.arrays(dtype, st.integers(0, 20))


def records_of(dtype: np.dtype) -> st.SearchStrategy[np.ndarray]:
    return st.binary(max_size=4 * dtype.itemsize).map(
        lambda content: np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype)
    )


IDS = array_of(np.int64)
VARIANT = st.builds(Variant, **{field.name: st.booleans() for field in dataclasses.fields(Variant)})
LANES = {"seats": IDS, "generations": array_of(np.int32), "variant": VARIANT}
CONTENT = st.builds(
    SlotContent,
    forced_ids=IDS,
    bias_ids=IDS,
    bias_values=array_of(np.float32),
    repetition=REAL,
    presence=REAL,
    frequency=REAL,
    prompt_ids=IDS,
    output_ids=IDS,
)
SLOT = st.builds(
    DeltaSlot, rows=records_of(ROW_OP), pages=records_of(PAGE_OP), contents=st.lists(st.tuples(INT64, CONTENT), max_size=3).map(tuple)
)
CHUNK = st.builds(
    commands.PrefillChunk,
    ids=array_of(np.int32) | IDS,
    start=INT64,
    pages=IDS,
    rows=st.lists(INT64, max_size=4).map(tuple),
    score_from=INT64,
    score_targets=IDS,
    temperature=REAL,
    seat=INT64,
    generation=INT64,
)
TEXT = st.text(max_size=30)
STRATEGIES: dict[type, st.SearchStrategy[Any]] = {
    commands.ApplyDelta: st.builds(commands.ApplyDelta, slot=SLOT),
    commands.ClearPages: st.builds(commands.ClearPages, pages=IDS),
    commands.CopyPages: st.builds(commands.CopyPages, sources=IDS, targets=IDS, tokens=IDS),
    commands.PrefillLaunch: st.builds(
        commands.PrefillLaunch, chunks=st.lists(CHUNK, max_size=3).map(tuple), fork_sources=IDS, fork_targets=IDS, **LANES
    ),
    commands.DecodeLaunch: st.builds(commands.DecodeLaunch, bucket=INT64, longest=INT64, **LANES),
    ops.Build: st.builds(ops.Build, config=TEXT, resolved=TEXT),
    ops.ScoreIds: st.builds(ops.ScoreIds, ids=IDS, temperature=REAL),
    ops.OpenUpdate: st.builds(ops.OpenUpdate, manifest=TEXT, version=INT64, partial=st.booleans()),
    ops.StagePiece: st.builds(ops.StagePiece, name=TEXT, dtype=TEXT, shape=IDS, start=INT64, count=INT64, slot=INT64, whole=st.booleans()),
    ops.OpenMemory: st.builds(ops.OpenMemory, handle=TEXT),
    ops.StageRun: st.builds(ops.StageRun, name=TEXT, dtype=TEXT, shape=IDS, start=INT64, count=INT64, handle=TEXT, offset=INT64),
    ops.VerifyUpdate: st.builds(ops.VerifyUpdate, digests=TEXT),
    ops.MeasureCanaries: st.builds(
        ops.MeasureCanaries, counts=IDS, ids=IDS, logprobs=array_of(np.float32), temperatures=array_of(np.float64)
    ),
    ops.GatherTensor: st.builds(ops.GatherTensor, name=TEXT),
    ops.PublishUpdate: st.builds(ops.PublishUpdate, version=INT64),
    ops.CheckState: st.builds(ops.CheckState, number=INT64),
}


def same(one: Any, other: Any) -> bool:
    """Compare values bit for bit, arrays with their types."""
    if isinstance(one, np.ndarray):
        return bool(
            isinstance(other, np.ndarray) and one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        )
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


@pytest.mark.parametrize("kind", get_args(ops.Entry), ids=lambda kind: kind.__name__)
def test_an_entry_comes_out_as_it_went_in(kind: type) -> None:
    @settings(max_examples=25, deadline=None)
    @given(STRATEGIES.get(kind, st.builds(kind)))
    def round_trip(entry: Any) -> None:
        number, body = pack(entry)
        back = unpack(number, body)
        assert same(back, entry)
        for value in (getattr(back, field.name) for field in dataclasses.fields(back)):
            assert not isinstance(value, np.ndarray) or value.flags.writeable, "arrays are the reader's own"

    round_trip()


@settings(max_examples=60, deadline=None)
@given(STRATEGIES[commands.PrefillLaunch], st.data())
def test_an_entry_that_is_cut_or_too_long_is_refused(entry: Any, data: st.DataObject) -> None:
    kind, body = pack(entry)
    with pytest.raises(EngineFailure, match="the command log is broken"):
        unpack(kind, body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(EngineFailure, match="1 bytes are left"):
        unpack(kind, body + b"\0")


def test_kinds_and_arrays_that_do_not_exist_are_refused() -> None:
    with pytest.raises(EngineFailure, match="no entry has kind 0"):
        unpack(0, b"")
    with pytest.raises(EngineFailure, match="no entry has kind 99"):
        unpack(99, b"")
    kind, body = pack(commands.ClearPages(pages=np.arange(3)))
    with pytest.raises(EngineFailure, match="no array has code 200"):
        unpack(kind, b"\xc8" + body[1:])
    with pytest.raises(AssertionError, match="complex128 have no code"):
        pack(commands.ClearPages(pages=np.zeros(1, complex)))
