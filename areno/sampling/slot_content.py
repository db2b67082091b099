"""What goes into a sampling slot when a row is set. Host only, no torch: it travels in the command log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContent:
    """A slot's contents. Shapes: ids int64; `bias_ids` and `bias_values` [<= 256].

    `prompt_ids` are the ids given; `output_ids` those the request has emitted so far (its own earlier output included), by
    which penalties count and forced ids are placed.
    """

    forced_ids: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    repetition: float
    presence: float
    frequency: float
    prompt_ids: np.ndarray
    output_ids: np.ndarray
