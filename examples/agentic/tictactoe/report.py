"""What a run shows: a live display while it trains, then a table, a reward curve, a page of transcripts, one JSON line.

`train.py` hands over one `StepRecord` for each optimizer step and a few games with their tokens; nothing here influences
the training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer

from examples.agentic.tictactoe.reward import WinRate
from examples.agentic.tictactoe.transcripts import Transcript, write_transcripts
from trainer_bridge import LogprobGap, PushReport, TrainingSample

LIVE_ROWS = 10
NARROWEST_LOG = 110
SHOWN_EVERY = 14
SHOWN_GAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step. Rates are shares of its games; `version` is the one that its push published.

    `max_logprob_gap` is over the `gap_tokens` tokens whose version and whole KV are the trainer's own version at that step;
    `mean_abs_log_ratio` is over all others. `cached_share` is the share of prompt tokens that came from the prefix cache. `push` is
    what the push of the step's weights told.
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
    push: PushReport
    max_logprob_gap: float
    gap_tokens: int
    mean_abs_log_ratio: float

    @property
    def pause_ms(self) -> float:
        """Return the time in which no game could advance because of the push."""
        return self.push.pause_ms

    @property
    def tokens_per_s(self) -> float:
        """Return the sampled tokens of the step by its wall time, push and optimizer included."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out games of one version: how they ended, and the log-probability gap over their tokens."""

    version: int
    rates: WinRate
    gap: LogprobGap


@dataclass(slots=True, kw_only=True)
class Run:
    """All that a run leaves behind; `train.py` adds to it as it goes. `held_out` is of the shipped, then of the final weights.

    `steps` is how many were asked for; a run that is interrupted has fewer rows, and no held-out games of its final weights.
    """

    seed: int
    steps: int
    tokenizer: Tokenizer
    initial_version: int = 0
    seconds: float = 0.0
    rows: list[StepRecord] = field(default_factory=list)
    held_out: list[HeldOut] = field(default_factory=list)
    transcripts: list[Transcript] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Return whether the run came to its end."""
        return len(self.held_out) == 2

    def add(self, row: StepRecord, samples: Sequence[TrainingSample]) -> StepRecord:
        """Take a step and, now and then, some of its games."""
        self.rows.append(row)
        if row.step == 1 or row.step % SHOWN_EVERY == 0:
            self._show_games(f"step {row.step}", samples)
        return row

    def add_held_out(self, held_out: HeldOut, samples: Sequence[TrainingSample]) -> None:
        """Take the held-out games of one version."""
        self.held_out.append(held_out)
        self._show_games(f"held-out, version {held_out.version}", samples)

    def _show_games(self, when: str, samples: Sequence[TrainingSample]) -> None:
        for sample in [sample for sample in samples if sample.is_trainable][:SHOWN_GAMES]:
            turns = len(sample.turns)
            ending = f"{sample.info['outcome'].value}, reward {sample.reward:+.1f}, {turns} turn{'s' if turns > 1 else ''}"
            self.transcripts.append(Transcript(title=f"{when}: {ending}", sample=sample))

    def summary(self) -> dict[str, Any]:
        """Return the run as one flat object of plain numbers.

        The gap's figures are over training steps and held-out games alike: tokens of the trainer's version at that moment.
        The last rates are None for a run that did not finish.
        """
        first = self.held_out[0].rates
        last = self.held_out[-1].rates if self.finished else None
        trained_s = sum(row.seconds for row in self.rows)
        gaps = [(row.max_logprob_gap, row.gap_tokens) for row in self.rows]
        gaps += [(held_out.gap.max_exact, held_out.gap.num_exact) for held_out in self.held_out]
        mean = lambda name: float(np.mean([getattr(row, name) for row in self.rows]))  # noqa: E731
        return {
            "win_rate_first": round(first.win, 4),
            "win_rate_last": round(last.win, 4) if last else None,
            "illegal_rate_first": round(first.illegal, 4),
            "illegal_rate_last": round(last.illegal, 4) if last else None,
            "held_out_games": first.games,
            "steps": len(self.rows),
            "finished": self.finished,
            "tokens_per_s": round(sum(row.tokens for row in self.rows) / trained_s, 1),
            "cached_share": round(mean("cached_share"), 4),
            "max_logprob_gap": max(gap for gap, tokens in gaps if tokens) if any(tokens for _, tokens in gaps) else None,
            "gap_tokens": sum(tokens for _, tokens in gaps),
            "mean_abs_log_ratio": round(mean("mean_abs_log_ratio"), 5),
            "staleness": round(mean("staleness"), 3),
            "pause_ms": round(mean("pause_ms"), 2),
            "versions": len({self.initial_version, *(row.version for row in self.rows)}),
            "version_last": self.rows[-1].version,
            "seconds": round(self.seconds, 1),
            "seed": self.seed,
        }


Columns = tuple[tuple[str, Callable[[StepRecord], str]], ...]
COLUMNS: Columns = (
    ("step", lambda row: str(row.step)),
    ("reward", lambda row: f"{row.reward:+.2f}"),
    ("win\nrate", lambda row: f"{row.win_rate:.0%}"),
    ("illegal\nmoves", lambda row: f"{row.illegal_rate:.0%}"),
    ("tokens\n/s", lambda row: f"{row.tokens_per_s:.0f}"),
    ("cached\nshare", lambda row: f"{row.cached_share:.0%}"),
    ("policy\nversion", lambda row: str(row.version)),
    ("stale-\nness", lambda row: f"{row.staleness:.1f}"),
    ("pause\nms", lambda row: f"{row.pause_ms:.0f}"),
    ("max_log-\nprob_gap", lambda row: f"{row.max_logprob_gap:.1e}" if row.gap_tokens else "-"),
    ("|log\nratio|", lambda row: f"{row.mean_abs_log_ratio:.3f}"),
)


PUSH_COLUMNS: Columns = (
    ("policy\nversion", lambda row: str(row.push.version)),
    ("trans-\nport", lambda row: row.push.transport),
    ("tensors", lambda row: str(row.push.num_tensors)),
    ("MB", lambda row: f"{row.push.num_bytes / 1e6:.1f}"),
    ("changed\ntensors", lambda row: str(row.push.changed_tensors)),
    ("staging\nms", lambda row: f"{row.push.staging_s * 1e3:.0f}"),
    ("swap\nms", lambda row: f"{row.push.swap_ms:.1f}"),
    ("proof\nms", lambda row: f"{row.push.proof_ms:.1f}"),
    ("pause\nms", lambda row: f"{row.push.pause_ms:.1f}"),
    ("canary\ngap", lambda row: "-" if row.push.canary_gap is None else f"{row.push.canary_gap:.1e}"),
)


def step_table(rows: Sequence[StepRecord], *, title: str | None = None, columns: Columns = COLUMNS) -> Table:
    """Return the rows as a table."""
    table = Table(title=title, header_style="bold", box=SIMPLE_HEAD, padding=0)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(show(row) for _, show in columns))
    return table


class LiveReport:
    """The display while a run lasts; on a terminal it redraws in place, elsewhere it prints a line now and then.

    With `quiet` (for `--json`) everything goes to standard error, so that standard output holds the one line only.
    """

    def __init__(self, steps: int, *, quiet: bool):
        self.console = Console(file=sys.stderr if quiet else sys.stdout)
        if not self.console.is_terminal:
            self.console.width = NARROWEST_LOG
        self.rows: list[StepRecord] = []
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
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
            self.console.print(
                f"step {row.step}/{self._steps}: reward {row.reward:+.2f}, wins {row.win_rate:.0%}, {row.tokens_per_s:.0f} tokens/s"
            )


def show(console: Console, run: Run, files: Sequence[Path]) -> None:
    """Print the final table and what the run came to."""
    facts, every = run.summary(), max(1, len(run.rows) // 20)
    shown = [row for row in run.rows if row.step == 1 or row.step % every == 0 or row is run.rows[-1]]
    console.print(step_table(shown, title="training steps"))
    console.print(step_table(shown, title="weight pushes", columns=PUSH_COLUMNS))
    if run.finished:
        console.print(
            f"[bold]wins against the random opponent in {facts['held_out_games']} held-out games: "
            f"{facts['win_rate_first']:.1%} before, {facts['win_rate_last']:.1%} after[/bold] "
            f"(illegal moves: {facts['illegal_rate_first']:.1%}, {facts['illegal_rate_last']:.1%})"
        )
    else:
        console.print(
            f"[bold]stopped after {facts['steps']} of {run.steps} steps; the files are of these[/bold] "
            f"(wins in {facts['held_out_games']} held-out games before: {facts['win_rate_first']:.1%})"
        )
    if facts["gap_tokens"]:
        console.print(
            f"max_logprob_gap between trainer and service: {facts['max_logprob_gap']:.1e}, "
            f"over {facts['gap_tokens']} tokens of the trainer's own version"
        )
    console.print(
        f"{facts['steps']} steps, {facts['versions']} versions, {facts['tokens_per_s']:.0f} sampled tokens/s, {facts['seconds']:.0f} s"
    )
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True, markup=False)


def write_files(run: Run, folder: Path, console: Console) -> list[Path]:
    """Write steps, curve and transcripts below `folder` and return what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = run.summary()
    curve = write_curve(run.rows, facts, folder / "reward_curve.png", console)
    decode = lambda token: run.tokenizer.decode([token], skip_special_tokens=False)  # noqa: E731
    page = write_transcripts(run.transcripts, decode, folder / "transcripts.html")
    return [*([curve] if curve else []), page, write_rows(run.rows, facts, folder / "steps.json")]


def write_rows(rows: Sequence[StepRecord], facts: dict[str, Any], path: Path) -> Path:
    """Write the steps and the summary as JSON."""
    path.write_text(
        json.dumps(
            {"summary": facts, "steps": [asdict(row) | {"tokens_per_s": row.tokens_per_s, "pause_ms": row.pause_ms} for row in rows]},
            indent=1,
        )
        + "\n"
    )
    return path


def write_curve(rows: Sequence[StepRecord], facts: dict[str, Any], path: Path, console: Console) -> Path | None:
    """Draw reward and rates over steps. Without matplotlib it says so and returns None."""
    try:
        import matplotlib
    except ImportError:
        console.print("no reward curve: matplotlib is missing; install it with pip install -e '.[demo]'", markup=False)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row.step for row in rows]
    figure, (rewards, rates) = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    rewards.plot(steps, [row.reward for row in rows], color="#94a3b8", linewidth=1, label="step")
    rewards.plot(steps, _smooth([row.reward for row in rows]), color="#2563eb", linewidth=2, label="mean of 5 steps")
    rewards.set(xlabel="optimizer step", ylabel="mean reward", title="reward")
    rates.plot(steps, _smooth([row.win_rate for row in rows]), color="#16a34a", linewidth=2, label="wins while training")
    rates.plot(steps, _smooth([row.illegal_rate for row in rows]), color="#dc2626", linewidth=2, label="illegal moves while training")
    held_out = {step: rate for step, rate in ((0, facts["win_rate_first"]), (len(rows), facts["win_rate_last"])) if rate is not None}
    label = f"wins in {facts['held_out_games']} held-out games"
    rates.scatter(list(held_out), list(held_out.values()), color="#16a34a", zorder=3, clip_on=False, label=label)
    rates.set(xlabel="optimizer step", ylabel="share of games", title="tic-tac-toe against a random opponent", ylim=(0, 1))
    for axes in (rewards, rates):
        axes.grid(alpha=0.3)
        # Below the axes, where it covers no point.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [float(np.mean(values[max(0, end - width) : end])) for end in range(1, len(values) + 1)]
