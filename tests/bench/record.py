"""The one shape in which every benchmark speaks: what was run, on what, and one row per case.

    {"bench", "commit", "date", "hardware", "torch", "config": {...}, "rows": [{...}, ...]}

Rows name their case and carry units in their keys. `publish` prints the object as one line and writes it on request.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def hardware() -> str:
    """Return the processor (or card) and how many cores may be used."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Return the commit of the working tree, marked where it has changes."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON line only")
    parser.add_argument("--output", type=_output, help="also write the JSON to this file")
    return parser


def _output(given: str) -> Path:
    """Return the path of a file whose folder is there: said before minutes of work, not after."""
    path = Path(given)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{given!r} is a folder, or lies in none; name a file in a folder that exists")
    return path


def compose(bench: str, config: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one benchmark's result."""
    return {
        "bench": bench,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "hardware": hardware(),
        "torch": torch.__version__,
        "config": config,
        "rows": rows,
    }


def keep(result: dict[str, Any], output: Path | None) -> None:
    """Write a result, or what there is of it, so that a file is never half written."""
    if output is not None:
        beside = output.with_name(output.name + ".part")
        beside.write_text(json.dumps(result, indent=1) + "\n")
        beside.replace(output)


def publish(bench: str, config: dict[str, Any], rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Print and write one benchmark's result; return it."""
    result = compose(bench, config, rows)
    keep(result, options.output)
    if not options.json:
        for row in rows:
            print("  ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()))
    print(json.dumps(result))
    return result
