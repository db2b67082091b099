"""Pause and weight updates as leases of the session that holds them.

The front calls it with control messages; the engine host does the work. Any number of sessions may hold a pause, the
engine stands still while one does; one session may hold an update. Both end with their holder: the pause is lifted,
the update aborted. Versions are handed out here, from the state folder, and only grow.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollout.errors import (
    HostFailed,
    NeedsWeights,
    NoUpdate,
    PauseHeld,
    RolloutError,
    ServiceStopping,
    UpdateBusy,
    WeightsChanged,
    WeightUpdateError,
    error_fields,
)
from rollout.service.admission import Admission
from rollout.service.calls import Calls
from rollout.service.commit_gate import CommitGate, WaitingCommit
from rollout.service.host_link import HostLink, LostWeights
from rollout.service.sessions import Channel, Session
from rollout.service.sleepers import Sleepers
from rollout.wire.codec import Packet
from rollout.wire.control_messages import (
    EvaluateBegin,
    EvaluateEnd,
    WeightsBegin,
    WeightsCommit,
    WeightsReport,
    WeightsStageFile,
    WeightsUpdateRef,
)
from rollout.wire.fields import Message
from rollout.wire.operations import Op
from rollout.wire.session_messages import ErrorBody
from rollout.wire.weight_handles import WeightsJoinGroup, WeightsStageBucket

# A trainer waits for answers long before; this only bounds what one that does not can pile up in the host.
MAX_OPEN_STAGES = 32


@dataclass(slots=True)
class OpenUpdate:
    """The one update under way. `restore` tells that it brings back the version itself, `partial` that it leaves tensors as they are."""

    update_id: str
    version: int
    holder: Session
    since: float
    restore: bool = False
    partial: bool = False
    committing: bool = False
    staging: int = 0


class ControlDesk:
    """Owns pause holders, the open update and the digests of the published version; see the module."""

    def __init__(
        self,
        link: HostLink,
        calls: Calls,
        admission: Admission,
        gate: CommitGate,
        next_version: Callable[[], int],
        on_published: Callable[[int], None],
    ) -> None:
        self._link, self._calls, self._admission, self._gate = link, calls, admission, gate
        self.sleepers = Sleepers(link, calls, admission, gate.let_held_go)
        self._next_version, self._on_published = next_version, on_published
        self._holders: dict[int, tuple[str, float]] = {}
        # A session that had a pause may resume twice, as a call that is sent again does.
        self._have_paused: set[int] = set()
        self._update: OpenUpdate | None = None
        self._digests: dict[str, int] | None = None
        self.needs_weights: int | None = None
        self.committed = False

    @property
    def update(self) -> OpenUpdate | None:
        """The update under way."""
        return self._update

    @property
    def lost(self) -> LostWeights | None:
        """The weights that a new host is to bring back, None if there are none."""
        return None if self.needs_weights is None else LostWeights(self.needs_weights, self._digests)

    def host_ready(self, version: int) -> None:
        """Tell a new host what holds; `version` is what it serves, the lost one if it took that up by itself."""
        if version == self.needs_weights:
            self.needs_weights = None
        if self._holders:
            self._link.send(Op.PAUSE, {})
        self.sleepers.host_ready()

    def host_died(self) -> None:
        """Forget the update that died with the host, and its sleep."""
        self._update = None
        self.sleepers.host_died()
        waiting = self._gate.withdraw()
        if waiting is not None:
            waiting.refuse(HostFailed("the engine host died while the commit waited", remedy="push again once info().health allows it"))
        if self.committed:
            self.needs_weights = self._admission.version

    def pause(self, session: Session) -> None:
        """Let the engine stand still for a session; idempotent."""
        if not self._holders:
            self._link.send(Op.PAUSE, {})
        self._have_paused.add(session.number)
        self._holders.setdefault(session.number, (session.label, time.monotonic()))
        self._admission.paused = True

    @property
    def paused_by(self) -> list[str]:
        """Who holds a pause, and for how long."""
        now = time.monotonic()
        return [f"{label} for {now - since:.1f} s" for label, since in self._holders.values()]

    def resume(self, session: Session) -> None:
        """Drop a session's pause; idempotent. Raises: PauseHeld to a session that never paused while another one does."""
        if self._holders and session.number not in self._have_paused:
            raise PauseHeld(
                "this client never paused, and the engine stands still for another",
                value=", ".join(self.paused_by),
                limit=f"paused by {', '.join(self.paused_by)}",
                remedy="resume from that client, or end it: a pause ends with its holder's session",
            )
        self._drop_pause(session)

    def _drop_pause(self, session: Session) -> None:
        held = self._holders.pop(session.number, None)
        if held is not None and not self._holders:
            self._admission.paused = False
            self._link.send(Op.RESUME, {})

    def end_session(self, session: Session) -> None:
        """End what a session held."""
        self._drop_pause(session)
        self._have_paused.discard(session.number)
        update = self._update
        mine = update is not None and update.holder is session
        if update is not None and mine and (not update.committing or self._gate.withdraw() is not None):
            self._link.send(Op.WEIGHTS_ABORT, {"update_id": update.update_id})
            self._update = None
        self._gate.end_session(session, time.monotonic())
        self.sleepers.end_session(session)

    def sleep(self, session: Session, packet: Packet) -> None:
        """Let the engine give memory back for a session. Raises: UpdateBusy, HostFailed."""
        self.sleepers.sleep(session, packet, None if self._update is None else self._update.holder.label)

    def wake(self, session: Session, packet: Packet) -> None:
        """Let the engine take its memory back, unless another session lets it sleep."""
        if not self.sleepers.wake(session, packet):
            self._calls.reply(session, packet.request_id, Op.DONE, {})

    def advance(self, now: float) -> float | None:
        """Do what commits and evaluations have due; return when to look again."""
        return self._gate.advance(now)

    def waits_for(self, session: Session, request_id: bytes) -> bool:
        """Tell whether this call of a session waits to be begun."""
        return self._gate.waits_for(session, request_id)

    def begin_evaluation(self, session: Session, packet: Packet) -> None:
        """Keep commits away for a session. Raises: what keeps requests out."""
        body = packet.body
        assert isinstance(body, EvaluateBegin)
        refusal = self._admission.refusal()
        if refusal is not None:
            raise refusal

        def started(evaluation_id: str, version: int) -> None:
            self._calls.reply(session, packet.request_id, Op.EVALUATION, {"evaluation_id": evaluation_id, "version": version})

        self._gate.begin_evaluation(session, packet.request_id, body.deadline_s, time.monotonic(), started)

    def end_evaluation(self, session: Session, packet: Packet) -> None:
        """Let commits go on. Raises: NoEvaluation."""
        body = packet.body
        assert isinstance(body, EvaluateEnd)
        self._gate.end_evaluation(session, body.evaluation_id, time.monotonic())
        self._calls.reply(session, packet.request_id, Op.DONE, {})

    def begin(self, session: Session, packet: Packet) -> None:
        """Open an update under a fresh version. Raises: UpdateBusy, HostFailed, WeightUpdateError."""
        body = packet.body
        assert isinstance(body, WeightsBegin)
        self.sleepers.check_awake("a weight update")
        if self._update is not None:
            age = time.monotonic() - self._update.since
            raise UpdateBusy(
                f"update {self._update.update_id} is open",
                field="update",
                value=self._update.holder.label,
                limit=f"held by {self._update.holder.label} for {age:.1f} s; one update at a time",
                remedy="wait for its commit or abort; that of a client that is gone ends with its lease (info().lease_s)",
            )
        if not self._admission.ready:
            raise HostFailed("no engine host is ready", remedy="wait until info().health is 'ready' or 'needs_weights'")
        if body.partial and self.needs_weights is not None:
            raise WeightUpdateError(
                "a partial update is refused",
                field="partial",
                value=True,
                limit=f"the engine restarted from its folder and lacks the rest of version {self.needs_weights}",
                remedy="push all tensors",
            )
        restore = body.restore is not None
        version = self._restored(body.restore) if body.restore is not None else self._next_version()
        update = OpenUpdate(
            update_id=secrets.token_hex(8), version=version, holder=session, since=time.monotonic(), restore=restore, partial=body.partial
        )
        fields = {"update_id": update.update_id, "version": version, "manifest": body.model_dump()["manifest"], "partial": body.partial}
        ticket = {"update_id": update.update_id, "version": version}
        self._calls.pass_on(
            session,
            Channel.CONTROL,
            packet.request_id,
            Op.UPDATE_OPEN,
            fields,
            on_result=lambda _: ticket,
            on_error=lambda _: self._close(update),
            result_op=Op.WEIGHTS_TICKET,
        )
        self._update = update

    def _restored(self, version: int) -> int:
        if version != self.needs_weights:
            raise WeightUpdateError(
                f"restore={version} is refused",
                field="restore",
                value=version,
                limit="needed weights: none" if self.needs_weights is None else f"needed weights: version {self.needs_weights}",
                remedy="push under a new version: leave restore out",
            )
        if self._digests is None:
            raise WeightUpdateError(
                f"restore={version} cannot be proven",
                field="restore",
                value=version,
                limit="the commit, or those that partial updates added to, brought no digests of some tensors",
                remedy="push under a new version: leave restore out",
            )
        return version

    def _close(self, update: OpenUpdate) -> None:
        if self._update is update:
            self._update = None

    def _mine(self, session: Session, update_id: str) -> OpenUpdate:
        update = self._update
        if update is None or update.update_id != update_id or update.holder is not session:
            raise NoUpdate(
                f"update {update_id!r} is not open for this client",
                field="update_id",
                value=update_id,
                limit="an update belongs to the client that began it, until it is committed, aborted or lost",
                remedy="open one with weights_begin",
            )
        return update

    def stage(self, session: Session, packet: Packet) -> None:
        """Let the host take a file's or a bucket's tensors, or join a group to get them by. Raises: NoUpdate, WeightUpdateError."""
        body = packet.body
        assert isinstance(body, (WeightsStageFile, WeightsStageBucket, WeightsJoinGroup))
        update = self._mine(session, body.update_id)
        if update.staging >= MAX_OPEN_STAGES:
            raise WeightUpdateError(
                f"{update.staging} files and buckets wait to be staged",
                field="update_id",
                value=update.staging,
                limit=f"at most {MAX_OPEN_STAGES} at a time",
                remedy="wait for answers before more is sent",
            )

        def answered(_: object) -> None:
            update.staging -= 1

        self._calls.pass_on(
            session,
            Channel.CONTROL,
            packet.request_id,
            packet.op,
            body.model_dump(),
            packet.arrays,
            on_result=answered,
            on_error=answered,
        )
        update.staging += 1

    def commit(self, session: Session, packet: Packet) -> None:
        """Let the host prove and publish, once the requests are as the mode asks. Raises: NoUpdate, WeightUpdateError."""
        body = packet.body
        assert isinstance(body, WeightsCommit)
        update = self._mine(session, body.update_id)
        if update.committing:
            raise WeightUpdateError(
                f"update {body.update_id} is being committed", field="update_id", remedy="wait for that commit's answer"
            )
        update.committing = True

        def refuse(error: RolloutError) -> None:
            update.committing = False
            self._calls.reply(session, packet.request_id, Op.ERROR, error_fields(error))

        waiting = WaitingCommit(
            session=session,
            request_id=packet.request_id,
            mode=body.mode,
            drain_s=body.drain_s,
            go=lambda: self._commit_now(update, packet, body),
            refuse=refuse,
        )
        self._gate.ask(waiting, time.monotonic())

    def _commit_now(self, update: OpenUpdate, packet: Packet, body: WeightsCommit) -> None:
        fields = body.model_dump()
        if update.restore:
            fields["digests"] = self._digests

        def published(result: Message) -> Mapping[str, object] | None:
            assert isinstance(result, WeightsReport)
            self._close(update)
            self._digests = self._digests_after(update, fields["digests"])
            self.committed = True
            self.needs_weights = None
            self._on_published(result.version)
            self._gate.finish(time.monotonic())
            return None

        def refused(error: ErrorBody) -> Mapping[str, object] | None:
            self._close(update)
            self._gate.finish(time.monotonic())
            if update.restore and error.code == "digest_mismatch":
                return error_fields(
                    WeightsChanged(
                        f"restore={update.version} brought other weights",
                        limit=error.what,
                        remedy="push under a new version: leave restore out",
                    )
                )
            return None

        self._calls.pass_on(
            update.holder,
            Channel.CONTROL,
            packet.request_id,
            Op.WEIGHTS_COMMIT,
            fields,
            packet.arrays,
            on_result=published,
            on_error=refused,
            # It may go long after its message came, from the loop itself; there is one at a time.
            refusable=False,
        )

    def _digests_after(self, update: OpenUpdate, brought: dict[str, int] | None) -> dict[str, int] | None:
        """Return the digests of all live tensors after a commit, or None if some are not known."""
        if not update.partial or brought is None:
            return None if update.partial else brought
        return None if self._digests is None else {**self._digests, **brought}

    def abort(self, session: Session, packet: Packet) -> bool:
        """Drop an update; idempotent. Returns True if the host answers the call, False if there is nothing to drop."""
        body = packet.body
        assert isinstance(body, WeightsUpdateRef)
        update = self._update
        if update is None or update.update_id != body.update_id or update.holder is not session:
            return False
        if update.committing:
            waiting = self._gate.withdraw()
            if waiting is None:
                raise WeightUpdateError(
                    f"update {body.update_id} is being committed", field="update_id", remedy="wait for the commit's answer"
                )
            waiting.refuse(NoUpdate("the update was aborted while its commit waited", field="update_id", value=body.update_id))
        self._update = None
        self._calls.pass_on(session, Channel.CONTROL, packet.request_id, Op.WEIGHTS_ABORT, {"update_id": body.update_id}, refusable=False)
        return True


def refusal(needs_weights: int | None, failure: RolloutError | None, stopping: bool) -> RolloutError | None:
    """Return why no request is taken now, or None."""
    if stopping:
        return ServiceStopping("the service is stopping", remedy="start it again")
    if failure is not None:
        return HostFailed(
            f"the engine host cannot run: {failure.what}", limit=failure.limit, remedy=failure.remedy or "see the service's log"
        )
    if needs_weights is not None:
        return NeedsWeights(
            f"the engine restarted and waits for weights of version {needs_weights}",
            value=needs_weights,
            limit="generation under other weights than announced is refused",
            remedy="push the trainer's weights",
        )
    return None
