"""What the service says about itself: info, stats, tokenizer files. Reads its collaborators, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rollout.config import ServiceConfig
from rollout.service.admission import Admission
from rollout.service.calls import Calls
from rollout.service.control import ControlDesk
from rollout.service.outbound import Outbound
from rollout.service.sessions import Channel, Session
from rollout.service.supervisor import Supervisor
from rollout.tokenizer_files import chat_template_digest, tokenizer_digest
from rollout.wire.codec import PROTOCOL_VERSION, Packet
from rollout.wire.fields import Message
from rollout.wire.operations import Op
from rollout.wire.session_messages import StatsResult


class Answers:
    """See the module. `files` are the tokenizer's, `numbers` gives the front's counters and gauges, `health` its state."""

    def __init__(
        self,
        config: ServiceConfig,
        incarnation: bytes,
        outbound: Outbound,
        calls: Calls,
        control: ControlDesk,
        admission: Admission,
        supervisor: Supervisor,
        files: Mapping[str, bytes],
        *,
        numbers: Callable[[], dict[str, object]],
        health: Callable[[], str],
    ) -> None:
        self._config, self._incarnation, self._outbound, self._calls = config, incarnation, outbound, calls
        self._control, self._admission, self._supervisor = control, admission, supervisor
        self._numbers, self._health = numbers, health
        self._files = files
        # One object for all answers, however many wait to be sent.
        self._content = np.frombuffer(b"".join(files.values()), np.uint8)
        self._digests = {
            "tokenizer_digest": tokenizer_digest(self._files),
            "chat_template_digest": chat_template_digest(self._files),
        }

    def info(self, session: Session, packet: Packet) -> None:
        """Answer INFO."""
        facts = self._supervisor.facts
        fields = {
            "protocol_version": PROTOCOL_VERSION,
            "incarnation": self._incarnation,
            "address": self._config.address,
            "model": self._config.model,
            "health": self._health(),
            "version": self._admission.version,
            "needs_weights": self._control.needs_weights,
            "paused_by": self._control.paused_by,
            "asleep": self._admission.asleep,
            "weights_dir": str(self._config.weights_dir),
            "lease_s": float(self._config.lease_s),
            "max_message_bytes": self._config.max_message_bytes,
            "engine": None if facts is None else facts.model_dump(),
            **self._digests,
        }
        self._outbound.reply(session, Channel.DATA, Op.INFO_RESULT, packet.request_id, fields)

    def stats(self, session: Session, packet: Packet) -> None:
        """Answer STATS: at once without an engine, else together with the engine's numbers."""
        if not self._admission.ready:
            fields = {"values": self._numbers(), "engine": None}
            self._outbound.reply(session, Channel.DATA, Op.STATS_RESULT, packet.request_id, fields)
            return

        def joined(body: Message) -> Mapping[str, object]:
            assert isinstance(body, StatsResult)
            return {"values": self._numbers(), "engine": body.engine}

        self._calls.pass_on(session, Channel.DATA, packet.request_id, Op.STATS, {}, on_result=joined)

    def tokenizer_files(self, session: Session, packet: Packet) -> None:
        """Answer TOKENIZER_FILES."""
        entries = [{"name": name, "size": len(data)} for name, data in self._files.items()]
        self._outbound.reply(
            session, Channel.DATA, Op.TOKENIZER_FILES_RESULT, packet.request_id, {"files": entries}, {"content": self._content}
        )
