"""Plans on the host: who is admitted, what is prefilled, which rows decode; appends commands, never touches tensors.

One `plan` per engine step. It lowers the bucket by moves when that has paid for some steps, tops up pages, admits from the
front of the queue and cuts prompts into chunks while the prefill budget lasts, and launches a decode of rows 0..bucket.
`consume` reads a launch's results through the lanes' seats as they were planned. When the pool runs dry the request with
the fewest computed tokens is preempted: it waits again at the front with its ids, counters and seed; what it rebuilds is
never emitted twice.

A row is closed once the last launch made before its KILL, or the one that ended it, has been read; only then is its end
reported (or the request queued again) and its pages keyed or freed. Every accepted request ends in exactly one
`Finished`. No torch.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from areno.commands import ClearPages, Command, DecodeLaunch, PrefillLaunch
from areno.config import GROW_TOKENS, EngineConfig, ResolvedConfig
from areno.decode.launch import LaneStatus, LaunchResult
from areno.decode_rows import DecodeRows
from areno.errors import DuplicateRequest
from areno.kv.prefix import PrefixIndex, run_lengths
from areno.kv.residency import PageCopy, Residency
from areno.live import NO_ROW, LiveRequest, Phase
from areno.prefill_batch import PrefillBatch
from areno.prompt_chunks import add_score, cut_chunk
from areno.readback import NOT_FINITE, LaunchNews, read_launch
from areno.request import Request, RequestLimits, check_request, resolve_stop_ids
from areno.seats import NO_SEAT
from areno.step_output import Finished, FinishKind, FinishReason, PromptScore, StepOutput

REFILL_STEPS = 16
"""Steps after which waiting requests are admitted however few they are."""


class Scheduler:
    """The host's plan for one engine. Owns the queue and the phases of requests."""

    def __init__(self, config: EngineConfig, resolved: ResolvedConfig, limits: RequestLimits) -> None:
        self._config, self._resolved, self._limits = config, resolved, limits
        self._version = config.initial_version
        self._residency = Residency(config, resolved)
        self._seats = self._residency.seats
        self._rows = DecodeRows(resolved, self._residency)
        self._live: dict[int, LiveRequest] = {}
        self._by_seat: dict[int, LiveRequest] = {}
        self._waiting: deque[LiveRequest] = deque()
        self._prefilling: deque[LiveRequest] = deque()
        self._closing: list[LiveRequest] = []
        self._groups: dict[int, list[LiveRequest]] = {}
        self._endings: list[Finished] = []
        self._scored: list[PromptScore] = []
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(resolved.seed)))
        self._launches = 0
        self._launches_read = 0
        self._sparse_steps = 0
        self._waited_steps = 0
        self._stuck: tuple[LiveRequest, tuple[int, ...]] | None = None
        self.counters: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether a request is live or an ending waits to be delivered."""
        return bool(self._live or self._endings)

    @property
    def num_running(self) -> int:
        """Number of admitted requests."""
        return len(self._live) - len(self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for a row."""
        return bool(self._waiting)

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
        live = LiveRequest(
            request=request,
            seed=int(self._random.integers(0, 2**64, dtype=np.uint64)) if seed is None else seed,
            stop_ids=resolve_stop_ids(request.sampling, self._limits),
            ids=np.asarray(request.prompt_ids).astype(np.int32),
            versions=np.zeros(0, dtype=np.int64),
        )
        if request.sampling.prompt_logprobs_from is not None:
            live.prompt_logprobs = np.full((2, live.ids.size), np.nan, dtype=np.float32)
        self._live[request.request_id] = live
        self._waiting.append(live)
        if request.group is not None:
            self._groups.setdefault(request.group, []).append(live)
        self.counters["accepted"] += 1

    def cancel(self, request_id: int, *, kind: FinishKind, detail: str | None) -> bool:
        """End a request early; return whether this call makes its terminal record come.

        A request whose row met its own end before the KILL keeps that end.
        """
        live = self._live.get(request_id)
        if live is None or live.reason is not None:
            return False
        live.reason = FinishReason(kind=kind, detail=detail)
        if live.phase is Phase.WAITING:
            self._waiting.remove(live)
            self._finish(live, live.reason)
        elif live.phase is Phase.PREFILLING:
            self._prefilling.remove(live)
            self._finish(live, live.reason)
        elif live.phase is Phase.RUNNING:
            self._kill(live)
        # A preempted row that is still closing ends instead of waiting again.
        return True

    def plan(self) -> list[Command]:
        """Decide the next step; return its commands in order."""
        self._compact()
        if not self._rows.is_steady:
            self._grow_rows()
        batch = self._plan_prefill()
        prefill = self._launch_prefill(batch)
        decode = self._plan_decode()
        commands: list[Command] = list(self._rows.take_deltas())
        # A copy may read what eviction has just freed and handed out again: copies first, into pages they fill whole.
        copies = batch.page_copies()
        if copies is not None:
            commands.append(copies)
        if self._resolved.clears_pages:
            filled = {copy.target for copy in batch.copies}
            fresh = [page for page in self._residency.pool.take_fresh() if page not in filled]
            if fresh:
                commands.append(ClearPages(pages=np.array(fresh, dtype=np.int64)))
        commands.extend(launch for launch in (prefill, decode) if launch is not None)
        return commands

    def consume(self, result: LaunchResult) -> StepOutput:
        """Read one launch and close what ended. Endings and prompt scores are taken separately."""
        self._launches_read = result.launch.number
        news = read_launch(self._seats, result)
        self.counters["starved"] += news.starved
        self.counters["sampled_tokens"] += news.seats.size
        for seat, detail in news.broken:
            self._break(self._by_seat[seat], detail)
        if result.launch.scores:
            self._take_scores(result)
        self._close_ended(news)
        self._close_killed(result.launch.number)
        return news.output

    def take_endings(self) -> tuple[Finished, ...]:
        """Return the terminal records not delivered yet."""
        endings, self._endings = tuple(self._endings), []
        return endings

    def take_prompt_scores(self) -> tuple[PromptScore, ...]:
        """Return the prompts scored and not delivered yet."""
        scored, self._scored = tuple(self._scored), []
        return scored

    def commit_version(self, version: int) -> None:
        """Start a new weight epoch: prompts in prefill start again, shared prefixes are gone.

        Running rows go on, but for those whose policy is to recompute: they wait at the front, in the order of their arrival,
        and rebuild their KV as any prompt does. Nothing that was emitted is emitted again.
        """
        self._version = version
        self._residency.start_epoch(version)
        self._stuck = None
        while self._prefilling:
            self._restart(self._prefilling[-1])
        rebuilding = [live for live in self._live.values() if live.phase is Phase.RUNNING and not live.keeps_kv]
        for live in reversed(rebuilding):
            self.counters["recomputed"] += 1
            self._kill(live)

    def empty_device(self) -> list[Command]:
        """Take every request off the device; return the commands that end their rows.

        They wait in the order of their arrival, keep what they have and rebuild their KV when they are admitted again. Rows close
        once the launches made before have been read.
        """
        while self._prefilling:
            self._restart(self._prefilling[-1])
        for live in reversed([live for live in self._live.values() if live.phase is Phase.RUNNING]):
            self._kill(live)
        return list(self._rows.take_deltas())

    @property
    def prefix(self) -> PrefixIndex:
        """The index of cached prefixes."""
        return self._residency.prefix

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._residency.prefix.clear()

    def gauges(self) -> dict[str, int]:
        """Return the current sizes: requests, pages, rows, slots."""
        pool, cached = self._residency.pool, self._residency.prefix.num_evictable
        return {
            "waiting": len(self._waiting),
            "running": self.num_running,
            "rows_used": self._residency.rows.num_used,
            "free_pages": pool.num_free,
            "cached_pages": cached,
            "used_pages": pool.num_pages - pool.num_free - cached,
            "free_sampling_slots": self._residency.slots.num_free,
            **self._residency.prefix.hint_counters,
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
        self._residency.check_integrity(self._live.values())
        seated = {live.seat: live for live in self._live.values() if live.seat != NO_SEAT}
        assert seated == self._by_seat, "seats and live requests differ"
        self._rows.check_integrity(self.rows_expected())
        queued = [*self._waiting, *self._prefilling, *self._closing, *self.rows_expected().values()]
        assert sorted(map(id, queued)) == sorted(map(id, self._live.values())), "a request is in no queue or in two"
        ended = sum(self.counters[kind.value] for kind in FinishKind)
        assert self.counters["accepted"] == len(self._live) + ended, "accepted != live + ended"
        grouped = {id(live) for members in self._groups.values() for live in members}
        assert grouped == {id(live) for live in self._live.values() if live.request.group is not None}, "a group lost a member"

    def _refill_due(self) -> bool:
        """Whether waiting requests are enough for a prefill, or have waited long enough, or hold up few running rows."""
        waiting = min(len(self._waiting), self._residency.rows.num_free)
        if not waiting:
            return False
        self._waited_steps += 1
        enough = min(self._resolved.refill_rows, max(self.num_running // 8, 1))
        if waiting < enough and self._waited_steps < REFILL_STEPS:
            return False
        self._waited_steps = 0
        return True

    def _admit_next(self, copies: list[PageCopy]) -> bool:
        """Admit the front of the queue if everything it needs is there; nobody overtakes it."""
        if not self._waiting:
            return False
        live = self._waiting[0]
        free = (*self._residency.availability, self.num_running)
        if self._stuck is not None and self._stuck[0] is live and self._stuck[1] == free:
            return False
        copied = self._residency.admit(live, alone=self.num_running == 0)
        if copied is None:
            self._stuck = live, free
            return False
        copies.extend(copied)
        self._prefilling.append(self._waiting.popleft())
        self._by_seat[live.seat] = live
        live.phase = Phase.PREFILLING
        if not live.rebuilt_at:
            live.cached_tokens = live.computed
        return True

    def _count_prompt(self, live: LiveRequest) -> None:
        self.counters["cached_tokens"] += live.cached_tokens
        self.counters["prompt_tokens"] += live.prompt_tokens

    def _plan_prefill(self) -> PrefillBatch:
        budget = self._resolved.max_prefill_tokens
        batch = PrefillBatch(self._version)
        # Admission goes prompt by prompt, so that each one finds the pages that those before it are filling.
        refill = self._refill_due()
        while True:
            if refill and not self._prefilling and self._config.prefix_cache:
                self._join_front(batch)
            if budget <= 0 or not (self._prefilling or (refill and self._admit_next(batch.copies))):
                return batch
            live = self._prefilling[0]
            take = min(budget, live.ids.size - live.computed)
            budget -= take
            self.counters["prefill_tokens"] += take
            if batch.add(cut_chunk(live, take, version=self._version, residency=self._residency), live):
                self._prefilling.popleft()
                if not live.rebuilt_at:
                    self._count_prompt(live)
                self._join_group(batch, live)

    def _launch_prefill(self, batch: PrefillBatch) -> PrefillLaunch | None:
        """Let the rows that draw run from here on; return the launch, if the batch has anything to compute."""
        for live in batch.drawing:
            self._rows.enter(live)
            live.phase = Phase.RUNNING
            # Not before: a copy planned in this step would read the page in front of the launch that fills it.
            self._residency.open_tail(live)
        launch = batch.launch(self._seats)
        if launch is not None:
            self._launches += launch.reports
        return launch

    def _join_group(self, batch: PrefillBatch, parent: LiveRequest) -> None:
        """Start the waiting members of a group on the prompt that one of them has just computed."""
        members = self._groups.get(parent.request.group, []) if parent.request.group is not None else []
        for live in members:
            same = live.phase is Phase.WAITING and live.prompt_logprobs is None and np.array_equal(live.ids, parent.ids)
            if not same or live.request.cache_salt != parent.request.cache_salt or not live.may_take(parent, self._version):
                continue
            if not self._fork(live, parent, batch):
                return
            batch.join(live)

    def _join_front(self, batch: PrefillBatch) -> None:
        """Start requests at the front of the queue on a prompt that the batch computes for another one and that is theirs as well."""
        while self._waiting:
            live = self._waiting[0]
            parent = batch.computes(live)
            if parent is None or not self._fork(live, parent, batch):
                return
            batch.join_same(live)

    def _fork(self, live: LiveRequest, parent: LiveRequest, batch: PrefillBatch) -> bool:
        """Seat a waiting request beside the one that computes its prompt; return whether there was room."""
        copied = self._residency.fork(live, parent)
        if copied is None:
            return False
        batch.forks.extend(copied)
        self._waiting.remove(live)
        self._by_seat[live.seat] = live
        # It draws in this launch; until it runs nobody else may start it.
        live.phase = Phase.PREFILLING
        if not live.rebuilt_at:
            # The last prompt token was computed for the member too, once for all of them.
            live.cached_tokens = live.ids.size - 1
            self._count_prompt(live)
        self.counters["forks"] += 1
        return True

    def _plan_decode(self) -> DecodeLaunch | None:
        launch = self._rows.next_launch()
        if launch is not None:
            self._launches += 1
            self.counters["decode_launches"] += 1
        return launch

    def _grow_rows(self) -> None:
        """When a row has no page for its next token, top up all rows; preempt if even the needy can't be served."""
        seats, scheduled = self._rows.growing()
        needy = scheduled > self._seats.covered[seats]
        if not needy.any():
            return
        lives = [self._by_seat[seat] for seat in seats.tolist()]
        short = False
        for place in sorted(np.flatnonzero(needy), key=lambda place: -scheduled[place]):
            live, known = lives[place], int(scheduled[place])
            self._grow_row(live, known)
            # Where pages are on their way already, the row stalls until the launches in flight have been read.
            while live.phase is Phase.RUNNING and known > self._seats.covered[live.seat]:
                short = True
                if self._closing or not self._preempt_one():
                    break
                self._grow_row(live, known)
        if not short:
            for live, known in zip(lives, scheduled.tolist()):
                self._grow_row(live, known + GROW_TOKENS)

    def _grow_row(self, live: LiveRequest, tokens: int) -> None:
        pages = self._rows.grow(live, tokens) if live.phase is Phase.RUNNING else 0
        if pages:
            self.counters["grown_pages"] += pages

    def _preempt_one(self) -> bool:
        """Send the request with the fewest computed tokens back to the queue; return whether there was one to send."""
        candidates = [*self._prefilling, *self.rows_expected().values()]
        if len(candidates) < 2:
            return False
        victim = min(reversed(candidates), key=lambda live: live.computed if live.phase is Phase.PREFILLING else self.known_tokens(live))
        if victim.phase is Phase.PREFILLING:
            self._restart(victim)
            return True
        self.counters["preemptions"] += 1
        self._kill(victim)
        return True

    def _restart(self, live: LiveRequest) -> None:
        """Take a prompt out of prefill; it waits at the front, keeping its ids."""
        self._prefilling.remove(live)
        self._requeue(live)
        self.counters["prefills_restarted"] += 1

    def _requeue(self, live: LiveRequest) -> None:
        del self._by_seat[live.seat]
        self._residency.release(live)
        live.phase, live.computed, live.base_spans = Phase.WAITING, 0, ()
        self._waiting.appendleft(live)
        self._stuck = None

    def _kill(self, live: LiveRequest) -> None:
        """End a row on the device; the request closes when the launches made before have been read."""
        self._rows.kill(live)
        live.phase = Phase.CLOSING
        live.close_after = self._launches
        self._closing.append(live)
        self._close_killed(self._launches_read)

    def _close_killed(self, launch_number: int) -> None:
        for live in [live for live in self._closing if live.close_after <= launch_number]:
            self._closing.remove(live)
            if live.reason is not None:
                self._finish(live, live.reason)
            else:
                self._close_preempted(live)

    def _close_preempted(self, live: LiveRequest) -> None:
        count = self.known_tokens(live)
        self._residency.keep_pages(live, self._residency.kv_versions(live, count))
        live.ids = self._seats.ids[live.seat, :count].copy()
        live.versions = self._seats.versions[live.seat, live.prompt_tokens : count].copy()
        live.rebuilt_at.append(count)
        self._requeue(live)

    def _compact(self) -> None:
        """Move the last rows down when a smaller bucket would have done for `compaction_steps` steps."""
        pool = self._residency.rows
        target = self._resolved.bucket_of(max(pool.num_used, 1))
        if pool.highest_used < target:
            self._sparse_steps = 0
            return
        self._sparse_steps += 1
        if self._sparse_steps < self._config.compaction_steps:
            return
        by_row = {live.row: live for live in self._live.values() if live.row != NO_ROW}
        while pool.highest_used >= target:
            live = by_row[pool.highest_used]
            source = live.row
            live.row = pool.move_down(source)
            if live.phase is Phase.RUNNING:
                self._rows.move(live, source)
            self.counters["moves"] += 1

    def _close_ended(self, news: LaunchNews) -> None:
        for place in news.ended:
            live = self._by_seat[int(news.seats[place])]
            stopped = news.status[place] == LaneStatus.STOPPED
            if live.phase is Phase.CLOSING:
                self._closing.remove(live)
            else:
                self._rows.leave(live)
            kind = FinishKind.STOP if stopped else FinishKind.LENGTH
            self._finish(live, FinishReason(kind=kind, stop_id=int(news.tokens[place]) if stopped else None))

    def _finish(self, live: LiveRequest, reason: FinishReason) -> None:
        """Write the terminal record, key the pages that later prompts may use, give everything back."""
        count = live.ids.size
        spans: tuple[tuple[int, int], ...] = ()
        if live.seat != NO_SEAT:
            count = self.known_tokens(live)
            versions = self._residency.kv_versions(live, count)
            spans = run_lengths(versions)
            if not self._seats.broken[live.seat]:
                self._residency.keep_pages(live, versions)
            del self._by_seat[live.seat]
        self._endings.append(
            Finished(
                request_id=live.request.request_id,
                reason=reason,
                prompt_tokens=live.prompt_tokens,
                output_tokens=count - live.prompt_tokens,
                cached_tokens=live.cached_tokens,
                seed=live.seed,
                kv_spans=spans,
                kv_rebuilt_at=tuple(live.rebuilt_at),
            )
        )
        self._residency.release(live)
        group = live.request.group
        if group is not None:
            self._groups[group].remove(live)
            if not self._groups[group]:
                del self._groups[group]
        del self._live[live.request.request_id]
        self.counters[reason.kind.value] += 1

    def _break(self, live: LiveRequest, detail: str) -> None:
        """End a request as failed; what it still gives is not delivered, and its pages are not kept for others."""
        self._seats.mark_broken(live.seat)
        self._residency.close_tail(live)
        live.reason = FinishReason(kind=FinishKind.FAILED, detail=detail)
        if live.phase is Phase.RUNNING:
            self._kill(live)
        elif live.phase is Phase.PREFILLING:
            self._prefilling.remove(live)
            self._finish(live, live.reason)

    def _take_scores(self, result: LaunchResult) -> None:
        for score in result.launch.scores:
            live = self._by_seat.get(score.seat)
            if live is None or live.prompt_logprobs is None or live.generation != score.generation:
                continue
            if not np.isfinite(score.raw_logprobs).all():
                live.prompt_logprobs = None
                self._break(live, NOT_FINITE)
                continue
            scored = add_score(live, score, version=result.launch.version)
            if scored is not None:
                self._scored.append(scored)
