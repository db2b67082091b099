"""The async facade: awaits what the I/O thread brings. Works in any running event loop, also in several.

A cancelled await cancels its request; leaving a stream early does too. The blocking facade in `blocking.py` has the
same names and arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from rollout.client import operations
from rollout.client.connection import Connection, answer, wait_async
from rollout.client.endpoint import KeySource
from rollout.client.news import News
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
from rollout.errors import ClientUnusable, InvalidConfig, InvalidRequest, RolloutError, Unavailable
from rollout.option_names import OTHER_OPTIONS, checks_names
from rollout.wire.operations import Op

if TYPE_CHECKING:
    import tokenizers

T = TypeVar("T")


def load_tokenizer(files: Mapping[str, bytes]) -> tokenizers.Tokenizer:
    """Return the tokenizer of these files. Raises: RolloutError if the model folder has none."""
    content = files.get("tokenizer.json")
    if content is None:
        raise RolloutError(
            "the model folder has no tokenizer.json", field="tokenizer", remedy="save the tokenizer with the model, in the fast format"
        )
    return importlib.import_module("tokenizers").Tokenizer.from_buffer(content)


class AsyncStream:
    """The deltas of one generation; iterate it. `request_id` names the request; `aclose` cancels it if it is not over."""

    def __init__(self, connection: Connection, record: StreamRecord) -> None:
        self._connection, self._record = connection, record
        self._cursor = DeltaCursor(record)
        self._news: News | None = None
        self._finalizer = weakref.finalize(self, connection.abandon, record)

    @property
    def request_id(self) -> bytes:
        """The request's id."""
        return self._record.request_id

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        cursor, news = self._cursor, self._news
        if cursor.over:
            raise StopAsyncIteration
        # Cheaper than to ask for the running loop, which asks the system for this process's number.
        if news is None or news.thread != get_ident() or news.loop.is_closed():
            if (delta := cursor.read()) is not None:
                return delta
            news = self._listen()
            # News that came before the listener are seen by the second look.
            if (delta := cursor.read()) is not None:
                return delta
        elif news.missed or self._record.done:
            # What fails gives its last tokens first: nobody wakes this reader for the failure itself.
            news.missed = False
            if (delta := cursor.read()) is not None:
                return delta
        try:
            while (delta := await news) is None and (delta := cursor.read()) is None:
                pass
        except asyncio.CancelledError:
            self._connection.abandon(self._record)
            raise
        return delta

    def _listen(self) -> News:
        """Return what wakes this event loop from now on. Raises: ForkedClient."""
        self._connection.check_process()
        if self._news is not None:
            self._news.leave(self._record)
        news = self._news = News(asyncio.get_running_loop(), self._cursor)
        news.join(self._record)
        return news

    async def aclose(self) -> None:
        """Cancel the request if it is not over; idempotent."""
        self._cursor.over = True
        self._connection.abandon(self._record)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncClient:
    """A client of a rollout service for event loops."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __repr__(self) -> str:
        return f"AsyncClient({self.address!r}, {self._connection.state})"

    @property
    def address(self) -> str:
        """The service's address."""
        return self._connection.address

    def _call(self, operation: Operation[Any]) -> Call:
        return self._connection.call(operation.op, operation.fields, operation.arrays or None, control=operation.control)

    async def _run(self, operation: Operation[T]) -> T:
        call = self._call(operation)
        await wait_async(call)
        return operation.read(answer(call))

    async def _opened(self, operation: Operation[T]) -> T:
        """Open something; what is opened after the await was cancelled is closed again."""
        call = self._call(operation)
        try:
            await wait_async(call)
            return operation.read(answer(call))
        except BaseException:
            self._connection.forget(call)
            raise

    @checks_names(InvalidRequest, OTHER_NAMES)
    @shows_options(OPTIONS)
    async def generate(self, prompt_ids: Ids, **options: Unpack[GenerationOptions]) -> Generation:
        """Sample from the model; options as in `GenerationOptions`.

        Returns for stop, length, cancelled and expired. A cancelled await cancels the request.
        Raises: InvalidRequest and its kind, Unavailable and its kind, RequestFailed.
        """
        return (await self._all_of(prepare(prompt_ids, options)))[0]

    async def _all_of(self, *messages: Prepared) -> list[Generation]:
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
                await wait_async(record)
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
    def stream(self, prompt_ids: Ids, **options: Unpack[GenerationOptions]) -> AsyncStream:
        """Sample from the model and return the stream of deltas; the last one carries the generation."""
        return AsyncStream(self._connection, self._connection.submit(prepare(prompt_ids, options))[0])

    @checks_names(InvalidRequest, OTHER_NAMES)
    @shows_options(EVALUATION_OPTIONS)
    async def evaluate(
        self, prompts: Sequence[Ids], *, deadline_s: float = EVALUATION_DEADLINE_S, **options: Unpack[EvaluationOptions]
    ) -> list[Generation]:
        """Sample from the model once for each prompt, all under one version; commits wait until this ends or its deadline.

        Options as in `EvaluationOptions`, alike for all; with a `seed`, prompt i draws with `derive_seed(seed, i)`. Requests that
        `deadline_s` seconds do not suffice for come back as expired.
        Raises: as `generate`; VersionChanged if a commit got in after the deadline.
        """
        prepared = prepare_evaluation(prompts, deadline_s, options)
        evaluation = await self._opened(operations.evaluate_begin(deadline_s))
        try:
            return evaluation.checked(await self._all_of(*prepared), deadline_s)
        finally:
            with contextlib.suppress(Unavailable, ClientUnusable):
                await self._run(operations.evaluate_end(evaluation))

    @checks_names(InvalidRequest, OTHER_NAMES)
    @shows_options(GROUP_OPTIONS)
    async def generate_group(self, prompt_ids: Ids, n: int, **options: Unpack[GroupOptions]) -> list[Generation]:
        """Sample `n` continuations of one prompt, which is computed once; options as in `GroupOptions`.

        Member i is what `generate` with the seed `derive_seed(seed, i)` gives. One that is refused or fails ends the others and
        raises; cancelled and expired members are returned. A cancelled await cancels all.
        Raises: as `generate`; InvalidRequest for n < 1.
        """
        return await self._all_of(prepare_group(prompt_ids, n, options))

    @checks_names(InvalidRequest, OTHER_NAMES)
    @shows_options(GROUP_OPTIONS)
    def stream_group(self, prompt_ids: Ids, n: int, **options: Unpack[GroupOptions]) -> list[AsyncStream]:
        """Sample as `generate_group` does and return each member's stream; closing one cancels that member alone."""
        records = self._connection.submit(prepare_group(prompt_ids, n, options))
        return [AsyncStream(self._connection, record) for record in records]

    @checks_names(InvalidRequest, OTHER_NAMES)
    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Score:
        """Return the log-probabilities of given ids."""
        return await self._run(operations.score(ids, temperature))

    @checks_names(InvalidRequest, OTHER_NAMES)
    async def cancel(self, request_id: bytes) -> CancelResult:
        """End a generation of this client; idempotent."""
        return await self._run(operations.cancel(request_id, self._connection.to_cancel))

    @checks_names(InvalidRequest, OTHER_NAMES)
    def tool_wait(self, lineage: str, expect_s: float, *, cache_salt: str | None = None) -> None:
        """Say that the next request of `lineage` is expected in about `expect_s` seconds, because its tool runs: its KV goes last.

        A hint without an answer. It ends with that request, with this client, or once overdue by more than its own length.
        Raises: InvalidRequest.
        """
        self._connection.say(Op.TOOL_WAIT, tool_wait_fields(lineage, expect_s, cache_salt))

    async def info(self) -> ServiceInfo:
        """Return what the service is."""
        return await self._run(operations.info())

    async def stats(self) -> dict[str, Any]:
        """Return counters and gauges; the engine's under "engine"."""
        return await self._run(operations.stats())

    async def pause(self) -> None:
        """Let the engine stand still until `resume`, or until this client's lease ends; idempotent."""
        await self._run(operations.pause())

    async def resume(self) -> None:
        """Drop this client's pause; idempotent. Raises: PauseHeld, naming the holder, if only others paused."""
        await self._run(operations.resume())

    @checks_names(InvalidRequest, OTHER_NAMES)
    async def sleep(self, level: str = "kv") -> None:
        """Let the engine give the memory of its KV ("kv"), or of KV and weights ("weights"), back until `wake` or this client's end.

        Requests wait meanwhile and go on afterwards, in a new epoch; scores and updates are refused. Idempotent.
        Raises: UpdateBusy while an update is open, InvalidRequest.
        """
        await self._run(operations.sleep(level))

    async def wake(self) -> None:
        """Let the engine take its memory back, unless another client lets it sleep; idempotent.

        Raises: Asleep while the memory is still taken: free it, then wake again.
        """
        await self._run(operations.wake())

    async def shutdown(self) -> None:
        """End the service."""
        await self._run(operations.shutdown())

    @checks_names(InvalidRequest, OTHER_NAMES)
    async def weights_begin(
        self,
        manifest: Mapping[str, Mapping[str, Any]] | None,
        *,
        trainer_step: int | None = None,
        restore: int | None = None,
        partial: bool = False,
    ) -> UpdateTicket:
        """Open a weight update. `manifest`: name -> {"dtype", "shape"}. Raises: UpdateBusy, ManifestMismatch.

        An update that is opened after the await was cancelled is aborted.
        """
        return await self._opened(operations.weights_begin(manifest, trainer_step=trainer_step, restore=restore, partial=partial))

    @checks_names(InvalidRequest, OTHER_NAMES)
    async def weights_stage_file(self, update_id: str, path: str, *, size: int, xxh3: str | None = None) -> None:
        """Stage a safetensors file below `info().weights_dir`. Raises: WeightsFileRefused, ManifestMismatch, NoUpdate."""
        await self._run(operations.weights_stage_file(update_id, path, size=size, xxh3=xxh3))

    @checks_names(InvalidRequest, OTHER_NAMES)
    async def weights_commit(
        self,
        update_id: str,
        *,
        digests: Mapping[str, int] | None = None,
        canaries: Sequence[CanarySpec] = (),
        mode: str = "inflight",
        drain_s: float = 60.0,
    ) -> UpdateReport:
        """Prove and publish an update. Raises: DigestMismatch, CanaryMismatch, ManifestMismatch, NoUpdate.

        `mode`: running requests go on ("inflight"), are waited for while new ones queue ("drain", for `drain_s` seconds, then
        DrainTimeout, and the update stays open), or are cut and go on by themselves as new requests ("abort_requests").
        """
        return await self._run(operations.weights_commit(update_id, digests=digests, canaries=canaries, mode=mode, drain_s=drain_s))

    @checks_names(InvalidRequest, OTHER_NAMES)
    async def weights_abort(self, update_id: str) -> None:
        """Drop an update; idempotent."""
        await self._run(operations.weights_abort(update_id))

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Return the model folder's tokenizer files by name."""
        return await self._run(operations.tokenizer_files())

    async def tokenizer(self) -> tokenizers.Tokenizer:
        """Return the model's tokenizer."""
        return load_tokenizer(await self.tokenizer_files())

    async def episode(self, **options: Any) -> Any:
        """Start an episode; see `rollout.agent.Episode.open`."""
        return await importlib.import_module("rollout.agent").Episode.open(self, **options)

    async def close(self) -> None:
        """End the session; its requests are cancelled. Blocks: a moment."""
        await asyncio.to_thread(self._connection.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


@checks_names(InvalidConfig, OTHER_OPTIONS)
async def connect_async(
    address: str | None = None, *, timeout_s: float = 10.0, name: str | None = None, key: KeySource = None, insecure: bool = False
) -> AsyncClient:
    """Connect to a service; without an address, to the one that the state folder announces.

    `key` is the key file (or `ClientKey`) by which an encrypted service on another machine is reached; for one that the state
    folder announces it is found there. `insecure` lets a network address be used in clear.
    Raises: NoService, ServerUnavailable (at once without a socket at the address, else within `timeout_s`), AccessDenied,
    ProtocolMismatch, InvalidConfig, InsecureAddress.
    """
    connection = Connection(address, timeout_s=timeout_s, name=name, key=key, insecure=insecure)
    try:
        await wait_async(connection.connected)
    except BaseException:
        connection.close()
        raise
    if connection.connected.error is not None:
        connection.close()
        raise connection.connected.error
    return AsyncClient(connection)
