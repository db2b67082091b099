"""Digests of the live weights, whole tensors also where the ranks of a group hold parts of them."""

from __future__ import annotations

from areno.errors import EngineFailure
from areno.parallel import TPGroup
from areno.weights.digest import digest, digest_part, digest_rows, signed
from areno.weights.names import ParameterTable
from areno.weights.shards import merge_digests


def digests(table: ParameterTable, group: TPGroup | None = None) -> dict[str, int]:
    """Return the digest of every live tensor by its Hugging Face name, read from the storage that serves.

    Of several ranks all call it, and all get the digests of the whole tensors. Blocks: for the other ranks. Raises: EngineFailure
    where copies of one tensor differ.
    """
    return digests_of(table, list(table.views), group or TPGroup.single(table.device))


def digests_of(table: ParameterTable, names: list[str], group: TPGroup) -> dict[str, int]:
    """Return the digests of these tensors; as `digests`."""
    if group.size == 1:
        return {name: digest(table.views[name]) for name in names}
    found = []
    for name in names:
        shard, view = table.shards[name], table.views[name]
        if view.is_cuda:
            found.append(int(digest_part(view, shard.first, run=shard.run, stride=shard.stride)))
        else:
            found.append(signed(digest_rows(view.view(-1, shard.run), shard.first, shard.stride)))
    ranks = group.gather_words(found)
    merged = {}
    for place, name in enumerate(names):
        value = merge_digests([rank[place] for rank in ranks], table.shards[name].copies)
        if value is None:
            raise EngineFailure(
                f"ranks hold other values of {name}",
                field="tp",
                limit="copies of one tensor must be equal",
                remedy="start the engine again, or push a full update",
            )
        merged[name] = value
    return merged
