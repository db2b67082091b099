"""Episodes for the trainers of TRL: a `rollout_func` for GRPOTrainer, worker and weight transfer for AsyncGRPOTrainer.

    GRPOTrainer      --rollout_func(prompts, trainer)--> EpisodeRollouts: push if a step was made, play, check, rows
    AsyncGRPOTrainer --rollout_worker---> EpisodeWorker: groups of a RolloutSource, scored, on the trainer's queue
                     --weight_transfer--> ServiceWeightTransfer: the trainer's tensors through a WeightPush

Nothing of TRL is imported: its trainers call these objects by the names that they look for (checked with TRL 1.16).
Invariant: a row that reaches a trainer has a log-probability and a version for every sampled token.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainer_bridge.batch import sample_advantages
from trainer_bridge.errors import InvalidBatch, InvalidOption, RolloutShortfall, SourceClosed
from trainer_bridge.groups import derive_seed
from trainer_bridge.option_names import OTHER_OPTIONS, checks_names
from trainer_bridge.options import check_hook, check_push_arguments
from trainer_bridge.samples import TrainingSample
from trainer_bridge.source import RolloutSource
from trainer_bridge.weights.proof import CanaryFunction
from trainer_bridge.weights.push import WeightPush

REWARD = "episode_reward"
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One episode that a GRPOTrainer asks for: its prompt as the data set has it, its place in the call, and a seed of its own."""

    prompt: Any
    index: int
    seed: int
    attempt: int = 0


PlayEpisode = Callable[[EpisodeRequest], Awaitable[Sequence[TrainingSample]]]


def episode_reward(completions: Sequence[Any], episode_reward: Sequence[float], **_: Any) -> list[float]:
    """Return the rewards that the episodes earned: a `reward_funcs` of GRPOTrainer for rollouts of `EpisodeRollouts`."""
    return [float(reward) for reward in episode_reward]


@checks_names(InvalidOption, OTHER_OPTIONS)
class EpisodeRollouts:
    """A `rollout_func` for GRPOTrainer: `GRPOTrainer(..., rollout_func=EpisodeRollouts(play, push), reward_funcs=episode_reward)`.

    `play(request)` plays one episode and returns its one sample (`samples_of`); a failed one is played again with another seed,
    `max_attempts` times in all. The weights are pushed when the trainer's `global_step` is not the one of the last push, and
    every sampled token must be of the version just pushed: this trainer takes its own log-probabilities for those of the
    draw, so older tokens would be trained on as if they were new. For the same reason draws must be unfiltered and of the
    trainer's temperature. Tokens of the environment get `env_mask` 0. `timeout_s` bounds a call.
    Raises when called: InvalidBatch, RolloutShortfall, and what a push raises.
    """

    def __init__(self, play: PlayEpisode, push: WeightPush, *, seed: int = 0, max_attempts: int = MAX_ATTEMPTS, timeout_s: float = 3600.0):
        if max_attempts < 1:
            raise InvalidOption(
                f"max_attempts={max_attempts}", field="max_attempts", value=max_attempts, limit="at least 1", remedy="leave it out"
            )
        self._play, self._push, self._seed = play, push, seed
        self._max_attempts, self._timeout_s = max_attempts, timeout_s
        self._pushed_step: int | None = None
        self._calls = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return one row for each prompt, in order. Blocks: until every episode has ended."""
        step = int(trainer.state.global_step)
        if step != self._pushed_step:
            self._push.push(trainer_step=step)
            self._pushed_step = step
        self._calls += 1
        base = derive_seed(self._seed, self._calls)
        # A loop and a thread of its own: the caller may be inside a running loop, as in a notebook.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            samples = pool.submit(asyncio.run, self._play_all(prompts, base)).result()
        temperature = getattr(getattr(trainer, "args", None), "temperature", None)
        for index, sample in enumerate(samples):
            self._check(index, sample, temperature)
        rows = [_row(sample) for sample in samples]
        return {name: [row[name] for row in rows] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", REWARD)}

    async def _play_all(self, prompts: Sequence[Any], base: int) -> list[TrainingSample]:
        played = (self._play_one(prompt, index, base) for index, prompt in enumerate(prompts))
        async with asyncio.timeout(self._timeout_s):
            return list(await asyncio.gather(*played))

    async def _play_one(self, prompt: Any, index: int, base: int) -> TrainingSample:
        causes: Counter[str] = Counter()
        for attempt in range(self._max_attempts):
            request = EpisodeRequest(prompt=prompt, index=index, seed=derive_seed(base, index, attempt), attempt=attempt)
            samples = list(await self._play(request))
            if len(samples) > 1:
                raise InvalidBatch(
                    f"episode {index} gave {len(samples)} rows",
                    field="samples",
                    value=len(samples),
                    limit="GRPOTrainer takes one row for each prompt",
                    remedy='pass episodes ChatFormat.of(client, history="append"), or use RolloutSource, which takes episodes that fork',
                )
            if samples and samples[0].is_trainable and samples[0].num_sampled:
                return samples[0]
            causes[str(samples[0].info.get("cause", samples[0].status)) if samples else "no_samples"] += 1
        raise RolloutShortfall(
            f"episode {index} failed {self._max_attempts} times",
            failures=causes,
            limit=f"causes: {', '.join(f'{cause} {times} times' for cause, times in causes.most_common())}",
            remedy="mend what fails there, or raise max_attempts",
        )

    def _check(self, index: int, sample: TrainingSample, temperature: float | None) -> None:
        oldest, version = sample.oldest_version, self._push.version
        wrong: tuple[str, object, str, str] | None = None
        if oldest != version or sample.versions[sample.mask].max() != version:
            wrong = ("versions", oldest, f"version {version} was just pushed and staleness must be 0", "let nobody else push meanwhile")
        elif sample.filtered_mask().any() or sample.shaped_mask().any():
            limit = "GRPOTrainer weighs tokens by the whole distribution"
            wrong = ("sampling", "filtered or shaped", limit, "sample without top_k, top_p, min_p, penalties, biases and min_new_tokens")
        elif temperature is not None and (drawn := _other_temperature(sample, temperature)) is not None:
            wrong = ("temperature", drawn, f"the trainer's is {temperature}", "sample at the trainer's temperature")
        if wrong is not None:
            name, value, limit, remedy = wrong
            raise InvalidBatch(f"episode {index} has {name} {value}", field=name, value=value, limit=limit, remedy=remedy)


def _other_temperature(sample: TrainingSample, temperature: float) -> float | None:
    """Return a temperature of a turn that is another one; 0 is, although greedy turns carry log-probabilities at 1."""
    return next((float(turn.temperature) for turn in sample.turns if not np.isclose(turn.temperature, temperature)), None)


def _row(sample: TrainingSample) -> dict[str, Any]:
    first = int(np.argmax(sample.mask))
    drawn = sample.mask[first:]
    return {
        "prompt_ids": sample.ids[:first].tolist(),
        "completion_ids": sample.ids[first:].tolist(),
        "logprobs": np.where(drawn, sample.logprobs[first:], 0.0).tolist(),
        "env_mask": drawn.astype(int).tolist(),
        REWARD: sample.reward,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """One row as AsyncGRPOTrainer takes it from the queue.

    Shapes: `input_ids` int64 [n], `completion_mask` int64 [n], `old_log_probs` float32 [n]. `prompt` and `completion` are messages
    for traces, which episodes do not keep. `enqueued_at` is `time.time()`.
    """

    input_ids: np.ndarray
    completion_mask: np.ndarray
    old_log_probs: np.ndarray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float] = field(default_factory=dict)
    prompt: tuple[Any, ...] = ()
    completion: tuple[Any, ...] = ()
    enqueued_at: float | None = None


@checks_names(InvalidOption, OTHER_OPTIONS)
class EpisodeWorker:
    """A `rollout_worker` for AsyncGRPOTrainer that takes finished groups of a `RolloutSource`.

    A row's `model_version` is the trainer's number of the sync that brought the weights of its oldest sampled token, and
    `old_log_probs` are those of the distribution that it was drawn from. That trainer takes its own over the whole vocabulary, so
    rows with filtered tokens end the worker (InvalidBatch). `queue_size` bounds the rows that wait; beyond, the
    source waits, and `max_staleness` of source and trainer drop what grew old. `check_health`, which the trainer calls while
    it waits, is a safe point: a service that lost its weights gets them back there.
    """

    def __init__(self, source: RolloutSource[Any], push: WeightPush, *, queue_size: int = 1024) -> None:
        self.rollout_buffer: queue.Queue[ScoredRow] = queue.Queue(queue_size)
        # The trainer reads it; what the worker measures is in the rows.
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._source, self._push = source, push
        self._syncs: dict[int, int] = {push.version: 0}
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._last_row = time.monotonic()

    def start(self) -> None:
        """Begin to play and to fill the queue. Does nothing when called again."""
        if self._thread is None:
            self._last_row = time.monotonic()
            self._thread = threading.Thread(target=self._fill, name="episode-worker", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the source and the thread. Blocks: a moment. Does nothing when called again."""
        self._stopping.set()
        self._source.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Note that the weights pushed last are the trainer's `model_version`."""
        self._syncs[self._push.version] = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Give lost weights back; raise what ended the worker, or that nothing came for so long. Raises: RolloutShortfall."""
        if self._error is not None:
            told = RolloutShortfall("the episode worker ended", failures={}, limit=repr(self._error), remedy="mend that, then start again")
            raise told from self._error
        self._push.push_if_needed()
        quiet_s = time.monotonic() - self._last_row
        if self._thread is not None and quiet_s > stale_after_s:
            stats = self._source.stats()
            raise RolloutShortfall(
                f"no row came for {quiet_s:.0f} s",
                failures=stats.failures,
                limit=f"stale_after_s={stale_after_s:g}; {stats.in_flight} groups are in flight",
                remedy="look at the source's stats(), or raise the trainer's limit",
            )

    def _fill(self) -> None:
        try:
            while not self._stopping.is_set():
                for group in self._source.next(1):
                    for row in self._rows(group.index, group.samples):
                        self._put(row)
        except SourceClosed:
            pass
        except Exception as error:  # Told to the trainer by check_health, in its own thread.
            self._error = error

    def _put(self, row: ScoredRow) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                self.rollout_buffer.put(row, timeout=0.1)
                self._last_row = time.monotonic()
                return

    def _rows(self, group_id: int, samples: Sequence[TrainingSample]) -> Iterator[ScoredRow]:
        for sample, advantage in zip(samples, sample_advantages(samples)):
            oldest = sample.oldest_version
            if not sample.is_trainable or oldest is None:
                continue
            if sample.filtered_mask().any():
                raise InvalidBatch(
                    f"group {group_id} has tokens drawn through top-k, top-p or min-p",
                    field="sampling",
                    value="filtered",
                    limit="AsyncGRPOTrainer weighs tokens by the whole distribution, and every ratio would be that of the mass left out",
                    remedy="sample without top_k, top_p and min_p",
                )
            drawn = sample.logprobs if sample.behaviour_logprobs is None else sample.behaviour_logprobs
            # Weights of before the first sync, or another trainer's, are older than any of this one's.
            version = max((sync for served, sync in self._syncs.items() if served <= oldest), default=-1)
            yield ScoredRow(
                input_ids=sample.ids.astype(np.int64),
                completion_mask=sample.mask.astype(np.int64),
                old_log_probs=np.where(sample.mask, drawn, 0.0).astype(np.float32),
                advantage=float(advantage),
                model_version=version,
                group_id=group_id,
                enqueued_at=time.time(),
                metrics={"reward": float(sample.reward or 0.0), "sampled_tokens": float(sample.num_sampled)},
            )


@checks_names(InvalidOption, OTHER_OPTIONS)
class ServiceWeightTransfer:
    """A `weight_transfer` for AsyncGRPOTrainer, beside an `EpisodeWorker`.

    `send_weights` is one push: proven, published, or refused with the old weights serving on. Episodes go on meanwhile, so
    `pause` and `resume` have nothing to do; `canary`, `mode` and `drain_s` are those of `WeightPush.push`. That trainer changes its
    model's forward, so make canaries with a function (or a WeightPush without a model, which proves by digests alone).
    """

    def __init__(self, push: WeightPush, *, canary: CanaryFunction | None = None, mode: str = "inflight", drain_s: float = 60.0) -> None:
        check_hook(push)
        check_push_arguments(canary=canary, mode=mode, drain_s=drain_s)
        self._push, self._canary, self._mode, self._drain_s = push, canary, mode, drain_s

    def init_weight_transfer(self) -> None:
        """Nothing to set up: the push has its client."""

    def pause(self) -> None:
        """Only the commit pauses."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Push the trainer's tensors. Blocks: until the version is published. Raises: as `WeightPush.push`."""
        self._push.push(iterator, canary=self._canary, mode=self._mode, drain_s=self._drain_s)

    def resume(self) -> None:
        """Only the commit pauses."""

    def destroy(self) -> None:
        """Nothing is held."""
