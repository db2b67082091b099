"""The blocking facade: waits in the calling thread for what the I/O thread brings.

It never touches an event loop, so it works inside a running one (a notebook's) as well as in plain scripts and in
several threads at once. An interrupt (Ctrl-C) in a waiting call cancels that call's request and leaves the client
usable.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from rollout.client import operations
from rollout.client.client import AsyncClient, load_tokenizer
from rollout.client.connection import Connection, answer, wait_blocking
from rollout.client.endpoint import KeySource
from rollout.client.operations import Operation
from rollout.client.parameters import (
    EVALUATION_DEADLINE_S,
    EVALUATION_OPTIONS,
    GROUP_OPTIONS,
    OPTIONS,
    OTHER_NAMES,
    EvaluationOptions,
    GenerationOptions,
    GroupOptions,
    Ids,
    Prepared,
    prepare,
    prepare_evaluation,
    prepare_group,
    shows_options,
    tool_wait_fields,
)
from rollout.client.pending import Call, DeltaCursor, StreamRecord
from rollout.client.results import CanarySpec, CancelResult, Delta, Generation, Score, ServiceInfo, UpdateReport, UpdateTicket
from rollout.errors import ClientUnusable, InvalidConfig, InvalidRequest, RolloutError, ServerUnavailable, Unavailable
from rollout.option_names import OTHER_OPTIONS, checks_names
from rollout.wire.operations import Op

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

T = TypeVar("T")
STILL_HELD = "the service is alive; evaluations or running requests hold the commit, or its engine host does not answer"


class Stream:
    """The deltas of one generation; iterate it. `request_id` names the request; `close` cancels it if it is not over."""

    def __init__(self, connection: Connection, record: StreamRecord) -> None:
        self._connection, self._record = connection, record
        self._cursor = DeltaCursor(record)
        self._finalizer = weakref.finalize(self, connection.abandon, record)

    @property
    def request_id(self) -> bytes:
        """The request's id."""
        return self._record.request_id

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        if self._cursor.over:
            raise StopIteration
        delta = self._cursor.read()
        return self._news() if delta is None else delta

    def _news(self) -> Delta:
        self._connection.check_process()
        woken = threading.Event()
        listener = self._record.listen(woken.set, each=True)
        try:
            while (delta := self._cursor.read()) is None:
                woken.wait()
                woken.clear()
            return delta
        except BaseException:
            self._connection.abandon(self._record)
            raise
        finally:
            self._record.unlisten(listener)

    def close(self) -> None:
        """Cancel the request if it is not over; idempotent."""
        self._cursor.over = True
        self._connection.abandon(self._record)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CallHandle:
    """A call that was sent and is waited for later."""

    __slots__ = ("_call", "_operation")

    def __init__(self, call: Call, operation: Operation[Any]) -> None:
        self._call, self._operation = call, operation

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._call.done

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the answer or raise the call's error. Blocks: until it is there. Raises: also ServerUnavailable after `timeout_s`."""
        if not wait_blocking(self._call, timeout_s):
            raise ServerUnavailable(
                f"no answer to {self._operation.op.name} within {timeout_s:g} s",
                field="timeout_s",
                value=timeout_s,
                limit=STILL_HELD if self._operation.op is Op.WEIGHTS_COMMIT else "the service is alive and its engine host does not answer",
                remedy="abort the update; see the service's log, and pass a larger timeout_s if its machine is only slow",
            )
        return self._operation.read(answer(self._call))


class Client:
    """A client of a rollout service for plain code; `aio` is the async facade over the same connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.aio = AsyncClient(connection)

    def __repr__(self) -> str:
        return f"Client({self.address!r}, {self._connection.state})"

    @property
    def address(self) -> str:
        """The service's address."""
        return self._connection.address

    def _call(self, operation: Operation[Any]) -> Call:
        return self._connection.call(operation.op, operation.fields, operation.arrays or None, control=operation.control)

    def _run(self, operation: Operation[T]) -> T:
        call = self._call(operation)
        wait_blocking(call)
        return operation.read(answer(call))

    def _opened(self, operation: Operation[T], timeout_s: float | None = None) -> T:
        """Open something; what is opened after the wait has ended is closed again."""
        call = self._call(operation)
        try:
            return cast(T, CallHandle(call, operation).result(timeout_s))
        except BaseException:
            self._connection.forget(call)
            raise

    @checks_names(InvalidRequest, OTHER_NAMES)
    @shows_options(OPTIONS)
    def generate(self, prompt_ids: Ids, **options: Unpack[GenerationOptions]) -> Generation:
        """Sample from the model; options as in `GenerationOptions`. Blocks.

        Returns for stop, length, cancelled and expired. An interrupt cancels the request.
        Raises: InvalidRequest and its kind, Unavailable and its kind, RequestFailed.
        """
        return self._all_of(prepare(prompt_ids, options))[0]

    def _all_of(self, *messages: Prepared) -> list[Generation]:
        """Wait for every request of some messages; the first that gives no generation ends the others and raises."""
        records: list[StreamRecord] = []
        try:
            for prepared in messages:
                records += self._connection.submit(prepared)
        except BaseException as error:
            # A refused message was not sent, and its ids may be another's.
            unsent = isinstance(error, RolloutError)
            begun = [record.request_id for record in records]
            self._cancel(begun if unsent else [request_id for one in messages for request_id in one.members])
            raise
        generations = []
        try:
            for record in records:
                wait_blocking(record)
                generations.append(record.result())
        except BaseException:
            self._cancel(record.request_id for record in records if not record.done)
            raise
        return generations

    def _cancel(self, request_ids: Iterable[bytes]) -> None:
        for request_id in request_ids:
            self._connection.cancel(request_id)

    @checks_names(InvalidRequest, OTHER_NAMES)
    @shows_options(OPTIONS)
    def stream(self, prompt_ids: Ids, **options: Unpack[GenerationOptions]) -> Stream:
        """Sample from the model and return the stream of deltas; the last one carries the generation."""
        return Stream(self._connection, self._connection.submit(prepare(prompt_ids, options))[0])

    @checks_names(InvalidRequest, OTHER_NAMES)
    @shows_options(EVALUATION_OPTIONS)
    def evaluate(
        self, prompts: Sequence[Ids], *, deadline_s: float = EVALUATION_DEADLINE_S, **options: Unpack[EvaluationOptions]
    ) -> list[Generation]:
        """Sample from the model once for each prompt, all under one version; commits wait until this ends or its deadline. Blocks.

        Options as in `EvaluationOptions`, alike for all; with a `seed`, prompt i draws with `derive_seed(seed, i)`. Requests that
        `deadline_s` seconds do not suffice for come back as expired.
        Raises: as `generate`; VersionChanged if a commit got in after the deadline.
        """
        prepared = prepare_evaluation(prompts, deadline_s, options)
        evaluation = self._opened(operations.evaluate_begin(deadline_s))
        try:
            return evaluation.checked(self._all_of(*prepared), deadline_s)
        finally:
            with contextlib.suppress(Unavailable, ClientUnusable):
                self._run(operations.evaluate_end(evaluation))

    @checks_names(InvalidRequest, OTHER_NAMES)
    @shows_options(GROUP_OPTIONS)
    def generate_group(self, prompt_ids: Ids, n: int, **options: Unpack[GroupOptions]) -> list[Generation]:
        """Sample `n` continuations of one prompt, which is computed once; options as in `GroupOptions`. Blocks.

        Member i is what `generate` with the seed `derive_seed(seed, i)` gives. One that is refused or fails ends the others and
        raises; cancelled and expired members are returned. An interrupt cancels all.
        Raises: as `generate`; InvalidRequest for n < 1.
        """
        return self._all_of(prepare_group(prompt_ids, n, options))

    @checks_names(InvalidRequest, OTHER_NAMES)
    @shows_options(GROUP_OPTIONS)
    def stream_group(self, prompt_ids: Ids, n: int, **options: Unpack[GroupOptions]) -> list[Stream]:
        """Sample as `generate_group` does and return each member's stream; closing one cancels that member alone."""
        records = self._connection.submit(prepare_group(prompt_ids, n, options))
        return [Stream(self._connection, record) for record in records]

    @checks_names(InvalidRequest, OTHER_NAMES)
    def score(self, ids: Ids, *, temperature: float = 1.0) -> Score:
        """Return the log-probabilities of given ids. Blocks."""
        return self._run(operations.score(ids, temperature))

    @checks_names(InvalidRequest, OTHER_NAMES)
    def cancel(self, request_id: bytes) -> CancelResult:
        """End a generation of this client; idempotent. Blocks."""
        return self._run(operations.cancel(request_id, self._connection.to_cancel))

    @checks_names(InvalidRequest, OTHER_NAMES)
    def tool_wait(self, lineage: str, expect_s: float, *, cache_salt: str | None = None) -> None:
        """Say that the next request of `lineage` is expected in about `expect_s` seconds, because its tool runs: its KV goes last.

        A hint without an answer. It ends with that request, with this client, or once overdue by more than its own length.
        Raises: InvalidRequest.
        """
        self._connection.say(Op.TOOL_WAIT, tool_wait_fields(lineage, expect_s, cache_salt))

    def info(self) -> ServiceInfo:
        """Return what the service is. Blocks."""
        return self._run(operations.info())

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges; the engine's under "engine". Blocks."""
        return self._run(operations.stats())

    def pause(self) -> None:
        """Let the engine stand still until `resume`, or until this client's lease ends; idempotent. Blocks."""
        self._run(operations.pause())

    def resume(self) -> None:
        """Drop this client's pause; idempotent. Blocks. Raises: PauseHeld, naming the holder, if only others paused."""
        self._run(operations.resume())

    @checks_names(InvalidRequest, OTHER_NAMES)
    def sleep(self, level: str = "kv") -> None:
        """Let the engine give the memory of its KV ("kv"), or of KV and weights ("weights"), back until `wake` or this client's end.

        Requests wait meanwhile and go on afterwards, in a new epoch; scores and updates are refused. Idempotent. Blocks.
        Raises: UpdateBusy while an update is open, InvalidRequest.
        """
        self._run(operations.sleep(level))

    def wake(self) -> None:
        """Let the engine take its memory back, unless another client lets it sleep; idempotent. Blocks.

        Raises: Asleep while the memory is still taken: free it, then wake again.
        """
        self._run(operations.wake())

    def shutdown(self) -> None:
        """End the service. Blocks."""
        self._run(operations.shutdown())

    @checks_names(InvalidRequest, OTHER_NAMES)
    def weights_begin(
        self,
        manifest: Mapping[str, Mapping[str, Any]] | None,
        *,
        trainer_step: int | None = None,
        restore: int | None = None,
        partial: bool = False,
        timeout_s: float | None = None,
    ) -> UpdateTicket:
        """Open a weight update. `manifest`: name -> {"dtype", "shape"}. Blocks: at most `timeout_s`, if that is given.

        An update that is opened after the wait has ended is aborted. Raises: UpdateBusy, ManifestMismatch, ServerUnavailable after
        `timeout_s`.
        """
        operation = operations.weights_begin(manifest, trainer_step=trainer_step, restore=restore, partial=partial)
        return self._opened(operation, timeout_s)

    @checks_names(InvalidRequest, OTHER_NAMES)
    def weights_stage_file(self, update_id: str, path: str, *, size: int, xxh3: str | None = None, timeout_s: float | None = None) -> None:
        """Stage a safetensors file below `info().weights_dir`. Blocks: at most `timeout_s`, if that is given.

        Raises: WeightsFileRefused, ManifestMismatch, NoUpdate, ServerUnavailable after `timeout_s`.
        """
        operation = operations.weights_stage_file(update_id, path, size=size, xxh3=xxh3)
        CallHandle(self._call(operation), operation).result(timeout_s)

    @checks_names(InvalidRequest, OTHER_NAMES)
    def weights_stage_bucket(
        self,
        update_id: str,
        bucket: int,
        *,
        size: int,
        pieces: Mapping[str, Any],
        handle: Mapping[str, Any],
        xxh3: str | None = None,
        content: np.ndarray | None = None,
    ) -> CallHandle:
        """Send a bucket of weights and return what to wait for; the trainer's next bucket may be made meanwhile.

        `pieces` say in columns which elements lie where, `handle` where the bytes are; see `rollout/README.md`. A bucket may be sent again
        under its number. `result` raises: BucketRefused, TransportUnavailable, ManifestMismatch, NoUpdate.
        """
        operation = operations.weights_stage_bucket(update_id, bucket, size=size, pieces=pieces, handle=handle, xxh3=xxh3, content=content)
        return CallHandle(self._call(operation), operation)

    @checks_names(InvalidRequest, OTHER_NAMES)
    def weights_join_group(
        self,
        update_id: str,
        *,
        host: str,
        port: int,
        backend: str,
        timeout_s: float,
        device: bytes | None = None,
        group: bytes | None = None,
    ) -> CallHandle:
        """Let the engine host join a process group of two as rank 1; its store is at `host`:`port`. Returns what to wait for.

        With a name of 16 bytes the `group` is kept for later updates, until one fails, comes another way or by another group.
        """
        operation = operations.weights_join_group(
            update_id, host=host, port=port, backend=backend, timeout_s=timeout_s, device=device, group=group
        )
        return CallHandle(self._call(operation), operation)

    @checks_names(InvalidRequest, OTHER_NAMES)
    def weights_commit(
        self,
        update_id: str,
        *,
        digests: Mapping[str, int] | None = None,
        canaries: Sequence[CanarySpec] = (),
        mode: str = "inflight",
        drain_s: float = 60.0,
        timeout_s: float | None = None,
    ) -> UpdateReport:
        """Prove and publish an update. Blocks: for evaluations under way and `drain_s`; in all at most `timeout_s`, if that is given.

        After `timeout_s` the commit goes on, and `info().version` tells how it ended.
        Raises: DigestMismatch, CanaryMismatch, ManifestMismatch, NoUpdate, DrainTimeout, ServerUnavailable after `timeout_s`.
        `mode`: running requests go on ("inflight"), are waited for while new ones queue ("drain", for `drain_s` seconds, then
        DrainTimeout, and the update stays open), or are cut and go on by themselves as new requests ("abort_requests").
        """
        operation = operations.weights_commit(update_id, digests=digests, canaries=canaries, mode=mode, drain_s=drain_s)
        return cast(UpdateReport, CallHandle(self._call(operation), operation).result(timeout_s))

    @checks_names(InvalidRequest, OTHER_NAMES)
    def weights_abort(self, update_id: str, *, timeout_s: float | None = None) -> None:
        """Drop an update; idempotent. Blocks: at most `timeout_s`, if that is given. Raises: ServerUnavailable after it."""
        operation = operations.weights_abort(update_id)
        CallHandle(self._call(operation), operation).result(timeout_s)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the model folder's tokenizer files by name. Blocks."""
        return self._run(operations.tokenizer_files())

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Return the model's tokenizer. Blocks."""
        return load_tokenizer(self.tokenizer_files())

    def episode(self, **options: Any) -> Any:
        """Start an episode over the async facade; see `rollout.agent.Episode`. Blocks: only here, its turns are awaited."""
        agent = importlib.import_module("rollout.agent")
        if options.get("format") is None and options.get("prompt_ids") is None:
            options["format"] = agent.ChatFormat(self.tokenizer_files())
        return agent.Episode(self.aio, info=options.pop("info", None) or self.info(), **options)

    def close(self) -> None:
        """End the session; its requests are cancelled. Blocks: a moment."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@checks_names(InvalidConfig, OTHER_OPTIONS)
def connect(
    address: str | None = None, *, timeout_s: float = 10.0, name: str | None = None, key: KeySource = None, insecure: bool = False
) -> Client:
    """Connect to a service; without an address, to the one that the state folder announces. Blocks.

    `key` is the key file (or `ClientKey`) by which an encrypted service on another machine is reached; for one that the state
    folder announces it is found there. `insecure` lets a network address be used in clear.
    Raises: NoService, ServerUnavailable (at once without a socket at the address, else within `timeout_s`), AccessDenied,
    ProtocolMismatch, InvalidConfig, InsecureAddress.
    """
    connection = Connection(address, timeout_s=timeout_s, name=name, key=key, insecure=insecure)
    try:
        wait_blocking(connection.connected)
        if connection.connected.error is not None:
            raise connection.connected.error
    except BaseException:
        connection.close()
        raise
    return Client(connection)
