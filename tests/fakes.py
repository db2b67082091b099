"""Hand-written stand-ins for tests; nothing in the packages imports them.

`FakeEngine` has the engine's interface without a model: ids, log-probabilities and kept sets are a function of seed, position
and version, so every test can compute what it must receive. Rows, waiting, stop ids, forced ids, resumed output, prompt
log-probabilities, cancelling and weight updates behave as the engine's; `step_s` slows each step down. It runs inside a real
engine host process, chosen by the host's JSON config.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno.errors import Asleep, DigestMismatch, ManifestMismatch, NoUpdate, UpdateBusy
from areno.request import Request, RequestLimits, check_request, resolve_stop_ids
from areno.step_output import Finished, FinishKind, FinishReason, PromptScore, StepOutput
from rollout.client.local import LocalService
from rollout.wire.codec import Packet, decode, encode
from rollout.wire.curve import ClientKey
from rollout.wire.operations import CLIENT_REPLIES, CONTROL_REQUESTS, DATA_REQUESTS, Op
from rollout.wire.security import new_token
from rollout.wire.transport import Context, Poller, Sent

VOCABULARY = 256
EOS_ID = 2
TENSORS = {"first.weight": ("float32", (4, 8)), "second.weight": ("float32", (8, 2))}


def fake_ids(seed: int, count: int, start: int = 0) -> np.ndarray:
    """Return the ids that a fake request with this seed samples; never the end id."""
    positions = np.arange(start, start + count, dtype=np.uint64)
    mixed = (positions + np.uint64(seed % 2**32)) * np.uint64(2654435761) % np.uint64(2**32)
    return (mixed % np.uint64(VOCABULARY - 10)).astype(np.int32) + 10


def fake_logprobs(ids: np.ndarray, version: int) -> np.ndarray:
    """Return the log-probabilities of these ids under a version."""
    return (-1.0 - ids.astype(np.float32) / 256 - version / 16).astype(np.float32)


def fake_kept(token_id: int, top_k: int) -> list[int]:
    """Return the kept set of a fake's token: the id and some of its neighbours."""
    return [(token_id + step) % VOCABULARY for step in range(1 + token_id % top_k)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeInfo:
    """The engine info of a fake."""

    model_type: str = "fake"
    dtype: str = "float32"
    device: str = "cpu"
    vocab_size: int = VOCABULARY
    num_valid_ids: int = VOCABULARY
    eos_ids: tuple[int, ...] = (EOS_ID,)
    max_model_len: int = 100_000
    page_size: int = 16
    num_pages: int = 10_000
    pool_tokens: int = 160_000
    max_rows: int = 64
    sampling_slots: int = 32
    run_ahead: int = 0
    decode_tables: str = "resident"
    kept_ids: bool = False
    result_transport: str = "host"
    result_transport_reason: str = "a fake runs on the CPU"
    num_parameters: int = 48
    tp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScore:
    """The score of a fake."""

    token_logprobs: np.ndarray
    raw_logprobs: np.ndarray
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeReport:
    """The update report of a fake."""

    version: int
    num_tensors: int
    num_bytes: int
    changed_tensors: int
    changed_bytes: int
    staging_s: float = 0.001
    swap_ms: float = 0.1
    proof_ms: float = 0.1
    pause_ms: float = 0.2
    canary_gap: float | None = None
    canary_mean_gap: float | None = None
    decode_canary_gap: float | None = None
    inspect_s: float = 0.0
    derive_s: float = 0.0
    warning: str | None = None


@dataclass(slots=True)
class _Row:
    request: Request
    seed: int
    stops: frozenset[int]
    versions: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.versions)


class FakeEngine:
    """See the module. `tokens_per_step` is how many tokens each running row gets in one step."""

    lost_fd = None

    def __init__(
        self,
        *,
        model: str,
        initial_version: int = 0,
        max_rows: int = 64,
        kept_ids: bool = False,
        step_s: float = 0.0,
        load_s: float = 0.0,
        tokens_per_step: int = 1,
        fail_at_load: str | None = None,
        fail_at_step: int | None = None,
        broken_stats: str | None = None,
        **_: Any,
    ) -> None:
        time.sleep(load_s)
        if fail_at_load:
            raise ManifestMismatch(fail_at_load, remedy="this is a test")
        self.info = FakeInfo(max_rows=max_rows, kept_ids=kept_ids)
        self.version = initial_version
        self._hints: dict[tuple[str, str | None], str] = {}
        self._limits = RequestLimits(
            vocab_size=VOCABULARY,
            num_valid_ids=VOCABULARY,
            max_model_len=self.info.max_model_len,
            pool_tokens=self.info.pool_tokens,
            eos_ids=self.info.eos_ids,
            sampling_slots=self.info.sampling_slots,
            kept_ids=kept_ids,
        )
        self._step_s, self._tokens_per_step, self._fail_at_step = step_s, tokens_per_step, fail_at_step
        self._broken_stats = broken_stats
        self._waiting: deque[_Row] = deque()
        self._running: dict[int, _Row] = {}
        self._ended: list[Finished] = []
        self._scored: list[PromptScore] = []
        self._weights = {name: np.zeros(shape, np.float32) for name, (_, shape) in TENSORS.items()}
        self._staged: dict[str, np.ndarray] | None = None
        self._partial = False
        self.asleep: str | None = None
        self._update_version = 0
        self._steps = 0

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Names, dtypes and shapes of a full update."""
        from areno.weights.names import TensorSpec

        return {name: TensorSpec(dtype=dtype, shape=shape) for name, (dtype, shape) in TENSORS.items()}

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._waiting or self._running or self._ended)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        check_request(request, self._limits)
        seed = request.sampling.seed if request.sampling.seed is not None else 12345
        self._waiting.append(_Row(request, seed, frozenset(resolve_stop_ids(request.sampling, self._limits).tolist())))

    def cancel(self, request_id: int, *, kind: FinishKind = FinishKind.CANCELLED, detail: str | None = None) -> bool:
        """End a request; False if it is unknown or ended."""
        row = self._running.pop(request_id, None)
        if row is None:
            row = next((one for one in self._waiting if one.request.request_id == request_id), None)
            if row is None:
                return False
            self._waiting.remove(row)
        self._end(row, FinishReason(kind=kind, detail=detail))
        return True

    def _end(self, row: _Row, reason: FinishReason) -> None:
        prompt = len(row.request.prompt_ids)
        spans: list[tuple[int, int]] = [(0, row.versions[0] if row.versions else self.version)]
        for position, version in enumerate(row.versions):
            if version != spans[-1][1]:
                spans.append((prompt + position, version))
        self._ended.append(
            Finished(
                request_id=row.request.request_id,
                reason=reason,
                prompt_tokens=prompt,
                output_tokens=row.count,
                cached_tokens=0,
                seed=row.seed,
                kv_spans=tuple(spans),
            )
        )

    def step(self) -> StepOutput:
        """Give every running row its tokens."""
        time.sleep(self._step_s)
        self._steps += 1
        if self._fail_at_step is not None and self._steps >= self._fail_at_step:
            raise RuntimeError("the fake engine fails as told")
        while self._waiting and len(self._running) < self.info.max_rows:
            row = self._waiting.popleft()
            self._running[row.request.request_id] = row
            self._score_prompt(row.request)
        sampled: list[tuple[Request, int]] = []
        for _ in range(self._tokens_per_step):
            for row in list(self._running.values()):
                sampled.append((row.request, self._next_id(row)))
                self._advance(row, sampled[-1][1])
        return self._output(sampled)

    def _score_prompt(self, request: Request) -> None:
        start = request.sampling.prompt_logprobs_from
        if start is None:
            return
        logprobs = fake_logprobs(np.asarray(request.prompt_ids)[start:], self.version)
        raw = logprobs - np.float32(0.5)
        self._scored.append(
            PromptScore(request_id=request.request_id, start=start, logprobs=logprobs, raw_logprobs=raw, version=self.version)
        )

    def collect(self) -> StepOutput:
        """Return what is not told yet, giving nobody a token."""
        return self._output([])

    def _next_id(self, row: _Row) -> int:
        forced, place = row.request.sampling.forced_ids, row.request.prior_output_tokens + row.count
        if forced is not None and place < len(forced):
            return int(forced[place])
        return int(fake_ids(row.seed, 1, place)[0])

    def _advance(self, row: _Row, sampled: int) -> None:
        row.versions.append(self.version)
        sampling, count = row.request.sampling, row.request.prior_output_tokens + row.count
        if sampled in row.stops and count > sampling.min_new_tokens:
            reason = FinishReason(kind=FinishKind.STOP, stop_id=sampled)
        elif count >= sampling.max_new_tokens:
            reason = FinishReason(kind=FinishKind.LENGTH)
        else:
            return
        del self._running[row.request.request_id]
        self._end(row, reason)

    def _output(self, sampled: Sequence[tuple[Request, int]]) -> StepOutput:
        ids = np.array([token for _, token in sampled], np.int32)
        logprobs = fake_logprobs(ids, self.version)
        wants = np.array([request.sampling.logprobs for request, _ in sampled], bool)
        filtered = np.array([request.sampling.filters for request, _ in sampled], bool)
        kept = [fake_kept(token, one.sampling.top_k) if one.sampling.return_kept_ids else [] for one, token in sampled]
        ended, self._ended = tuple(self._ended), []
        scored, self._scored = tuple(self._scored), []
        return StepOutput(
            request_ids=np.array([request.request_id for request, _ in sampled], np.int64),
            token_ids=ids,
            logprobs=np.where(wants, logprobs, np.float32(np.nan)),
            raw_logprobs=np.where(wants, logprobs - np.float32(0.5), np.float32(np.nan)),
            behaviour_logprobs=np.where(wants & filtered, logprobs + np.float32(0.25), np.float32(np.nan)),
            versions=np.full(ids.size, self.version, np.int64),
            kept_counts=np.array([len(one) for one in kept], np.int32) if any(kept) else None,
            kept_ids=np.array([token for one in kept for token in one], np.int32) if any(kept) else None,
            finished=ended,
            prompt_scores=scored,
        )

    def score(self, ids: np.ndarray, *, temperature: float = 1.0) -> FakeScore:
        """Score given ids."""
        if self.asleep is not None:
            raise Asleep("a score of a fake that sleeps", remedy="wake it")
        logprobs = fake_logprobs(np.asarray(ids)[1:], self.version)
        return FakeScore(token_logprobs=logprobs, raw_logprobs=logprobs - np.float32(0.5), version=self.version)

    def begin_update(self, manifest: Mapping[str, Any] | None, *, version: int, partial: bool = False) -> None:
        """Open an update."""
        if self._staged is not None:
            raise UpdateBusy("an update is open", remedy="abort it")
        if manifest is not None and not partial and set(manifest) != set(TENSORS):
            raise ManifestMismatch(f"tensors {sorted(set(manifest) ^ set(TENSORS))}", field="manifest", remedy="bring the model's tensors")
        self._staged, self._update_version, self._partial = {}, version, partial

    def stage(self, name: str, tensor: Any) -> None:
        """Take one tensor."""
        if self._staged is None:
            raise NoUpdate("no update is open", remedy="begin one")
        if name not in TENSORS or tuple(tensor.shape) != TENSORS[name][1]:
            raise ManifestMismatch(f"tensor {name} of shape {tuple(tensor.shape)}", field=name, remedy="bring the model's tensors")
        self._staged[name] = tensor.numpy().copy()

    def open_slice(self, name: str, *, start: int, count: int, spec: Any) -> None:
        """Give no memory: slices are looked at as they come."""

    def close_slice(self, filled: Any) -> None:
        """None was opened."""
        raise AssertionError("a slice is closed that was never opened")

    def open_memory(self, handle: bytes) -> None:
        """There are no other ranks."""

    def stage_slices(self, slices: Sequence[Any]) -> None:
        """Take parts of tensors; each counts as staged from its first one on."""
        if self._staged is None:
            raise NoUpdate("no update is open", remedy="begin one")
        for one in slices:
            shape = tuple(one.spec.shape)
            if one.name not in TENSORS or shape != TENSORS[one.name][1]:
                raise ManifestMismatch(f"tensor {one.name} of shape {shape}", field=one.name, remedy="bring the model's tensors")
            whole = self._staged.setdefault(one.name, np.zeros(shape, np.float32))
            whole.reshape(-1)[one.start : one.start + one.values.numel()] = one.values.numpy()

    def launch_slices(self) -> None:
        """Nothing is late here."""

    def slices_copied(self, launched: Any) -> bool:
        """Nothing is late here."""
        return True

    def settle_slices(self) -> None:
        """Nothing is late here."""

    def inspect_update(self) -> bool:
        """Nothing is late here."""
        return True

    def commit_update(self, *, digests: Mapping[str, int] | None = None, canaries: Sequence[Any] = ()) -> FakeReport:
        """Publish the update."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise NoUpdate("no update is open", remedy="begin one")
        if not self._partial and set(staged) != set(TENSORS):
            raise ManifestMismatch("the update is not complete", field="manifest", remedy="stage every tensor")
        for name, digest in (digests or {}).items():
            if int(staged[name].view(np.uint32).astype(np.uint64).sum()) != digest:
                raise DigestMismatch(f"digest of {name}", field=name, value=digest, remedy="stage it again")
        changed = [name for name, tensor in staged.items() if not np.array_equal(tensor, self._weights[name])]
        changed_bytes = sum(staged[name].nbytes for name in changed)
        self._weights.update(staged)
        self.version = self._update_version
        return FakeReport(
            version=self.version,
            num_tensors=len(staged),
            num_bytes=sum(tensor.nbytes for tensor in staged.values()),
            changed_tensors=len(changed),
            changed_bytes=changed_bytes,
            canary_gap=0.0 if canaries else None,
            warning=None if changed else "nothing changed",
        )

    def abort_update(self) -> None:
        """Drop the open update."""
        self._staged = None

    def sleep(self, level: str = "kv") -> StepOutput:
        """Give memory back that a fake does not have."""
        self.asleep = level
        return self.collect()

    def wake(self) -> None:
        """Take it back."""
        self.asleep = None

    def tensors(self) -> dict[str, Any]:
        """Return the live tensors."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self._weights.items()}

    def whole_tensor(self, name: str) -> Any:
        """Return a live tensor."""
        return self.tensors()[name]

    def digests(self) -> dict[str, int]:
        """Return a digest of each tensor."""
        return {name: int(tensor.view(np.uint32).astype(np.uint64).sum()) for name, tensor in self._weights.items()}

    def expect_return(self, lineage: str, seconds: float, *, cache_salt: str | None = None, owner: str = "") -> bool:
        """Remember a hint."""
        self._hints[lineage, cache_salt] = owner
        return True

    def end_hints(self, owner: str = "") -> None:
        """Forget an owner's hints."""
        self._hints = {key: other for key, other in self._hints.items() if other != owner}

    def stats(self) -> dict[str, int | float]:
        """Return gauges; `broken_stats` makes them what the front cannot read ("unread") or the host cannot send ("unsent")."""
        if self._broken_stats is not None:
            return {"waiting": {"unread": [2], "unsent": {2}}[self._broken_stats]}  # type: ignore[dict-item]
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "steps": self._steps,
            "version": self.version,
            "hints": len(self._hints),
        }

    def check_integrity(self) -> None:
        """Assert that a fake holds nothing when idle."""
        assert self.has_work or not self._running, "rows without work"

    def close(self) -> None:
        """Drop everything."""
        self.abort_update()


def code_that_makes(path: Any) -> bytes:
    """Return bytes that would make a file if anything unpickled them; a pickle of protocol 0, written by hand."""
    return f"cposix\nsystem\n(S'touch {path}'\ntR.".encode()


class WireClient:
    """A client without any of the client's code: it sends and reads messages as they are on the wire."""

    def __init__(
        self, address: str, *, session: bytes | None = None, secret: bytes | None = None, hello: bool = True, key: ClientKey | None = None
    ) -> None:
        self._context = Context()
        self._peer = self._context.dealer(address, 2**26, key=key)
        self._poller = Poller([self._peer])
        self.welcome: Any = None
        if hello:
            fields = {"name": "wire", "session": session, "secret": secret}
            self.send(Op.HELLO, fields)
            packet = self.receive()
            assert packet is not None, "no answer to HELLO"
            self.welcome = packet.body

    def send(
        self, op: Op, fields: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None, request_id: bytes | None = None
    ) -> bytes:
        """Send a message; returns its request id."""
        request_id = request_id or new_token()
        self.send_frames(encode(op, request_id, fields, arrays))
        return request_id

    def send_frames(self, frames: Sequence[Any]) -> None:
        """Send any frames; waits a while for room."""
        deadline = time.monotonic() + 10.0
        while self._peer.send(list(frames)) is not Sent.OK:
            assert time.monotonic() < deadline, "no room to send"
            time.sleep(0.005)

    def generate(self, prompt: Sequence[int] = (1, 2, 3), request_id: bytes | None = None, **fields: object) -> bytes:
        """Send a generation; returns its request id."""
        return self.send(Op.GENERATE, fields, {"prompt_ids": np.array(prompt, np.int32)}, request_id)

    def generate_group(self, members: Sequence[bytes], request_id: bytes | None = None, **fields: object) -> bytes:
        """Send a group with these request ids; returns the message's id."""
        ids = np.frombuffer(b"".join(members), np.uint8).reshape(-1, 16)
        return self.send(Op.GENERATE_GROUP, fields, {"prompt_ids": np.array([1, 2, 3], np.int32), "member_ids": ids}, request_id)

    def receive(self, timeout_s: float = 5.0) -> Packet | None:
        """Return the next message, or None after the time-out."""
        if not self._poller.wait(timeout_s):
            return None
        incoming = self._peer.receive()
        return decode(incoming.frames, CLIENT_REPLIES) if incoming is not None else None

    def expect(self, op: Op, timeout_s: float = 5.0) -> Packet:
        """Return the next message of this operation, skipping others."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            packet = self.receive(left)
            if packet is not None and packet.op is op:
                return packet
        raise AssertionError(f"no {op.name} within {timeout_s} s")

    def acknowledge(self, packet: Packet, ended: Sequence[bytes] = ()) -> None:
        """Acknowledge a flush and endings."""
        ids = np.frombuffer(b"".join(ended), np.uint8).reshape(-1, 16)
        self.send(Op.ACK, {"seq": packet.body.seq}, {"request_ids": ids})  # type: ignore[attr-defined]

    def vanish(self) -> None:
        """Close without a word, as a lost connection does."""
        self._context.close()

    def close(self) -> None:
        """End the session and close."""
        if self.welcome is not None:
            self.send(Op.GOODBYE, {}, request_id=bytes(16))
        self._context.close()


class StreamReader:
    """Puts the flushes of a `WireClient` together again and checks offsets and endings on the way."""

    def __init__(self) -> None:
        self.ids: dict[bytes, list[int]] = {}
        self.endings: dict[bytes, Any] = {}
        self.texts: dict[bytes, str] = {}
        self.flushes = 0

    def take(self, packet: Packet) -> list[bytes]:
        """Take a flush; returns the ids of requests that ended with it."""
        arrays, at, ended = packet.arrays, 0, []
        self.flushes += 1
        endings = {ending.index: ending for ending in packet.body.finished}  # type: ignore[attr-defined]
        rows, content = [row.tobytes() for row in arrays["request_ids"]], arrays.get("texts", np.empty(0, np.uint8)).tobytes()
        for index, ending in endings.items():
            size = ending.text_bytes
            if size is not None:
                self.texts[rows[index]], content = content[:size].decode(), content[size:]
        for index, row in enumerate(arrays["request_ids"]):
            request_id, count = row.tobytes(), int(arrays["counts"][index])
            tokens = self.ids.setdefault(request_id, [])
            offset = int(arrays["offsets"][index])
            assert offset <= len(tokens), "a gap"
            assert request_id not in self.endings or not count, "tokens after the ending"
            fresh = arrays["token_ids"][at : at + count].tolist()[len(tokens) - offset :]
            tokens.extend(fresh)
            at += count
            if index in endings:
                assert request_id not in self.endings, "a second ending"
                self.endings[request_id] = endings[index]
                ended.append(request_id)
        return ended

    def read(self, client: WireClient, wanted: Sequence[bytes], timeout_s: float = 20.0) -> None:
        """Read and acknowledge until all of these ended."""
        deadline = time.monotonic() + timeout_s
        while not all(request_id in self.endings for request_id in wanted):
            packet = client.expect(Op.DELTAS, deadline - time.monotonic())
            client.acknowledge(packet, self.take(packet))


class ScriptedFront:
    """The service's end of the data socket, played by a test: it says what the test tells it to."""

    def __init__(self, folder: Any) -> None:
        self.address = f"ipc://{folder}/scripted"
        self._context = Context()
        self._router = self._context.router(self.address, 2**26)
        self._control = self._context.router(f"{self.address}.control", 2**26)
        self._poller = Poller([self._router])
        self.incarnation, self.session, self.secret = new_token(), new_token(), new_token()
        self.route = b""

    def expect(self, op: Op, timeout_s: float = 5.0) -> Packet:
        """Return the next message of this operation, skipping others."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if self._poller.wait(left):
                incoming = self._router.receive()
                assert incoming is not None
                self.route = incoming.route
                packet = decode(incoming.frames, DATA_REQUESTS)
                if packet.op is op:
                    return packet
        raise AssertionError(f"no {op.name} within {timeout_s} s")

    def refuse_on_control(self, code: str, timeout_s: float = 5.0) -> None:
        """Answer the next message on the control socket with an error."""
        assert Poller([self._control]).wait(timeout_s)
        incoming = self._control.receive()
        assert incoming is not None
        request_id = decode(incoming.frames, CONTROL_REQUESTS).request_id
        assert self._control.send(incoming.route, encode(Op.ERROR, request_id, {"code": code, "what": "as told"})) is Sent.OK

    def send(self, op: Op, request_id: bytes, fields: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send to the client that spoke last."""
        assert self._router.send(self.route, encode(op, request_id, fields, arrays)) is Sent.OK

    def send_frames(self, frames: Sequence[Any]) -> None:
        """Send any frames."""
        assert self._router.send(self.route, list(frames)) is Sent.OK

    def welcome(self, hello: Packet, lease_s: float = 30.0) -> None:
        """Answer a HELLO."""
        fields = {
            "incarnation": self.incarnation,
            "session": self.session,
            "secret": self.secret,
            "lease_s": lease_s,
            "control_address": self._control.address,
            "max_message_bytes": 2**26,
        }
        self.send(Op.WELCOME, hello.request_id, fields)

    def deltas(
        self,
        request_id: bytes,
        offset: int,
        ids: Sequence[int],
        *,
        seq: int,
        kind: str | None = None,
        ending: Mapping[str, object] | None = None,
        extra: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Send tokens of one stream; with its ending if a kind, or the whole of it, is given, and arrays of scored prompts."""
        tokens = np.array(ids, np.int32)
        if kind is not None:
            ending = {"index": 0, "kind": kind, "output_tokens": offset + len(ids), "prompt_tokens": 1}
        finished = [] if ending is None else [ending]
        more = {name: np.array(values, np.int64 if name == "prompt_scores" else np.float32) for name, values in (extra or {}).items()}
        arrays = {
            "request_ids": np.frombuffer(request_id, np.uint8).reshape(1, 16),
            "offsets": np.array([offset], np.int64),
            "counts": np.array([len(ids)], np.int32),
            "token_ids": tokens,
            "logprobs": fake_logprobs(tokens, 0),
            "raw_logprobs": fake_logprobs(tokens, 0),
            "version_values": np.array([0] if len(ids) else [], np.int64),
            "version_counts": np.array([len(ids)] if len(ids) else [], np.int64),
            **more,
        }
        self.send(Op.DELTAS, bytes(16), {"seq": seq, "finished": finished}, arrays)

    def close(self) -> None:
        """Close the sockets."""
        self._context.close()


def fake_service(folder: Any, *, timeout_s: float = 10.0, engine_options: Mapping[str, Any] | None = None, **options: Any) -> LocalService:
    """Return a service of real processes around a `FakeEngine`; `folder` serves as the model folder."""
    every = {"engine": "tests.fakes:FakeEngine", "engine_options": dict(engine_options or {}), **options}
    return LocalService(str(folder), start_timeout_s=30.0, timeout_s=timeout_s, options=every)
