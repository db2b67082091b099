"""What the figures of `decode_metadata` look like to a reader, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PROMISED = {
    ("steady", 1): 1.35,
    ("steady", 8): 1.35,
    ("steady", 64): 1.20,
    ("tail_refill", 1): 1.08,
    ("tail_refill", 8): 1.08,
    ("tail_refill", 64): 1.03,
}
"""Least speed-ups of captured steps, by scenario and batch."""

WORST_SPEEDUP = 0.98
MOST_DELAY_MS = 0.20
DELAY_BATCH = 64
MOST_EXTRA_MIB = 4.0

_COLUMNS = (
    ("batch", "batch", "{}"),
    ("mode", "mode", "{}"),
    ("scenario", "scenario", "{}"),
    ("resident_step_ms", "resident ms", "{:.3f}"),
    ("rebuilt_step_ms", "rebuilt ms", "{:.3f}"),
    ("resident_host_ms", "host ms", "{:.3f}"),
    ("rebuilt_host_ms", "host ms", "{:.3f}"),
    ("resident_tokens_per_s", "tokens/s", "{:.0f}"),
    ("rebuilt_tokens_per_s", "tokens/s", "{:.0f}"),
    ("speedup", "speed-up", "{:.3f}"),
    ("speedup_low", "from", "{:.3f}"),
    ("speedup_high", "to", "{:.3f}"),
    ("rebuilt_delay_ms", "delay ms", "{:.3f}"),
    ("lock_step_max_logprob_diff", "lock-step diff", "{:g}"),
)


def table(rows: Iterable[Mapping[str, Any]], *, heading: bool) -> str:
    """Return rows as a Markdown table; resident comes before rebuilt where a heading comes twice."""
    lines = []
    if heading:
        lines.append("| " + " | ".join(title for _, title, _ in _COLUMNS) + " |")
        lines.append("|" + "---|" * len(_COLUMNS))
    for row in rows:
        cells = ["" if row.get(name) is None else form.format(row[name]) for name, _, form in _COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def problems(rows: Sequence[Mapping[str, Any]], contract: tuple[float, float], *, promises: bool) -> list[str]:
    """Return what is wrong, a line each: differences between the paths and, with `promises`, figures that miss theirs."""
    wrong = []
    for row in rows:
        found = [*_differences(row, contract), *(_missed(row) if promises else ())]
        wrong += [f"batch {row['batch']}, {row['mode']}, {row['scenario']}: {line}" for line in found]
    return wrong


def _differences(row: Mapping[str, Any], contract: tuple[float, float]) -> list[str]:
    largest, mean = contract
    names = ("ids_differ", "reasons_differ", "steps_differ", "max_logprob_diff")
    wrong = [f"in lock step {name}={row[f'lock_step_{name}']:g}, not 0" for name in names if row[f"lock_step_{name}"]]
    # A greedy row whose two best ids are as good as tied may go either way in other company; what follows is another text.
    exact = ("ids_differ", "reasons_differ") if row["choice"] == "scripted" else ()
    wrong += [f"in free runs {name}={row[f'free_{name}']}, not 0" for name in exact if row[f"free_{name}"]]
    for name, limit in (("max_logprob_diff", largest), ("mean_logprob_diff", mean)):
        if not row[f"free_{name}"] <= limit:
            wrong.append(f"in free runs {name}={row[f'free_{name}']:g}, above {limit:g}")
    return wrong


def _missed(row: Mapping[str, Any]) -> list[str]:
    wrong = []
    least = PROMISED.get((row["scenario"], row["batch"])) if row["mode"] == "graph" else None
    if least is not None and row["speedup"] < least:
        wrong.append(f"speed-up {row['speedup']:.3f}, promised {least:g}")
    if row["speedup"] < WORST_SPEEDUP:
        wrong.append(f"speed-up {row['speedup']:.3f}, below {WORST_SPEEDUP:g}")
    if row["speedup_high"] is not None and row["speedup_high"] < 1.0:
        wrong.append(f"the interval of the speed-up ends at {row['speedup_high']:.3f}, wholly below 1")
    if row["batch"] == DELAY_BATCH and row.get("rebuilt_delay_ms", 0.0) > MOST_DELAY_MS:
        wrong.append(f"the rebuilt step takes {row['rebuilt_delay_ms']:.3f} ms beside its graph, more than {MOST_DELAY_MS:g}")
    if "resident_peak_mib" in row and row["resident_peak_mib"] - row["rebuilt_peak_mib"] > MOST_EXTRA_MIB:
        extra = row["resident_peak_mib"] - row["rebuilt_peak_mib"]
        wrong.append(f"the resident path's memory peaks {extra:.1f} MiB above the rebuilt one's, more than {MOST_EXTRA_MIB:g}")
    return wrong
