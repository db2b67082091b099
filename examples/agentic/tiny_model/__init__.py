"""A model of one million parameters that answers tic-tac-toe boards with mostly legal moves; `MODEL_DIR` is what a service loads."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent
