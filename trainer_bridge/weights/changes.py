"""Whether pushes change anything: the digests of the last one, and how many in a row equal the one before.

A run whose optimizer holds other tensors than those that are pushed trains for weeks on old weights. One push that changes
nothing warns, the third in a row is refused before its commit. `push.WeightPush` on rank 0 owns one watch.
"""

from __future__ import annotations

from trainer_bridge.errors import WeightsUnchanged

MAX_UNCHANGED = 3


class ChangeWatch:
    """See the module. `allowed`: the trainer says that pushes may change nothing."""

    __slots__ = ("_allowed", "_last", "_num_pushes", "_unchanged", "warning")

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._last: dict[str, int] | None = None
        self._unchanged = 0
        self._num_pushes = 0
        self.warning: str | None = None

    def begin(self, *, foreign: bool) -> None:
        """A push begins; `foreign`: the service serves, or asks for, other weights than the last push brought."""
        if foreign:
            self._last, self._unchanged = None, 0

    def check(self, digests: dict[str, int]) -> None:
        """Refuse the third push in a row that equals the one before. Raises: WeightsUnchanged."""
        if self._last is None or digests != self._last or self._allowed or self._unchanged + 1 < MAX_UNCHANGED:
            return
        raise WeightsUnchanged(
            f"push number {self._num_pushes + 1} changes no tensor, like the {self._unchanged} before it",
            field="named_parameters",
            value=len(digests),
            limit=f"{MAX_UNCHANGED - 1} unchanged pushes in a row are accepted",
            remedy="check that the optimizer holds the parameters that are pushed (adapters merged?), or pass allow_unchanged=True",
        )

    def published(self, digests: dict[str, int], *, version: int, changed_tensors: int, regained: bool) -> str | None:
        """Take note of a commit; return the warning that it deserves. `regained`: the service had lost these weights."""
        same = not regained and (changed_tensors == 0 or self._last == digests)
        self._unchanged = self._unchanged + 1 if same else 0
        self._last = digests
        self._num_pushes += 1
        warns = self._unchanged > 0 and not self._allowed
        self.warning = f"version {version} equals the weights before it in every tensor" if warns else None
        return self.warning
