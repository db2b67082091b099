"""A live tensor in one piece, from the parts that the ranks of a group hold."""

from __future__ import annotations

import torch

from areno.parallel import TPGroup
from areno.weights.names import ParameterTable


def whole_tensor(table: ParameterTable, name: str, group: TPGroup) -> torch.Tensor:
    """Return a whole tensor on rank 0, and what a rank holds of it on the others; where nothing is cut it is the live one, as a view.

    Every rank calls it for the same names in the same order. Blocks: for the other ranks.
    """
    view, shard = table.views[name], table.shards.get(name)
    if shard is None or (shard.rows.is_whole and shard.columns.is_whole):
        return view
    places = group.gather_words([shard.rows.start, shard.rows.stop, shard.columns.start, shard.columns.stop])
    whole = view.new_empty(shard.shape) if group.rank == 0 else None
    # Ranks that hold the same part follow each other.
    for source in range(0, group.size, shard.copies):
        top, bottom, left, right = places[source]
        place = (slice(top, bottom), slice(left, right))[: len(shard.shape)]
        shape = (bottom - top, right - left)[: len(shard.shape)]
        part = group.broadcast_(view if source == group.rank else view.new_empty(shape), source)
        if whole is not None:
            whole[place] = part
    return view if whole is None else whole
