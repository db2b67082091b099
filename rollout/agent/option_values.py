"""Checks of an episode's, a group's and a tool's options, and of the client; each refusal names field, value, limit and remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def check_kind(name: str, value: Any, kind: type, *, absent: bool = False) -> None:
    """Refuse what is no `kind`; None is taken where `absent` says so. Raises: InvalidEpisode."""
    if isinstance(value, kind) or (absent and value is None):
        return
    unpacks = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    raise InvalidEpisode(
        f"{name} is a {type(value).__name__}",
        field=name,
        value=type(value).__name__,
        limit=f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__} is needed",
        remedy=f"pass {kind.__name__}({'**that' if unpacks else '...'})" + (", or leave it out" if absent else ""),
    )


def check_environment_maker(make_environment: Any) -> None:
    """Refuse what cannot be called to make an environment. Raises: InvalidEpisode."""
    if not callable(make_environment):
        raise InvalidEpisode(
            f"make_environment is a {type(make_environment).__name__}, which cannot be called",
            field="make_environment",
            value=type(make_environment).__name__,
            limit="a class or a function that makes a new environment for each episode",
            remedy="pass the class itself, or lambda: YourEnvironment(...)",
        )


def check_client(client: Any) -> None:
    """Refuse what an episode cannot talk through, a blocking client above all. Raises: InvalidEpisode."""
    # What every episode calls; the other calls of `PolicyClient` are for some.
    generates = callable(getattr(client, "generate", None))
    blocking = hasattr(client, "aio")
    if blocking or not generates:
        raise InvalidEpisode(
            f"client is a {type(client).__name__}" + (", which blocks" if blocking else " without generate"),
            field="client",
            value=type(client).__name__,
            limit="an episode awaits its client's calls",
            remedy="pass client.aio" if blocking else "pass rollout.connect(...).aio, or what `await rollout.connect_async(...)` returned",
        )
