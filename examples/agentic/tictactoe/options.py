"""What decides a run: the options of the command line, all checked before anything starts.

`train.py` calls `parse_options` first. Invariant: options that come out of it fit each other and this machine's folders, and a
refusal is one line that names option, value, limit and remedy.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from examples.agentic.tictactoe.reward import MAX_GROUPS, MAX_RUNS, MAX_STEPS, NUM_HELD_OUT_GAMES
from examples.agentic.tiny_model import MODEL_DIR

MICRO_BATCHES = 4
MODEL_FILES = ("config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What decides a run. `episodes` is games per optimizer step, in groups of `group_size` that share a game's seed."""

    steps: int = 56
    episodes: int = 128
    group_size: int = 8
    lr: float = 3e-4
    max_staleness: int = 1
    held_out: int = NUM_HELD_OUT_GAMES
    seed: int = 0
    model: Path = MODEL_DIR
    out: Path = Path("demo-out")
    json: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; ends the process with status 2 and one line where an option cannot be used. Makes the `--out` folder."""
    default = Options()
    parser = _Parser(prog="python -m examples.agentic.tictactoe.train", description="Train a tiny model at tic-tac-toe while it plays.")
    parser.add_argument("--steps", type=int, default=default.steps, help="optimizer steps (default %(default)s)")
    parser.add_argument("--episodes", type=int, default=default.episodes, help="games per step (default %(default)s)")
    parser.add_argument("--group-size", type=int, default=default.group_size, help="games that share one opponent (default %(default)s)")
    parser.add_argument("--lr", type=float, default=default.lr, help="learning rate of AdamW (default %(default)s)")
    parser.add_argument(
        "--max-staleness", type=int, default=default.max_staleness, help="versions a game may lag behind (default %(default)s)"
    )
    parser.add_argument("--held-out", type=int, default=default.held_out, help="games that measure the win rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=default.seed, help="decides opponents and draws (default %(default)s)")
    parser.add_argument("--model", type=Path, default=default.model, help="model folder (default: the embedded one)")
    parser.add_argument("--out", type=Path, default=default.out, help="folder for curve, transcripts and steps (default %(default)s)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON line on standard output; everything else goes to standard error"
    )
    options = Options(**vars(parser.parse_args(arguments)))
    refusal = _numbers(options) or _model(options.model) or _out(options.out)
    if refusal is not None:
        parser.error(refusal)
    return options


def _numbers(options: Options) -> str | None:
    """Return why the numbers cannot be used, None if they can."""
    ranges = {
        "steps": (1, MAX_STEPS),
        "episodes": (MICRO_BATCHES, None),
        "group_size": (2, None),
        "max_staleness": (0, None),
        "held_out": (1, None),
        "seed": (0, MAX_RUNS - 1),
    }
    for name, (least, most) in ranges.items():
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value < least:
            return f"{option} is {value}; it must be at least {least}: raise it, or leave it out for {getattr(Options(), name)}"
        if most is not None and value > most:
            return f"{option} is {value}; it must be at most {most}: lower it, or leave it out for {getattr(Options(), name)}"
    if not 0 < options.lr < math.inf:
        return f"--lr is {options.lr:g}; it must be above 0 and finite: try {Options().lr:g}"
    if options.episodes % options.group_size:
        return f"--episodes {options.episodes} must be a multiple of --group-size {options.group_size}: change one of them"
    if options.episodes // options.group_size > MAX_GROUPS:
        return f"--episodes {options.episodes} makes more than {MAX_GROUPS} groups a step: lower it, or raise --group-size"
    return None


def _model(folder: Path) -> str | None:
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    if not missing:
        return None
    found = f"has no {missing[0]}" if folder.is_dir() else "is no folder"
    return f"--model {folder} {found}; it must hold a Hugging Face model: name such a folder, or leave it out for the embedded one"


def _out(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"--out {folder} cannot be written to ({error.strerror}); it must be a folder of yours: name another one"
