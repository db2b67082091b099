"""An engine without a model: the real scheduler, pages and prefix index over an executor that makes tokens up.

Each step every running row gets one id, a function of its seed and the id's position, with log-probabilities that follow from
the id and the version. `tokens_per_flush` steps are told together; a turn starts no sooner than `step_ms` times as many
milliseconds after the one before. It runs in a real engine host process behind a real front, so that front and client can be
measured and broken at full speed. No engine figure is ever quoted from it.

    python -m tests.bench.scripted_engine --step-ms 1 --tokens-per-flush 4      serves until Ctrl-C
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areno.commands import ApplyDelta, Command, DecodeLaunch, PrefillLaunch
from areno.config import DeviceLimits, EngineConfig, resolve
from areno.decode.deltas import DeltaKind, DeltaSlot
from areno.decode.launch import ChunkScores, LaneStatus, LaunchRecord, LaunchResult
from areno.request import MAX_STOP_IDS, Request, RequestLimits
from areno.scheduler import Scheduler
from areno.step_output import FinishKind, StepOutput
from rollout.client.local import LocalService
from tests.fakes import EOS_ID, VOCABULARY, FakeEngine, FakeInfo, FakeReport, FakeScore, fake_ids, fake_logprobs

STAMP_PERIOD_S = 64.0
COLUMNS = ("request_ids", "token_ids", "logprobs", "raw_logprobs", "behaviour_logprobs", "versions")
ENDLESS_BYTES = 2**50
MAX_AHEAD = 64


def scripted_ids(seed: int, count: int, prompt_tokens: int) -> np.ndarray:
    """Return the ids that a request with this seed samples behind a prompt of so many ids (earlier output not counted)."""
    return fake_ids(seed, count, prompt_tokens)


def stamp_age_s(raw_logprob: float, now: float) -> float:
    """Return how long ago a token with this log-probability was made by a `stamped` engine of the same machine."""
    return (now + raw_logprob) % STAMP_PERIOD_S


@dataclass(slots=True)
class _Ahead:
    """What the next launches over the same lanes will say, as no row ends in them. Shapes: `ids` [K, B], `logprobs` [K, 3, B]."""

    seats: np.ndarray
    rows: np.ndarray
    going: np.ndarray
    status: np.ndarray
    generation: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    used: int = 0


class ScriptedExecutor:
    """Executes the command log on rows that exist only here: state, stops and budgets as the decode tables have them.

    While the same rows decode, what they will say is worked out for many steps at once: this engine must cost little.
    """

    def __init__(self, rows: int, page_size: int, version: int, *, stamped: bool) -> None:
        self._page_size, self._stamped, self.version = page_size, stamped, version
        self._launches = 0
        self._generation = np.full(rows, -1, np.int32)
        self._alive = np.zeros(rows, bool)
        self._length = np.zeros(rows, np.int64)
        self._pages = np.zeros(rows, np.int64)
        self._remaining = np.zeros(rows, np.int64)
        self._stop_wait = np.zeros(rows, np.int64)
        self._stop_ids = np.full((rows, MAX_STOP_IDS), -1, np.int32)
        self._seed = np.zeros(rows, np.uint64)
        self._state = (
            self._generation,
            self._alive,
            self._length,
            self._pages,
            self._remaining,
            self._stop_wait,
            self._stop_ids,
            self._seed,
        )
        # Forced ids of the rows that have some, and the position of the first of them.
        self._forced: dict[int, tuple[np.ndarray, int]] = {}
        self._ahead: _Ahead | None = None
        self._last_seats: np.ndarray | None = None

    def execute(self, command: Command) -> LaunchResult | None:
        """Run one command; returns what a launch says."""
        if isinstance(command, DecodeLaunch):
            return self._decode(command)
        self._catch_up()
        if isinstance(command, ApplyDelta):
            self._apply(command.slot)
        elif isinstance(command, PrefillLaunch) and command.reports:
            result = self._launch(np.array(command.rows, np.int64), command.seats, command.generations)
            result.launch.scores.extend(self._scores(command))
            return result
        return None

    def set_version(self, version: int) -> None:
        """Go on under other weights."""
        self._catch_up()
        self.version = version

    @property
    def is_ahead(self) -> bool:
        """Whether the last launch was worked out ahead, so that no row ended or starved in it."""
        return self._ahead is not None

    def _decode(self, command: DecodeLaunch) -> LaunchResult:
        ahead = self._ahead
        if ahead is None or ahead.seats is not command.seats or ahead.used == len(ahead.ids):
            self._catch_up()
            rows = np.arange(command.bucket)
            # The scheduler names the same lanes by the same array for as long as nothing changes.
            if self._last_seats is command.seats:
                ahead = self._ahead = self._look_ahead(rows, command.seats)
            self._last_seats = command.seats
            if self._ahead is None or ahead is None:
                return self._launch(rows, command.seats, command.generations)
        step = ahead.used
        ahead.used += 1
        logprobs = ahead.logprobs[step]
        if self._stamped:
            logprobs[1] = -(time.monotonic() % STAMP_PERIOD_S)
        return self._result(command.seats, command.generations, ahead.status, ahead.generation, ahead.ids[step], logprobs)

    def _look_ahead(self, rows: np.ndarray, seats: np.ndarray) -> _Ahead | None:
        """Work out the next launches over these rows; None where one may stop, run out, starve or be forced."""
        going = rows[self._alive[rows]]
        if not going.size or self._forced:
            return None
        room = self._pages[going] * self._page_size - self._length[going]
        steps = int(min(MAX_AHEAD, (self._remaining[going] - 1).min(), room.min()))
        if steps < 2:
            return None
        ids = np.stack([self._next_ids(rows, step) for step in range(steps)])
        stops = (self._stop_ids[going] >= 0).any(axis=0)
        for column in np.flatnonzero(stops):
            if (ids[:, going] == self._stop_ids[going, column]).any():
                return None
        logprobs = fake_logprobs(ids, self.version)
        nothing = np.full_like(logprobs, np.nan)
        status = np.zeros(rows.size, np.int32)
        status[going] = LaneStatus.TOKEN
        return _Ahead(
            seats=seats,
            rows=rows,
            going=going,
            status=status,
            generation=self._generation[rows],
            ids=ids,
            logprobs=np.stack([logprobs, logprobs - np.float32(0.5), nothing], axis=1),
        )

    def _catch_up(self) -> None:
        """Bring the rows to where the launches worked out ahead have left them."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._length[ahead.going] += ahead.used
            self._remaining[ahead.going] -= ahead.used
            self._stop_wait[ahead.going] -= ahead.used

    def _apply(self, slot: DeltaSlot) -> None:
        contents = dict(slot.contents)
        for operation in slot.rows:
            row, kind = int(operation["row"]), operation["kind"]
            if kind == DeltaKind.SET:
                self._set(row, operation)
                content = contents.get(int(operation["sampling_slot"]))
                if content is not None and content.forced_ids.size:
                    self._forced[row] = content.forced_ids, int(operation["length"]) + 1 - content.output_ids.size
            elif kind == DeltaKind.KILL and self._generation[row] == operation["generation"]:
                self._alive[row] = False
            elif kind == DeltaKind.MOVE and self._generation[operation["source"]] == operation["generation"]:
                self._move(int(operation["source"]), row)
        if slot.pages.size:
            np.maximum.at(self._pages, slot.pages["row"], slot.pages["index"] + 1)

    def _set(self, row: int, operation: np.ndarray) -> None:
        self._generation[row], self._alive[row], self._pages[row] = operation["generation"], True, 0
        self._length[row], self._remaining[row] = operation["length"], operation["remaining"]
        self._stop_wait[row], self._stop_ids[row] = operation["stop_wait"], operation["stop_ids"]
        self._seed[row] = np.int64(operation["seed"]).view(np.uint64)
        self._forced.pop(row, None)

    def _move(self, source: int, row: int) -> None:
        for array in self._state:
            array[row] = array[source]
        self._alive[source] = False
        self._forced.pop(row, None)
        if source in self._forced:
            self._forced[row] = self._forced.pop(source)

    def _launch(self, rows: np.ndarray, seats: np.ndarray, generations: np.ndarray) -> LaunchResult:
        """Give every living row that has a page its next id."""
        alive = self._alive[rows]
        starved = alive & (self._length[rows] // self._page_size >= self._pages[rows])
        goes = alive & ~starved
        ids = self._next_ids(rows)
        going = rows[goes]
        self._length[going] += 1
        self._remaining[going] -= 1
        stopped = goes & (self._stop_wait[rows] <= 0) & (self._stop_ids[rows] == ids[:, None]).any(axis=1)
        self._stop_wait[going] -= 1
        exhausted = goes & ~stopped & (self._remaining[rows] <= 0)
        self._alive[rows[stopped | exhausted]] = False
        status = goes.astype(np.int32) * LaneStatus.TOKEN
        status[starved], status[stopped], status[exhausted] = LaneStatus.STARVED, LaneStatus.STOPPED, LaneStatus.EXHAUSTED
        logprobs = fake_logprobs(ids, self.version)
        raw = logprobs - np.float32(0.5)
        if self._stamped:
            raw = np.full(ids.size, -(time.monotonic() % STAMP_PERIOD_S), np.float32)
        told = np.stack([logprobs, raw, np.full(ids.size, np.nan, np.float32)])
        return self._result(seats, generations, status, self._generation[rows], ids, told)

    def _result(
        self,
        seats: np.ndarray,
        generations: np.ndarray,
        status: np.ndarray,
        generation: np.ndarray,
        ids: np.ndarray,
        logprobs: np.ndarray,
    ) -> LaunchResult:
        self._launches += 1
        launch = LaunchRecord(number=self._launches, slot=0, seats=seats, generations=generations, version=self.version)
        return LaunchResult(launch=launch, status=status, generation=generation, token=ids, logprobs=logprobs)

    def _next_ids(self, rows: np.ndarray, ahead: int = 0) -> np.ndarray:
        """Return the id at each row's next position: `fake_ids` for all rows at once, then what is forced."""
        positions = (self._length[rows] + 1 + ahead).astype(np.uint64)
        mixed = (positions + (self._seed[rows] & np.uint64(2**32 - 1))) * np.uint64(2654435761) & np.uint64(2**32 - 1)
        ids = (mixed % np.uint64(VOCABULARY - 10)).astype(np.int32) + 10
        for lane, row in enumerate(rows.tolist() if self._forced else ()):
            forced, first = self._forced.get(row, ((), 0))
            place = int(self._length[row]) + 1 - first
            if place < len(forced):
                ids[lane] = forced[place]
        return ids

    def _scores(self, launch: PrefillLaunch) -> list[ChunkScores]:
        scores = []
        for chunk in launch.chunks:
            if chunk.score_targets.size:
                logprobs = fake_logprobs(chunk.score_targets, self.version)
                scores.append(
                    ChunkScores(
                        seat=chunk.seat,
                        generation=chunk.generation,
                        position=chunk.score_from + 1,
                        logprobs=logprobs,
                        raw_logprobs=logprobs - np.float32(0.5),
                    )
                )
        return scores


class ScriptedEngine:
    """See the module. `stamped` puts the time of making into each raw log-probability; weights are those of a `FakeEngine`."""

    lost_fd = None

    def __init__(
        self,
        *,
        model: str,
        step_ms: float = 0.0,
        tokens_per_flush: int = 1,
        stamped: bool = False,
        load_s: float = 0.0,
        initial_version: int = 0,
        max_model_len: int = 8192,
        max_rows: int = 64,
        **options: Any,
    ) -> None:
        time.sleep(load_s)
        # Staging needs it, and the import must not stop a loop that answers already.
        for name in ("torch", "safetensors.torch"):
            importlib.import_module(name)
        config = EngineConfig(model=model, device="cpu", initial_version=initial_version, max_rows=max_rows, **options)
        limits = DeviceLimits(name="cpu", kind="cpu", kv_bytes=ENDLESS_BYTES)
        resolved = resolve(config, limits, model_max_len=max_model_len, token_kv_elements=1)
        self._limits = RequestLimits(
            vocab_size=VOCABULARY,
            num_valid_ids=VOCABULARY,
            max_model_len=resolved.max_model_len,
            pool_tokens=resolved.pool_tokens,
            eos_ids=(EOS_ID,),
            sampling_slots=config.sampling_slots,
        )
        self._scheduler = Scheduler(config, resolved, self._limits)
        self._executor = ScriptedExecutor(resolved.table_rows, resolved.page_size, initial_version, stamped=stamped)
        self._weights = FakeEngine(model=model, initial_version=initial_version)
        self._period_s, self._steps_per_turn = step_ms * tokens_per_flush / 1e3, tokens_per_flush
        self._turn_at = 0.0
        self._steps = 0
        self.asleep: str | None = None
        self.info = FakeInfo(
            model_type="scripted",
            max_model_len=resolved.max_model_len,
            page_size=resolved.page_size,
            num_pages=resolved.num_pages,
            pool_tokens=resolved.pool_tokens,
            max_rows=resolved.max_rows,
            sampling_slots=config.sampling_slots,
            result_transport_reason="a scripted executor runs on the CPU",
        )

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._executor.version

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Names, dtypes and shapes of a full update."""
        return self._weights.manifest

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a request. Raises: InvalidRequest."""
        self._scheduler.submit(request)

    def cancel(self, request_id: int, *, kind: FinishKind = FinishKind.CANCELLED, detail: str | None = None) -> bool:
        """End a request; False if it is unknown or ended."""
        return self._scheduler.cancel(request_id, kind=kind, detail=detail)

    def step(self) -> StepOutput:
        """Make `tokens_per_flush` steps and tell them together. Blocks: until this turn is due."""
        now = time.monotonic()
        if now < self._turn_at:
            time.sleep(self._turn_at - now)
        self._turn_at = max(self._turn_at + self._period_s, now)
        outputs: list[StepOutput] = []
        run: list[LaunchResult] = []
        for _ in range(self._steps_per_turn):
            self._steps += 1
            for command in self._scheduler.plan():
                result = self._executor.execute(command)
                if result is None:
                    continue
                if run and result.status is not run[0].status:
                    outputs += self._consume(run)
                    run = []
                run.append(result)
                if not self._executor.is_ahead:
                    # Something may have ended, which the next plan is to know.
                    outputs += self._consume(run)
                    run = []
            if not self._scheduler.has_work:
                break
        outputs += self._consume(run)
        return self._told(outputs)

    def _consume(self, run: Sequence[LaunchResult]) -> list[StepOutput]:
        """Let the scheduler read launches; those worked out ahead, over the same lanes and without an end, in one go."""
        scheduler, seats = self._scheduler, self._scheduler._seats
        if len(run) < 2 or seats.num_silent or seats.num_broken:
            return [scheduler.consume(result) for result in run]
        first, last = run[0].launch, run[-1].launch
        lanes = np.flatnonzero((run[0].generation == first.generations) & (run[0].status == LaneStatus.TOKEN))
        told, steps = first.seats[lanes], len(run)
        ids = np.stack([result.token for result in run])[:, lanes]
        logprobs = np.stack([result.logprobs for result in run], axis=1)[:, :, lanes]
        places = seats.count[told] + np.arange(steps)[:, None]
        seats.ids[told, places], seats.versions[told, places] = ids, first.version
        seats.count[told] += steps
        scheduler.counters["sampled_tokens"] += ids.size
        scheduler._launches_read = last.number
        scheduler._close_killed(last.number)
        tempered, raw, behaviour = logprobs.reshape(3, -1)
        return [
            StepOutput(
                request_ids=np.tile(seats.request_id[told], steps),
                token_ids=ids.reshape(-1),
                logprobs=tempered,
                raw_logprobs=raw,
                behaviour_logprobs=behaviour,
                versions=np.full(ids.size, first.version, np.int64),
            )
        ]

    def collect(self) -> StepOutput:
        """Return what is not told yet, giving nobody a token."""
        return self._told([])

    def _told(self, outputs: Sequence[StepOutput]) -> StepOutput:
        endings, scores = self._scheduler.take_endings(), self._scheduler.take_prompt_scores()
        if not outputs:
            return replace(StepOutput.empty(endings), prompt_scores=scores)
        joined = {name: np.concatenate([getattr(output, name) for output in outputs]) for name in COLUMNS}
        return StepOutput(**joined, finished=endings, prompt_scores=scores)

    def score(self, ids: np.ndarray, *, temperature: float = 1.0) -> FakeScore:
        """Score given ids."""
        logprobs = fake_logprobs(np.asarray(ids)[1:], self.version)
        return FakeScore(token_logprobs=logprobs, raw_logprobs=logprobs - np.float32(0.5), version=self.version)

    def begin_update(self, manifest: Mapping[str, Any] | None, *, version: int, partial: bool = False) -> None:
        """Open an update."""
        self._weights.begin_update(manifest, version=version, partial=partial)

    def stage(self, name: str, tensor: Any) -> None:
        """Take one tensor."""
        self._weights.stage(name, tensor)

    def open_slice(self, name: str, *, start: int, count: int, spec: Any) -> None:
        """Give no memory: slices are looked at as they come."""

    def close_slice(self, filled: Any) -> None:
        """None was opened."""
        raise AssertionError("a slice is closed that was never opened")

    def open_memory(self, handle: bytes) -> None:
        """There are no other ranks."""

    def stage_slices(self, slices: Sequence[Any]) -> None:
        """Take parts of tensors."""
        self._weights.stage_slices(slices)

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
        report = self._weights.commit_update(digests=digests, canaries=canaries)
        self._executor.set_version(report.version)
        self._scheduler.commit_version(report.version)
        return report

    def abort_update(self) -> None:
        """Drop the open update."""
        self._weights.abort_update()

    def sleep(self, level: str = "kv") -> StepOutput:
        """Take every request off the device."""
        for command in self._scheduler.empty_device():
            self._executor.execute(command)
        self._scheduler.clear_prefix_cache()
        self.asleep = level
        return self.collect()

    def wake(self) -> None:
        """Go on."""
        self.asleep = None

    def expect_return(self, lineage: str, seconds: float, *, cache_salt: str | None = None, owner: str = "") -> bool:
        """Keep a lineage's pages for a while."""
        return self._scheduler.prefix.expect(lineage, salt=cache_salt, owner=owner, seconds=float(seconds))

    def end_hints(self, owner: str = "") -> None:
        """Forget an owner's hints."""
        self._scheduler.prefix.end_hints(owner)

    def tensors(self) -> dict[str, Any]:
        """Return the live tensors."""
        return self._weights.tensors()

    def whole_tensor(self, name: str) -> Any:
        """Return a live tensor."""
        return self._weights.whole_tensor(name)

    def digests(self) -> dict[str, int]:
        """Return a digest of each tensor."""
        return self._weights.digests()

    def stats(self) -> dict[str, int | float]:
        """Return the scheduler's counters and gauges."""
        return {**self._scheduler.counters, **self._scheduler.gauges(), "steps": self._steps, "version": self.version}

    def check_integrity(self) -> None:
        """Check that nothing is lost or held twice. Raises: AssertionError."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Drop the open update."""
        self.abort_update()


def scripted_service(
    folder: Any, *, timeout_s: float = 10.0, engine_options: Mapping[str, Any] | None = None, **options: Any
) -> LocalService:
    """Return a service of real processes around a `ScriptedEngine`; `folder` serves as the model folder."""
    every = {"engine": "tests.bench.scripted_engine:ScriptedEngine", "engine_options": dict(engine_options or {}), **options}
    return LocalService(str(folder), start_timeout_s=30.0, timeout_s=timeout_s, options=every)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--step-ms", type=float, default=0.0, help="least time for one step")
    parser.add_argument("--tokens-per-flush", type=int, default=1, help="steps that are told together")
    parser.add_argument("--rows", type=int, default=256, help="requests that run at once")
    given = parser.parse_args()
    engine_options = {"step_ms": given.step_ms, "tokens_per_flush": given.tokens_per_flush, "max_rows": given.rows}
    with tempfile.TemporaryDirectory() as folder, scripted_service(folder, engine_options=engine_options) as client:
        print(f"serving at {client.address}; end with Ctrl-C", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
