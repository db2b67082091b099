"""What a push tells when it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What one push did. `changed_*` compare with the weights served before; `pause_ms` is all the time in which no row decodes.

    `transport` carried the bytes, `transport_reason` says why that one. `canary_gap` is the largest |trainer - service|
    log-probability over the canaries, None without any. `prepare_s`: gathering, casts, finiteness, digests and the trainer's own
    canaries; `staging_s`: the rest until all is staged, the copies among it; `inspect_s`: what the service took meanwhile to prove
    staged tensors, `derive_s`: to put them into the layout that it multiplies; `proof_ms`: what it took to prove them in the
    commit, its scoring included.
    """

    version: int
    trainer_step: int | None
    transport: str
    transport_reason: str
    num_tensors: int
    num_bytes: int
    changed_tensors: int
    changed_bytes: int
    seconds: float
    prepare_s: float
    staging_s: float
    swap_ms: float
    proof_ms: float
    pause_ms: float
    canary_gap: float | None
    canary_mean_gap: float | None
    decode_canary_gap: float | None
    inspect_s: float
    derive_s: float
    warning: str | None

    def __str__(self) -> str:
        """Return what one watches while training; `repr` has everything."""
        gap = "none compared" if self.canary_gap is None else f"{self.canary_gap:.1e}"
        warning = f", warning: {self.warning}" if self.warning else ""
        return f"version {self.version}, pause {self.pause_ms:.1f} ms, canary gap {gap}{warning}"

    def line(self) -> str:
        """Return all figures in one line, for a log."""
        gap = "none compared" if self.canary_gap is None else f"{self.canary_gap:.1e}"
        warning = f"; warning: {self.warning}" if self.warning else ""
        return (
            f"version {self.version} by {self.transport} ({self.transport_reason}): {self.num_tensors} tensors, "
            f"{self.num_bytes / 1e6:.1f} MB, changed {self.changed_tensors} and {self.changed_bytes / 1e6:.1f} MB; "
            f"{self.seconds:.2f} s, of it prepared {self.prepare_s:.2f}, staged {self.staging_s:.2f}; "
            f"swap {self.swap_ms:.1f} ms, proof {self.proof_ms:.1f} ms, pause {self.pause_ms:.1f} ms; canary gap {gap}{warning}"
        )


class PendingPush:
    """A push whose weights are staged and whose commit is under way: the trainer may change its own weights.

    `result` is to be called before the next push, on every rank of a sharded trainer.
    """

    def __init__(self, commit: Callable[[], PushReport] | None, conclude: Callable[[Callable[[], PushReport]], PushReport]) -> None:
        self._conclude = conclude
        self._outcome: PushReport | BaseException | None = None
        self._concluded: PushReport | BaseException | None = None
        self._thread: threading.Thread | None = None
        if commit is not None:
            self._thread = threading.Thread(target=self._run, args=(commit,), name="weight-commit", daemon=True)
            self._thread.start()

    def _run(self, commit: Callable[[], PushReport]) -> None:
        try:
            self._outcome = commit()
        except BaseException as error:
            self._outcome = error

    @property
    def done(self) -> bool:
        """Whether `result` would return at once, as far as this rank knows."""
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> PushReport:
        """Return the report. Blocks: until the version is published. Raises: what the commit raised; the old weights serve on then."""
        if self._concluded is None:
            if self._thread is not None:
                self._thread.join()
            try:
                self._concluded = self._conclude(lambda: _unwrapped(self._outcome))
            except BaseException as error:
                self._concluded = error
                raise
        return _unwrapped(self._concluded)


def _unwrapped(outcome: PushReport | BaseException | None) -> PushReport:
    if isinstance(outcome, BaseException):
        raise outcome
    assert outcome is not None, "an outcome is there once the commit has ended"
    return outcome
