"""Tensors made of the weights: a copy in another layout or dtype, which a forward reads in the weights' place.

`names.ParameterTable` owns them. The copy of the next weights is made while those are staged, so that a commit only puts it in
the current one's place: remaking them would be most of a pause. Nothing captures their addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Make = Callable[[torch.Tensor], torch.Tensor]


class DerivedCopy:
    """A copy of one storage. `current` is that of the live weights once the table has rebuilt it."""

    __slots__ = ("_live", "_make", "current")

    def __init__(self, live: torch.Tensor, make: Make) -> None:
        self._live, self._make = live, make
        self.current = live

    def rebuild(self) -> None:
        """Make the copy of the live weights anew. Mutates: `current`."""
        self.current = self.made_of(self._live)

    def made_of(self, staged: torch.Tensor) -> torch.Tensor:
        """Return the copy of weights that wait for their swap. Shapes: as the live storage."""
        # Made in inference mode it could not be read outside of it.
        with torch.inference_mode(False):
            return self._make(staged)

    def exchange(self, other: torch.Tensor) -> torch.Tensor:
        """Put a copy in the place of the current one, and return that. Mutates: `current`."""
        other, self.current = self.current, other
        return other
