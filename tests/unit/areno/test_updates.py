"""The way from an engine to its open update: where none is open, no other rank hears of what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from areno.errors import NoUpdate
from areno.ranks import operations as ops
from areno.updates import Updates
from areno.weights.names import TensorSpec
from areno.weights.slices import Slice

SPEC = TensorSpec("float32", (2,))


class Told:
    """Other ranks that write down what they are told."""

    size = 2

    def __init__(self) -> None:
        self.entries: list[ops.Entry] = []

    def tell(self, entry: ops.Entry) -> int:
        self.entries.append(entry)
        return len(self.entries)

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    "call",
    [
        lambda updates: updates.stage("x", torch.zeros(2)),
        lambda updates: updates.open_memory(b"handle"),
        lambda updates: updates.stage_slices([Slice("x", torch.zeros(2), 0, SPEC)]),
        lambda updates: updates.launch_slices(),
        lambda updates: updates.settle_slices(),
        lambda updates: updates.inspect(),
        lambda updates: updates.commit(digests=None, canaries=()),
    ],
)
def test_what_needs_an_open_update_is_refused_before_other_ranks_hear_of_it(call: Callable[[Updates], object]) -> None:
    ranks, nothing = Told(), cast(Any, None)
    updates = Updates(
        nothing, nothing, executor=nothing, scheduler=nothing, ranks=cast(Any, ranks), group=nothing, resolved=nothing, vocab_size=8
    )
    with pytest.raises(NoUpdate) as refused:
        call(updates)
    assert not ranks.entries and refused.value.remedy
