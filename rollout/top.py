"""`python -m rollout top`: a running service at a glance, drawn anew every second.

Reads `stats()` only; rates come from two readings. `view` is a pure function of two readings, so that it can be tested.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollout.client.blocking import Client

Stats = Mapping[str, Any]
COLOURS = {"ready": "green", "updating": "cyan", "needs_weights": "yellow", "degraded": "yellow", "failed": "red", "stopping": "red"}
STALL_SHOWN_S = 2.0


def _rate(now: Stats, before: Stats | None, name: str, seconds: float) -> str:
    if before is None or seconds <= 0:
        return "-"
    return f"{(now[name] - before[name]) / seconds:,.1f}"


def _mb(value: float) -> str:
    return f"{value / 2**20:,.1f} MB"


def view(now: Stats, before: Stats | None, seconds: float, address: str) -> Group:
    """Return the picture of two readings that lie so many seconds apart; `before` is None for the first."""
    head = Text.assemble(
        ("rollout ", "bold"),
        f"{address}  ",
        (str(now["health"]), COLOURS.get(str(now["health"]), "yellow")),
        f"  version {now['version']}  up {now['uptime_s']:,.0f} s  clients {now['sessions']}",
    )
    if now["paused_by"]:
        head.append(f"  paused by {now['paused_by']}", "yellow")
    rates = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "now", "per second"):
        rates.add_column(title, justify="left" if not title else "right")
    rates.add_row("tokens", f"{now['tokens']:,}", _rate(now, before, "tokens", seconds))
    for name in ("accepted", "stop", "length", "cancelled", "expired", "failed", "refused"):
        rates.add_row(name, f"{now[name]:,}", _rate(now, before, name, seconds))
    state = Table(box=None, pad_edge=False, header_style="bold")
    state.add_column("")
    state.add_column("now", justify="right")
    engine = now["engine"] or {}
    state.add_row("live requests", f"{now['live']:,} of {now['max_requests']:,}")
    for name in ("running", "waiting", "free_pages", "cached_pages"):
        if name in engine:
            state.add_row(f"engine {name.replace('_', ' ')}", f"{engine[name]:,}")
    state.add_row("records", f"{_mb(now['reserved_bytes'])} of {_mb(now['max_record_bytes'])}")
    state.add_row("due to clients", _mb(now["due_bytes"]))
    state.add_row("under way", _mb(now["unacknowledged_bytes"]))
    state.add_row("host starts", f"{now['host_starts']:,}")
    both = Table.grid(padding=(0, 6))
    both.add_row(rates, state)
    lines: list[Any] = [head, Text(""), both]
    if now["host_failure"]:
        lines.append(Text(str(now["host_failure"]), COLOURS.get(str(now["health"]), "yellow")))
    if now["oldest_stall_s"] >= STALL_SHOWN_S:
        lines.append(Text(f"no progress for {now['oldest_stall_s']:.1f} s: {now['oldest_stall']}", "yellow"))
    if now["accounting_errors"]:
        lines.append(Text(f"{now['accounting_errors']} times the counters did not reconcile: see the log", "bold red"))
    return Group(*lines)


def _pictures(client: Client, interval_s: float) -> Iterator[RenderableType]:
    """Yield one picture of the state at once, then one with rates after each interval."""
    before, at = client.stats(), time.monotonic()
    yield view(before, None, 0.0, client.address)
    while True:
        time.sleep(interval_s)
        now, seconds = client.stats(), time.monotonic() - at
        yield view(now, before, seconds, client.address)
        before, at = now, at + seconds


def show(client: Client, interval_s: float, *, once: bool, console: Console | None = None) -> None:
    """Draw until interrupted; `once` draws two readings' picture and returns. Blocks. Raises: what `stats` raises."""
    console = console or Console()
    pictures = _pictures(client, interval_s)
    first = next(pictures)
    if once:
        console.print(next(pictures))
        return
    if not console.is_terminal:
        # Drawn in place, all but the last picture would be lost to a file or a pipe.
        for picture in chain((first,), pictures):
            console.print(picture)
            console.file.flush()
    with Live(first, console=console, auto_refresh=False, screen=True) as live:
        for picture in pictures:
            live.update(picture, refresh=True)
