"""Tells a hung engine host from a slow one: while something is expected of it, it must say something now and then.

The supervisor calls it. A host that owes an answer or tokens and is silent for a quarter of `timeout_s` is asked for its
numbers, which its loop answers between two steps whatever it does; silent on, it is killed, and its death is then handled as
any other. A host that loads answers nothing and has `start_timeout_s`. Nobody asks an idle host anything.
"""

from __future__ import annotations

from rollout.errors import HostFailed
from rollout.service.calls import Calls
from rollout.wire.operations import Op

PROBE_SHARE = 4


class HostProbe:
    """Owns when the host was last heard; see the module."""

    def __init__(self, calls: Calls, *, timeout_s: float, start_timeout_s: float) -> None:
        self._calls, self._timeout_s, self._start_timeout_s = calls, timeout_s, start_timeout_s
        self._since: float | None = None
        self._asked = False

    def heard(self, now: float) -> None:
        """Note a sign of life."""
        self._since = now if self._since is not None else None
        self._asked = False

    def forget(self) -> None:
        """Begin anew: another host, or another state of this one."""
        self._since, self._asked = None, False

    def stood_still(self, seconds: float) -> None:
        """Leave out a time in which this process itself did not run."""
        if self._since is not None:
            self._since += seconds

    def judge(self, now: float, *, loading: bool, expected: bool) -> tuple[HostFailed | None, float | None]:
        """Return why the host is to be killed, or None, and when to look again."""
        if not loading and not expected:
            self.forget()
            return None, None
        if self._since is None:
            self._since = now
        limit_s = self._start_timeout_s if loading else self._timeout_s
        silent_s = now - self._since
        if silent_s >= limit_s:
            return self._failure(silent_s, loading=loading), None
        if loading:
            return None, self._since + limit_s
        ask_at = self._since + limit_s / PROBE_SHARE
        if now >= ask_at and not self._asked:
            self._asked = True
            self._calls.ask(Op.STATS, {})
        return None, self._since + limit_s if self._asked else ask_at

    @staticmethod
    def _failure(silent_s: float, *, loading: bool) -> HostFailed:
        option = "host_start_timeout_s" if loading else "host_timeout_s"
        return HostFailed(
            f"the engine host {'was not ready' if loading else 'gave no sign of life'} for {silent_s:.1f} s",
            field=option,
            value=round(silent_s, 1),
            limit=f"{option} has passed, so it was killed",
            remedy=f"submit the request again; raise {option} if the engine's steps, commits or its start take so long",
        )
