"""Which options another engine over the same weights and K/V memory may have: a twin, for comparing ways of decoding.

`Engine.twin` calls it. Pages, prefixes and rows are each engine's own, so a twin works only where pages mean nothing after a
request has ended (no prefix cache), and only one engine of a company may have work at a time. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from areno.config import EngineConfig, ResolvedConfig
from areno.errors import InvalidConfig

TWIN_OPTIONS = ("decode_tables", "graphs", "kept_ids", "max_rows", "ring_slots", "run_ahead", "sampling_slots")
"""Options that leave weights, pages and their layout as they are."""


def twin_config(config: EngineConfig, resolved: ResolvedConfig, changes: Mapping[str, Any]) -> EngineConfig:
    """Return the options of a twin of an engine with these. Raises: InvalidConfig."""
    for name, value in changes.items():
        if name not in TWIN_OPTIONS:
            raise InvalidConfig(
                f"{name}={value!r} cannot differ between engines over one memory",
                field=name,
                value=value,
                limit=f"a twin may change {', '.join(TWIN_OPTIONS)}",
                remedy=f"set {name} on the first engine",
            )
    if config.tp > 1:
        raise InvalidConfig(
            f"an engine of tp={config.tp} ranks has no twin",
            field="tp",
            value=config.tp,
            limit="its other ranks follow one log",
            remedy="compare engines with tp=1",
        )
    if config.prefix_cache:
        raise InvalidConfig(
            "an engine with a prefix cache has no twin",
            field="prefix_cache",
            value=True,
            limit="the twin would overwrite cached pages",
            remedy="make the first engine with prefix_cache=False",
        )
    rows = changes.get("max_rows") or resolved.max_rows
    if rows > resolved.max_rows:
        raise InvalidConfig(
            f"max_rows={rows} is more than the first engine's",
            field="max_rows",
            value=rows,
            limit=f"its buffers hold {resolved.max_rows} rows",
            remedy="raise max_rows on the first engine",
        )
    return replace(config, **{**changes, "max_rows": rows, "num_pages": resolved.num_pages, "seed": resolved.seed})
