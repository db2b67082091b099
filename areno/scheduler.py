"""Plans on the host: who is admitted, what is prefilled, which rows decode; appends commands, never touches tensors.

One `plan` per engine step. It lowers the bucket by moves when that has paid for some steps, admits from the front of
the queue (row, pages and slot are reserved whole, so an admitted request always finishes) and cuts prompts into chunks
while the prefill budget lasts, and launches a decode of rows 0..bucket. `consume` reads a launch's results through the
lanes' seats as they were planned.

A row is closed once the last launch made before its KILL, or the one that ended it, has been read; only then is its
end reported and its pages keyed or freed. Every accepted request ends in exactly one `Finished`. No torch.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from areno.commands import ApplyDelta, Command, DecodeLaunch, PrefillChunk, PrefillLaunch
from areno.config import RESERVED_PAGES, EngineConfig, ResolvedConfig
from areno.decode.deltas import DeltaPacker
from areno.decode.launch import LaneStatus, LaunchResult
from areno.errors import DuplicateRequest
from areno.kv.pool import PagePool, RowPool
from areno.kv.prefix import PrefixIndex, Spans, expand_spans, run_lengths
from areno.kv.slots import SlotPool
from areno.request import (
    MAX_STOP_IDS,
    Finished,
    FinishKind,
    FinishReason,
    Request,
    RequestLimits,
    StepOutput,
    check_request,
    resolve_stop_ids,
)
from areno.sampling.variant import Variant
from areno.seats import NO_SEAT, Seats

_NO_SLOT = -1


class Phase(enum.Enum):
    """Where a live request stands; it leaves the table with its `Finished`."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    CLOSING = "closing"


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Everything the scheduler knows of one request that is not in the seat arrays."""

    request: Request
    seed: int
    stop_ids: np.ndarray
    phase: Phase = Phase.WAITING
    seat: int = NO_SEAT
    row: int = -1
    generation: int = 0
    sampling_slot: int = _NO_SLOT
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int = 0
    prompt_spans: Spans = ()
    close_after: int = 0
    reason: FinishReason | None = None

    @property
    def prompt(self) -> np.ndarray:
        """The prompt's ids."""
        return np.asarray(self.request.prompt_ids)

    @property
    def limit(self) -> int:
        """Prompt plus budget."""
        return self.prompt.size + self.request.sampling.max_new_tokens

    @property
    def variant(self) -> tuple[bool, bool, bool, bool]:
        """Which sampler parts this request needs: noise, temperature, stop mask, slot."""
        sampling = self.request.sampling
        greedy = sampling.temperature == 0.0
        return (
            not greedy,
            not greedy and sampling.temperature != 1.0,
            sampling.min_new_tokens > 0 and self.stop_ids.size > 0,
            sampling.forced_ids is not None,
        )


def _signed64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class Scheduler:
    """The host's plan for one engine. Owns requests, rows, pages, slots, seats and the prefix index."""

    def __init__(self, config: EngineConfig, resolved: ResolvedConfig, limits: RequestLimits) -> None:
        self._config, self._resolved, self._limits = config, resolved, limits
        self._version = config.initial_version
        self._pool = PagePool(resolved.num_pages, RESERVED_PAGES + resolved.canary_pages)
        self._prefix = PrefixIndex(self._pool, resolved.page_size, epoch=self._version, enabled=config.prefix_cache)
        self._rows = RowPool(resolved.max_rows)
        self._slots = SlotPool(config.sampling_slots)
        # A cancelled row is reused at once while its results are still in flight, hence more seats than rows.
        self._seats = Seats(num_seats=2 * resolved.max_rows, max_tokens=resolved.max_model_len)
        self._packer = DeltaPacker()
        self._live: dict[int, LiveRequest] = {}
        self._by_seat: dict[int, LiveRequest] = {}
        self._waiting: deque[LiveRequest] = deque()
        self._prefilling: deque[LiveRequest] = deque()
        self._closing: list[LiveRequest] = []
        self._endings: list[Finished] = []
        self._row_seat = np.full(resolved.table_rows, NO_SEAT, dtype=np.int64)
        self._needs = np.zeros(4, dtype=np.int64)
        self._seeds = np.random.SeedSequence(resolved.seed)
        self._random = np.random.Generator(np.random.PCG64(self._seeds))
        self._launches = 0
        self._launches_read = 0
        self._sparse_steps = 0
        self._stuck: tuple[LiveRequest, tuple[int, ...]] | None = None
        self.counters: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether a request is live or an ending waits to be delivered."""
        return bool(self._live or self._endings)

    @property
    def num_waiting(self) -> int:
        """Number of requests not admitted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of admitted requests."""
        return len(self._live) - len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises: InvalidRequest, RequestTooLong, DuplicateRequest; nothing has changed then."""
        if request.request_id in self._live:
            raise DuplicateRequest(
                f"request_id={request.request_id} is live already",
                field="request_id",
                value=request.request_id,
                limit="ids are unique among live requests",
                remedy="use a new request_id",
            )
        check_request(request, self._limits)
        seed = request.sampling.seed
        drawn = int(self._random.integers(0, 2**64, dtype=np.uint64)) if seed is None else seed
        live = LiveRequest(request=request, seed=drawn, stop_ids=resolve_stop_ids(request.sampling, self._limits))
        self._live[request.request_id] = live
        self._waiting.append(live)
        self.counters["accepted"] += 1

    def cancel(self, request_id: int, *, kind: FinishKind, detail: str | None) -> bool:
        """End a request early; return whether this call makes its terminal record come.

        A request whose row met its own end before the KILL keeps that end.
        """
        live = self._live.get(request_id)
        if live is None or live.phase is Phase.CLOSING:
            return False
        live.reason = FinishReason(kind=kind, detail=detail)
        if live.phase is Phase.WAITING:
            self._waiting.remove(live)
            self._finish(live, live.reason)
        elif live.phase is Phase.PREFILLING:
            self._prefilling.remove(live)
            self._rows.release(live.row)
            self._finish(live, live.reason)
        else:
            self._packer.kill(live.row, live.generation)
            self._leave_row(live)
            live.phase = Phase.CLOSING
            live.close_after = self._launches
            if self._launches_read >= live.close_after:
                self._finish(live, live.reason)
            else:
                self._closing.append(live)
        return True

    def plan(self) -> list[Command]:
        """Decide the next step; return its commands in order."""
        self._compact()
        prefill = self._plan_prefill()
        decode = self._plan_decode()
        commands: list[Command] = [ApplyDelta(slot=slot) for slot in self._packer.take()]
        commands.extend(launch for launch in (prefill, decode) if launch is not None)
        return commands

    def consume(self, result: LaunchResult) -> StepOutput:
        """Read one launch: note its tokens, close what ended. The returned output has no endings; `take_endings` has."""
        self._launches_read = result.launch.number
        seats_of_lanes = result.launch.seats
        mine = (seats_of_lanes >= 0) & (result.generation == result.launch.generations)
        starved = mine & (result.status == LaneStatus.STARVED)
        if starved.any():
            self._seats.scheduled[seats_of_lanes[starved]] -= 1
            self.counters["starved"] += int(starved.sum())
        lanes = np.flatnonzero(mine & (result.status >= LaneStatus.TOKEN) & (result.status <= LaneStatus.EXHAUSTED))
        seats = seats_of_lanes[lanes]
        tokens = result.token[lanes]
        self._seats.ids[seats, self._seats.count[seats]] = tokens
        self._seats.versions[seats, self._seats.count[seats]] = result.launch.version
        self._seats.count[seats] += 1
        silent = ~self._seats.wants_logprobs[seats]
        columns = [array[lanes] for array in (result.logprob, result.raw_logprob, result.behaviour_logprob)]
        if silent.any():
            for column in columns:
                column[silent] = np.nan
        output = StepOutput(
            request_ids=self._seats.request_id[seats],
            token_ids=tokens,
            logprobs=columns[0],
            raw_logprobs=columns[1],
            behaviour_logprobs=columns[2],
            versions=np.full(seats.size, result.launch.version, dtype=np.int64),
        )
        self.counters["sampled_tokens"] += seats.size
        self._close_ended(seats, tokens, result.status[lanes])
        if self._closing:
            due = [live for live in self._closing if live.phase is Phase.CLOSING and live.close_after <= result.launch.number]
            for live in due:
                self._closing.remove(live)
                assert live.reason is not None
                self._finish(live, live.reason)
        return output

    def take_endings(self) -> tuple[Finished, ...]:
        """Return the terminal records not delivered yet."""
        endings, self._endings = tuple(self._endings), []
        return endings

    def commit_version(self, version: int) -> None:
        """Start a new weight epoch: prompts in prefill start again, shared prefixes are gone, running rows go on."""
        self._version = version
        self._prefix.start_epoch(version)
        self._stuck = None
        while self._prefilling:
            live = self._prefilling.pop()
            self._rows.release(live.row)
            self._release(live)
            live.phase, live.computed, live.cached_tokens, live.prompt_spans = Phase.WAITING, 0, 0, ()
            self._waiting.appendleft(live)
            self.counters["prefills_restarted"] += 1

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._prefix.clear()

    def gauges(self) -> dict[str, int]:
        """Return the current sizes: requests, pages, rows, slots."""
        held = self._prefix.held_pages
        cached = sum(1 for page, count in held.items() if self._pool.references(page) == count)
        return {
            "waiting": len(self._waiting),
            "running": self.num_running,
            "rows_used": self._rows.num_used,
            "free_pages": self._pool.num_free,
            "cached_pages": cached,
            "used_pages": self._pool.num_pages - self._pool.num_free - cached,
            "free_sampling_slots": self._slots.num_free,
            "launches": self._launches,
            "launches_unread": self._launches - self._launches_read,
        }

    def rows_expected(self) -> dict[int, LiveRequest]:
        """Return the rows that the decode tables must hold, by row; used by integrity checks."""
        return {live.row: live for live in self._live.values() if live.phase is Phase.RUNNING}

    def known_tokens(self, live: LiveRequest) -> int:
        """Return how many ids of a request the host has read, prompt included."""
        return int(self._seats.count[live.seat])

    def check_integrity(self) -> None:
        """Check that nothing is lost or held twice: pages, rows, seats, slots, requests. Raises: AssertionError."""
        expected: Counter[int] = Counter(self._prefix.held_pages)
        for live in self._live.values():
            expected.update(live.pages)
        self._pool.check_integrity(dict(expected))
        self._prefix.check_integrity()
        self._rows.check_integrity()
        self._slots.check_integrity({live.sampling_slot for live in self._live.values() if live.sampling_slot != _NO_SLOT})
        seated = {live.seat: live for live in self._live.values() if live.seat != NO_SEAT}
        assert seated == self._by_seat, "seats and live requests differ"
        assert len(seated) + self._seats.num_free == self._seats.row.size, "seats are lost"
        with_row = {live.row for live in self._live.values() if live.row >= 0}
        assert len(with_row) == self._rows.num_used, f"rows of requests {sorted(with_row)}, rows in use {self._rows.num_used}"
        running = {int(row): int(seat) for row, seat in enumerate(self._row_seat) if seat != NO_SEAT}
        assert running == {live.row: live.seat for live in self.rows_expected().values()}, "the row map differs from the running requests"
        ended = sum(self.counters[kind.value] for kind in FinishKind)
        assert self.counters["accepted"] == len(self._live) + ended, "accepted != live + ended"
        needs = np.zeros(4, dtype=np.int64)
        for live in self.rows_expected().values():
            needs += np.array(live.variant, dtype=np.int64)
        assert (needs == self._needs).all(), "sampler needs are miscounted"

    def _admit_next(self) -> bool:
        """Admit the front of the queue if everything it needs is there; nobody overtakes it."""
        if not self._waiting:
            return False
        live = self._waiting[0]
        free = (self._pool.num_free, self._rows.num_free, self._seats.num_free, self._slots.num_free)
        if self._stuck is not None and self._stuck[0] is live and self._stuck[1] == free:
            return False
        if not self._try_admit(live):
            self._stuck = live, free
            return False
        self._prefilling.append(self._waiting.popleft())
        return True

    def _try_admit(self, live: LiveRequest) -> bool:
        request = live.request
        needs_slot = request.sampling.forced_ids is not None
        if not self._rows.num_free or not self._seats.num_free or (needs_slot and not self._slots.num_free):
            return False
        prompt = live.prompt
        oldest = self._version - request.max_kv_lag
        match = self._prefix.match(prompt, salt=request.cache_salt, lineage=request.lineage, oldest_version=oldest)
        missing = max(-(-(live.limit - 1) // self._resolved.page_size), 1) - len(match.pages)
        if missing > self._pool.num_free:
            self._prefix.evict(missing - self._pool.num_free)
        if missing > self._pool.num_free:
            for page in match.pages:
                self._pool.release(page)
            return False
        live.pages = match.pages + self._pool.allocate(missing)
        live.computed = live.cached_tokens = len(match.pages) * self._resolved.page_size
        live.prompt_spans = match.spans
        live.row, live.generation = self._rows.allocate()
        if needs_slot:
            live.sampling_slot = self._slots.allocate()
        live.seat = self._seats.allocate(
            request_id=request.request_id, prompt=prompt.astype(np.int32), limit=live.limit, wants_logprobs=bool(request.sampling.logprobs)
        )
        self._by_seat[live.seat] = live
        live.phase = Phase.PREFILLING
        self.counters["cached_tokens"] += live.cached_tokens
        self.counters["prompt_tokens"] += prompt.size
        return True

    def _plan_prefill(self) -> PrefillLaunch | None:
        budget = self._config.max_prefill_tokens
        chunks: list[PrefillChunk] = []
        complete: list[LiveRequest] = []
        # Admission goes prompt by prompt, so that each one finds the pages that those before it are filling.
        while budget > 0 and (self._prefilling or self._admit_next()):
            live = self._prefilling[0]
            take = min(budget, live.prompt.size - live.computed)
            budget -= take
            if live.computed + take == live.prompt.size:
                self._prefilling.popleft()
                complete.append(live)
            chunks.append(self._chunk(live, take))
            self.counters["prefill_tokens"] += take
        if not chunks:
            return None
        needs = np.zeros(4, dtype=bool)
        for live in complete:
            self._enter_row(live)
            needs |= np.array(live.variant)
        if complete:
            self._launches += 1
        seats = np.array([live.seat for live in complete], dtype=np.int64)
        return PrefillLaunch(
            chunks=tuple(chunks),
            seats=seats,
            generations=self._seats.generation[seats].copy(),
            variant=Variant(noise=bool(needs[0]), temperature=bool(needs[1]), stop_mask=bool(needs[2]), slots=bool(needs[3])),
        )

    def _chunk(self, live: LiveRequest, take: int) -> PrefillChunk:
        start, end = live.computed, live.computed + take
        page_size = self._resolved.page_size
        if not live.prompt_spans or live.prompt_spans[-1][1] != self._version:
            live.prompt_spans = (*live.prompt_spans, (start, self._version))
        live.computed = end
        if len(live.prompt_spans) == 1:
            # The command that fills these pages is in the log, so later prompts may share them already.
            self._prefix.publish(self._seats.ids[live.seat], live.pages[: end // page_size], salt=live.request.cache_salt)
        return PrefillChunk(
            ids=live.prompt[start:end],
            start=start,
            pages=np.array(live.pages[: -(-end // page_size)], dtype=np.int64),
            row=live.row if end == live.prompt.size else -1,
        )

    def _enter_row(self, live: LiveRequest) -> None:
        sampling = live.request.sampling
        stop_ids = np.full(MAX_STOP_IDS, -1, dtype=np.int32)
        stop_ids[: live.stop_ids.size] = live.stop_ids
        self._packer.set_row(
            {
                "row": live.row,
                "generation": live.generation,
                "length": live.prompt.size - 1,
                "remaining": sampling.max_new_tokens,
                "stop_wait": sampling.min_new_tokens,
                "sampling_slot": live.sampling_slot,
                "recurrent_slot": -1,
                "temperature": sampling.temperature,
                "top_p": 1.0,
                "seed": _signed64(live.seed),
                "stop_ids": stop_ids,
            },
            np.array(live.pages, dtype=np.int64),
            None if sampling.forced_ids is None else np.asarray(sampling.forced_ids),
        )
        live.phase = Phase.RUNNING
        self._row_seat[live.row] = live.seat
        self._seats.row[live.seat] = live.row
        self._seats.generation[live.seat] = live.generation
        self._seats.scheduled[live.seat] += 1
        self._needs += np.array(live.variant, dtype=np.int64)

    def _plan_decode(self) -> DecodeLaunch | None:
        seats = self._row_seat
        scheduled = np.where(seats >= 0, self._seats.scheduled[seats], 0)
        active = (seats >= 0) & (scheduled < self._seats.limit[seats])
        rows = np.flatnonzero(active)
        if not rows.size:
            return None
        bucket = self._resolved.bucket_of(int(rows[-1]) + 1)
        lanes = seats[:bucket].copy()
        self._seats.scheduled[seats[rows]] += 1
        self._launches += 1
        self.counters["decode_launches"] += 1
        noise, temperature, stop_mask, slots = (bool(count) for count in self._needs)
        return DecodeLaunch(
            bucket=bucket,
            longest=int(scheduled[rows].max()),
            seats=lanes,
            generations=self._seats.generation[lanes].copy(),
            variant=Variant(noise=noise, temperature=temperature, stop_mask=stop_mask, slots=slots),
        )

    def _compact(self) -> None:
        """Move the last rows down when a smaller bucket would have done for `compaction_steps` steps."""
        used = self._rows.num_used
        target = self._resolved.bucket_of(max(used, 1))
        if self._rows.highest_used < target:
            self._sparse_steps = 0
            return
        self._sparse_steps += 1
        if self._sparse_steps < self._config.compaction_steps:
            return
        by_row = {live.row: live for live in self._live.values() if live.row >= 0}
        while self._rows.highest_used >= target:
            live = by_row[self._rows.highest_used]
            source = live.row
            live.row = self._rows.move_down(source)
            if live.phase is Phase.RUNNING:
                self._packer.move(source, live.row, live.generation)
                self._row_seat[live.row], self._row_seat[source] = live.seat, NO_SEAT
                self._seats.row[live.seat] = live.row
            self.counters["moves"] += 1

    def _close_ended(self, seats: np.ndarray, tokens: np.ndarray, status: np.ndarray) -> None:
        for lane in np.flatnonzero(status != LaneStatus.TOKEN):
            live = self._by_seat[int(seats[lane])]
            stopped = status[lane] == LaneStatus.STOPPED
            if live.phase is Phase.CLOSING:
                self._closing.remove(live)
            else:
                self._leave_row(live)
            kind = FinishKind.STOP if stopped else FinishKind.LENGTH
            self._finish(live, FinishReason(kind=kind, stop_id=int(tokens[lane]) if stopped else None))

    def _leave_row(self, live: LiveRequest) -> None:
        """Give the row back; commands that reuse it come later in the log."""
        self._row_seat[live.row] = NO_SEAT
        self._rows.release(live.row)
        self._needs -= np.array(live.variant, dtype=np.int64)
        live.row = -1

    def _finish(self, live: LiveRequest, reason: FinishReason) -> None:
        """Write the terminal record, key the pages that later prompts may use, give everything back."""
        prompt_tokens = live.prompt.size
        spans: Spans = ()
        output_tokens = 0
        if live.seat != NO_SEAT:
            count = int(self._seats.count[live.seat])
            output_tokens = count - prompt_tokens
            versions = self._kv_versions(live, count)
            spans = run_lengths(versions)
            self._keep_pages(live, versions)
        self._endings.append(
            Finished(
                request_id=live.request.request_id,
                reason=reason,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                cached_tokens=live.cached_tokens,
                seed=live.seed,
                kv_spans=spans,
            )
        )
        self._release(live)
        del self._live[live.request.request_id]
        self.counters[reason.kind.value] += 1

    def _kv_versions(self, live: LiveRequest, count: int) -> np.ndarray:
        """Return the version that computed the KV of each position that has one.

        The KV of an output token is computed by the launch that samples the next one; the last has none.
        """
        prompt_tokens = live.prompt.size
        if count == prompt_tokens:
            return expand_spans(live.prompt_spans, live.computed)
        prompt = expand_spans(live.prompt_spans, prompt_tokens)
        return np.concatenate([prompt, self._seats.versions[live.seat, prompt_tokens + 1 : count]])

    def _keep_pages(self, live: LiveRequest, versions: np.ndarray) -> None:
        page_size = self._resolved.page_size
        full = versions.size // page_size
        other = np.flatnonzero(versions != self._version)
        current = (int(other[0]) if other.size else versions.size) // page_size
        ids = self._seats.ids[live.seat]
        self._prefix.publish(ids, live.pages[:current], salt=live.request.cache_salt)
        lineage = live.request.lineage
        if lineage is not None and full:
            self._prefix.remember(
                lineage, salt=live.request.cache_salt, ids=ids, pages=live.pages[:full], versions=versions[: full * page_size]
            )

    def _release(self, live: LiveRequest) -> None:
        for page in live.pages:
            self._pool.release(page)
        live.pages = []
        if live.sampling_slot != _NO_SLOT:
            self._slots.release(live.sampling_slot)
            live.sampling_slot = _NO_SLOT
        if live.seat != NO_SEAT:
            del self._by_seat[live.seat]
            self._seats.release(live.seat)
            live.seat = NO_SEAT
        if live.phase is Phase.PREFILLING:
            live.row = -1
