"""Checks of the numbers among an episode's, a group's and a tool's options; each refusal names field, value, limit and remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.agent.errors import AgentError, InvalidEpisode
from rollout.errors import shown


def check_count(name: str, value: Any, least: int, *, error: Callable[..., AgentError] = InvalidEpisode) -> None:
    """Refuse what is no integer of at least `least`. Raises: `error`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise error(f"{name}={shown(value)}", field=name, value=value, limit=f"an integer of at least {least}", remedy=f"set {name} to one")


def check_seconds(name: str, value: Any, *, error: Callable[..., AgentError] = InvalidEpisode) -> None:
    """Refuse what is no time above 0; infinity sets no bound. Raises: `error`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0 < value <= 1e9 or value == float("inf")):
        raise error(
            f"{name}={shown(value)}",
            field=name,
            value=value,
            limit="above 0, up to 1e9 seconds, or infinity",
            remedy=f"set {name} in seconds",
        )


def check_seed(name: str, value: Any) -> None:
    """Refuse what is no 64-bit seed. Raises: InvalidEpisode."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise InvalidEpisode(
            f"{name}={shown(value)}",
            field=name,
            value=value,
            limit="an integer from 0 to 2**64 - 1",
            remedy="pass one, or leave it out to draw one",
        )
