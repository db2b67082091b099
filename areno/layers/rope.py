"""What a model's rotary positions are: a base, and how its frequencies were stretched for a longer context. No torch here.

Read from config.json by `models.rope_config`, turned into angles by `layers.rotary`.
Source: linear position interpolation (arXiv 2306.15595); Llama 3.1; YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequencies that turn less than `low_turns` times in the original context are divided, those above `high_turns` kept.

    Between the two the share that is kept grows linearly with the number of turns.
    """

    factor: float
    low_turns: float
    high_turns: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Dimensions that turn less than `slow_turns` times in the original context are divided, those above `fast_turns` kept.

    Between the two the share that is kept falls linearly with the dimension; `whole_dimensions` widens that range to whole
    ones. Queries and keys are also multiplied by `magnitude`.
    """

    factor: float
    magnitude: float
    fast_turns: float
    slow_turns: float
    original_positions: int
    whole_dimensions: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions with base `theta`; without `scaling` they are of the plain kind."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
