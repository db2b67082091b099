"""What a run shows: a live display while it trains, then a table, a reward curve, a page of transcripts, one JSON line.

`train.py` hands over one `StepRecord` for each optimizer step and a few games with their tokens; nothing here influences
the training.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from trainer_bridge import TrainingSample

LIVE_ROWS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step. Rates are shares of its games; `version` is the one that its push published.

    `max_logprob_gap` is over the `gap_tokens` tokens whose version and whole KV are the trainer's own version at that step;
    `mean_abs_log_ratio` is over all others. `cached_share` is the share of prompt tokens that came from the prefix cache.
    """

    step: int
    reward: float
    win_rate: float
    illegal_rate: float
    tokens: int
    seconds: float
    cached_share: float
    version: int
    staleness: float
    pause_ms: float
    max_logprob_gap: float
    gap_tokens: int
    mean_abs_log_ratio: float

    @property
    def tokens_per_s(self) -> float:
        """Return the sampled tokens of the step by its wall time, push and optimizer included."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of a set of games."""

    games: int
    win: float
    illegal: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A game to show: its sample and a title."""

    title: str
    sample: TrainingSample


COLUMNS: tuple[tuple[str, Callable[[StepRecord], str]], ...] = (
    ("step", lambda row: str(row.step)),
    ("reward", lambda row: f"{row.reward:+.2f}"),
    ("win rate", lambda row: f"{row.win_rate:.0%}"),
    ("illegal", lambda row: f"{row.illegal_rate:.0%}"),
    ("tokens/s", lambda row: f"{row.tokens_per_s:.0f}"),
    ("cached", lambda row: f"{row.cached_share:.0%}"),
    ("policy\nversion", lambda row: str(row.version)),
    ("staleness", lambda row: f"{row.staleness:.1f}"),
    ("pause\nms", lambda row: f"{row.pause_ms:.1f}"),
    ("max_logprob_gap\n(own version)", lambda row: f"{row.max_logprob_gap:.1e} of {row.gap_tokens}" if row.gap_tokens else "-"),
    ("mean |log ratio|\n(older)", lambda row: f"{row.mean_abs_log_ratio:.3f}"),
)


def step_table(rows: Sequence[StepRecord], *, title: str | None = None) -> Table:
    """Return the rows as a table."""
    table = Table(title=title, header_style="bold")
    for name, _ in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(show(row) for _, show in COLUMNS))
    return table


class LiveReport:
    """The display while a run lasts; on a terminal it redraws in place, elsewhere it prints a line now and then.

    With `quiet` (for `--json`) everything goes to standard error, so that standard output holds the one line only.
    """

    def __init__(self, steps: int, *, quiet: bool):
        self.console = Console(file=sys.stderr if quiet else sys.stdout)
        self.rows: list[StepRecord] = []
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), console=self.console
        )
        self._task = self._progress.add_task("starting", total=steps)
        self._live = Live(self._progress, console=self.console, refresh_per_second=4, transient=True)
        self._steps = steps

    def __enter__(self) -> LiveReport:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Name what is going on."""
        self._progress.update(self._task, description=text)
        if not self.console.is_terminal:
            self.console.print(text)

    def add(self, row: StepRecord) -> None:
        """Show one more step."""
        self.rows.append(row)
        self._progress.update(self._task, advance=1, description="training")
        if self.console.is_terminal:
            self._live.update(Group(step_table(self.rows[-LIVE_ROWS:]), self._progress))
        elif row.step == 1 or row.step % 10 == 0 or row.step == self._steps:
            self.console.print(f"step {row.step}/{self._steps}: reward {row.reward:+.2f}, wins {row.win_rate:.0%}, {row.tokens_per_s:.0f} tokens/s")


def summary(rows: Sequence[StepRecord], *, first: Rates, last: Rates, seconds: float, seed: int, initial_version: int) -> dict[str, Any]:
    """Return the run as one flat object of plain numbers."""
    trained_s = sum(row.seconds for row in rows)
    gap_rows = [row for row in rows if row.gap_tokens]
    return {
        "win_rate_first": round(first.win, 4),
        "win_rate_last": round(last.win, 4),
        "illegal_rate_first": round(first.illegal, 4),
        "illegal_rate_last": round(last.illegal, 4),
        "held_out_games": last.games,
        "steps": len(rows),
        "tokens_per_s": round(sum(row.tokens for row in rows) / trained_s, 1) if trained_s else 0.0,
        "cached_share": round(float(np.mean([row.cached_share for row in rows])), 4) if rows else 0.0,
        "max_logprob_gap": max((row.max_logprob_gap for row in gap_rows), default=None),
        "gap_tokens": sum(row.gap_tokens for row in gap_rows),
        "mean_abs_log_ratio": round(float(np.mean([row.mean_abs_log_ratio for row in rows])), 5) if rows else 0.0,
        "staleness": round(float(np.mean([row.staleness for row in rows])), 3) if rows else 0.0,
        "pause_ms": round(float(np.mean([row.pause_ms for row in rows])), 2) if rows else 0.0,
        "versions": [initial_version, *(row.version for row in rows)],
        "seconds": round(seconds, 1),
        "seed": seed,
    }


def show_summary(console: Console, rows: Sequence[StepRecord], facts: dict[str, Any], files: Sequence[Path]) -> None:
    """Print the final table and what the run came to."""
    every = max(1, len(rows) // 20)
    console.print(step_table([row for row in rows if row.step == 1 or row.step % every == 0 or row is rows[-1]], title="training steps"))
    first, last = facts["win_rate_first"], facts["win_rate_last"]
    console.print(
        f"[bold]win rate against the random opponent on {facts['held_out_games']} held-out games: {first:.1%} before, {last:.1%} after[/bold] "
        f"(illegal moves in {facts['illegal_rate_first']:.1%} and {facts['illegal_rate_last']:.1%} of them)"
    )
    gap = facts["max_logprob_gap"]
    if gap is not None:
        console.print(f"largest |trainer - rollout| log-probability over {facts['gap_tokens']} tokens of the trainer's own version: {gap:.1e}")
    console.print(f"{facts['steps']} steps, {facts['tokens_per_s']:.0f} tokens/s, {facts['seconds']:.0f} s")
    for path in files:
        console.print(f"wrote {path}")


def write_rows(rows: Sequence[StepRecord], facts: dict[str, Any], path: Path) -> Path:
    """Write the steps and the summary as JSON."""
    path.write_text(json.dumps({"summary": facts, "steps": [asdict(row) | {"tokens_per_s": row.tokens_per_s} for row in rows]}, indent=1) + "\n")
    return path


def write_curve(rows: Sequence[StepRecord], facts: dict[str, Any], path: Path, console: Console) -> Path | None:
    """Draw reward and rates over steps. Without matplotlib it says so and returns None."""
    try:
        import matplotlib
    except ImportError:
        console.print("no reward curve: matplotlib is missing; pip install 'areno-rollout[demo]' draws it")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row.step for row in rows]
    figure, (rewards, rates) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rewards.plot(steps, [row.reward for row in rows], color="#94a3b8", linewidth=1, label="step")
    rewards.plot(steps, _smooth([row.reward for row in rows]), color="#2563eb", linewidth=2, label="mean of 5 steps")
    rewards.set(xlabel="optimizer step", ylabel="mean reward", title="reward")
    rates.plot(steps, _smooth([row.win_rate for row in rows]), color="#16a34a", linewidth=2, label="wins while training")
    rates.plot(steps, _smooth([row.illegal_rate for row in rows]), color="#dc2626", linewidth=2, label="illegal moves while training")
    held_out = [facts["win_rate_first"], facts["win_rate_last"]]
    rates.scatter([0, len(rows)], held_out, color="#16a34a", zorder=3, label=f"wins on {facts['held_out_games']} held-out games")
    rates.set(xlabel="optimizer step", ylabel="share of games", title="tic-tac-toe against a random opponent", ylim=(0, 1))
    for axes in (rewards, rates):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [float(np.mean(values[max(0, end - width) : end])) for end in range(1, len(values) + 1)]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Episode transcripts</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #0f172a; background: #fff }
h2 { font-size: 1rem; margin: 2rem 0 .3rem } p.note { color: #475569 }
pre { font: 14px/1.7 ui-monospace, monospace; background: #f8fafc; border: 1px solid #e2e8f0; border-radius: 6px; padding: .8rem; white-space: pre-wrap }
span.t { color: #64748b } span.s { border-radius: 3px; padding: 1px; color: #0f172a; border-bottom: 3px solid }
span.t:hover, span.s:hover { outline: 2px solid #0f172a } i { font-style: normal; color: #94a3b8 }
</style></head><body><h1>Episode transcripts</h1>
<p class="note">Grey tokens were written by the environment (mask 0, no loss). Coloured ones were sampled by the policy: the deeper the red, the less
likely the token was. The line under a sampled token tells the version of the weights that drew it. Point at a token for its id, mask, log-probability
and version.</p>
<p>Versions: LEGEND</p>
GAMES
</body></html>
"""


def _hue(version: int) -> str:
    return f"hsl({(version * 47) % 360} 70% 45%)"


def _token_span(sample: TrainingSample, place: int, text: str) -> str:
    shown = html.escape(text).replace("\n", "<i>\u23ce</i>\n").replace("\t", "<i>\u21e5</i>") or "<i>\u2205</i>"
    token = int(sample.ids[place])
    if not sample.mask[place]:
        return f'<span class="t" title="place {place} &#10;id {token} &#10;mask 0 (environment)">{shown}</span>'
    logprob, version = float(sample.logprobs[place]), int(sample.versions[place])
    redness = min(1.0, -logprob / 3.0)
    facts = f"place {place} &#10;id {token} &#10;mask 1 (sampled) &#10;logprob {logprob:.4f} (p = {np.exp(logprob):.3f}) &#10;version {version}"
    if sample.behaviour_logprobs is not None:
        facts += f" &#10;behaviour logprob {float(sample.behaviour_logprobs[place]):.4f}"
    style = f"background: hsl(0 90% {96 - 26 * redness:.0f}%); border-color: {_hue(version)}"
    return f'<span class="s" style="{style}" title="{facts}">{shown}</span>'


def write_transcripts(transcripts: Sequence[Transcript], decode: Callable[[int], str], path: Path) -> Path:
    """Write one self-contained page; `decode` gives the text of one token id."""
    versions = sorted({int(version) for entry in transcripts for version in entry.sample.versions[entry.sample.mask]})
    legend = " ".join(f'<span class="s" style="border-color: {_hue(version)}">{version}</span>' for version in versions)
    games = []
    for entry in transcripts:
        spans = "".join(_token_span(entry.sample, place, decode(int(token))) for place, token in enumerate(entry.sample.ids))
        games.append(f"<h2>{html.escape(entry.title)}</h2>\n<pre>{spans}</pre>")
    path.write_text(_PAGE.replace("LEGEND", legend).replace("GAMES", "\n".join(games)), encoding="utf-8")
    return path
