"""What a saved source looks like, checked before anything of it is used.

`flight.GroupFlight` saves and loads it. Invariant: a state that passes accounts for every prompt up to its cursor.
"""

from __future__ import annotations

from typing import Any

from trainer_bridge.errors import InvalidState, shown

STATE_FORMAT = 2
KEYS = frozenset({"format", "seed", "cursor", "prompts", "pending", "delivered"})


def _refusal(field: str, value: object, limit: str) -> InvalidState:
    return InvalidState(f"{field}={shown(value)}", field=field, value=value, limit=limit, remedy="load what state_dict() returned")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_state(state: Any) -> None:
    """Check types, ranges and that the numbers add up. Raises: InvalidState."""
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT or set(state) != KEYS:
        told = f"format {state.get('format')!r} with the keys {sorted(map(str, state))}" if isinstance(state, dict) else repr(type(state))
        raise InvalidState(
            f"a state of {told}", field="format", value=told, limit=f"format {STATE_FORMAT}", remedy="load what state_dict() returned"
        )
    for name in ("cursor", "delivered"):
        if not _is_count(state[name]):
            raise _refusal(name, state[name], "an integer of at least 0")
    if isinstance(state["seed"], bool) or not isinstance(state["seed"], int):
        raise _refusal("seed", state["seed"], "an integer")
    prompts = state["prompts"]
    if not isinstance(prompts, dict) or set(prompts) != {"count", "digest"}:
        raise _refusal("prompts", prompts, "the count and the digest of the prompts")
    pending, cursor = state["pending"], state["cursor"]
    if not isinstance(pending, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_count, pair)) and pair[0] < cursor for pair in pending
    ):
        raise _refusal("pending", pending, f"pairs of a prompt number below cursor={cursor} and an attempt")
    if len({index for index, _ in pending}) != len(pending) or state["delivered"] + len(pending) != cursor:
        raise _refusal("pending", pending, f"each number once, and with delivered={state['delivered']} as many as cursor={cursor}")
