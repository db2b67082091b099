"""Train a tiny model at tic-tac-toe: `python -m examples.agentic.tictactoe.train`.

    RolloutSource (own thread): games through the client --> groups --> loss, optimizer step --> WeightPush --> next version
                                       ^------------------ service: front and engine host processes -----------'

The script starts the service with the embedded model, plays many games at once against a seeded random opponent, takes one
policy-gradient step after another and pushes the weights after each while the next games go on. `train` is the loop to copy;
what a run shows is in `report.py`. One thread each for trainer and engine: a run fits two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import rollout
from examples.agentic.tictactoe.env import TicTacToe
from examples.agentic.tictactoe.interrupts import Interrupted, Interrupts
from examples.agentic.tictactoe.options import MICRO_BATCHES, Options, parse_options
from examples.agentic.tictactoe.report import HeldOut, LiveReport, Run, StepRecord, show, write_files
from examples.agentic.tictactoe.reward import WinRate, held_out_seeds, training_seed
from rollout.agent import ChatFormat, EpisodeLimits, EpisodeTask, TurnSampling, run_episode
from trainer_bridge import (
    Batch,
    GroupTask,
    LogprobGap,
    PushReport,
    RolloutGroup,
    RolloutSource,
    TrainingSample,
    WeightPush,
    collate,
    each_member,
    logprob_gap,
    policy_loss,
    sample_advantages,
    samples_of,
    token_logprobs,
)

MAX_ANSWER_TOKENS = 4
CONCURRENT_HELD_OUT_GAMES = 64


class GameTable:
    """Where games are played: the client and what every game of a run shares."""

    def __init__(self, client: rollout.Client):
        self._client = client.aio
        self._info = client.info()
        self._format = asyncio.run(ChatFormat.of(client.aio))

    async def play(self, seed: int, *, group: int, member: int, attempt: int = 0) -> list[TrainingSample]:
        """Play one game to its end. Members of a group meet the same opponent and draw their own tokens."""
        game = TicTacToe()
        result = await run_episode(
            self._client,
            EpisodeTask(make_environment=lambda: game, seed=seed, member=member, attempt=attempt),
            format=self._format,
            info=self._info,
            sampling=TurnSampling(temperature=1.0),
            limits=EpisodeLimits(max_new_tokens=MAX_ANSWER_TOKENS),
        )
        turns = [turn for row in result.rows for turn in row.turns]
        facts = {
            "outcome": game.outcome,
            "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
            "cached_tokens": sum(turn.cached_tokens for turn in turns),
        }
        return samples_of(result, group_id=group, member=member, info=facts)

    async def play_for_training(self, task: GroupTask[int], member: int) -> list[TrainingSample]:
        """Play one member of a group for a `RolloutSource`."""
        return await self.play(task.prompt, group=task.index, member=member, attempt=task.attempt)

    def play_held_out(self, games: int) -> list[TrainingSample]:
        """Play the held-out games, which no training step plays, each once. Blocks: until all have ended."""
        free = asyncio.Semaphore(CONCURRENT_HELD_OUT_GAMES)

        async def one(seed: int) -> list[TrainingSample]:
            async with free:
                return await self.play(seed, group=seed, member=0)

        async def all_games() -> list[list[TrainingSample]]:
            return await asyncio.gather(*(one(seed) for seed in held_out_seeds(games)))

        return [sample for samples in asyncio.run(all_games()) for sample in samples]


def forward(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the trainer's log-probability of each sampled token. Shapes: [S, T]."""
    # Padding lies to the right, where no token looks: the causal mask alone is right, and faster than an attention mask.
    return token_logprobs(model(input_ids=batch.ids_ST, use_cache=False).logits, batch)


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: Sequence[TrainingSample], version: int) -> LogprobGap:
    """Take one policy-gradient step, in micro-batches of games of like length; return the log-probability gap before it."""
    trained = sorted((sample for sample in samples if sample.is_trainable), key=len)
    advantages = sample_advantages(trained)
    num_tokens = sum(sample.num_sampled for sample in trained)
    gaps = []
    for part in np.array_split(np.arange(len(trained)), MICRO_BATCHES):
        batch = collate([trained[place] for place in part], advantages[part], version=version)
        new_logprobs = forward(model, batch)
        policy_loss(new_logprobs, batch, num_tokens=num_tokens).loss.backward()
        gaps.append(logprob_gap(new_logprobs, batch))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return LogprobGap.merged(gaps)


def train(options: Options, run: Run, live: LiveReport, interrupts: Interrupts) -> None:
    """Run the demo: held-out games, training steps, held-out games. Mutates: `run`. Raises: Interrupted."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    groups = options.episodes // options.group_size
    seeds = [training_seed(options.seed, step, group) for step in range(options.steps) for group in range(groups)]
    live.phase("starting the service")
    interrupts.arm()
    with rollout.local(str(options.model), device="cpu", dtype="float32", threads=1, max_rows=64) as client, interrupts.until_here():
        table = GameTable(client)
        push = WeightPush(client, model)
        run.initial_version = push.version
        live.phase(f"playing {options.held_out} held-out games with the shipped weights")
        held_out = table.play_held_out(options.held_out)
        run.add_held_out(measure(model, held_out, push.version), held_out)
        live.phase("training")
        with RolloutSource(
            seeds,
            each_member(table.play_for_training),
            group_size=options.group_size,
            push=push,
            max_staleness=options.max_staleness,
            max_ahead=max(1, options.max_staleness) * groups,
            fresh_groups=max(1, groups // 8),
        ) as source:
            for step in range(1, options.steps + 1):
                step_started = time.monotonic()
                taken = source.next(groups)
                samples = [sample for group in taken for sample in group.samples]
                gap = learn(model, optimizer, samples, push.version)
                report = push.push(trainer_step=step)
                live.add(run.add(record(step, taken, gap, report, time.monotonic() - step_started), samples))
        live.phase(f"playing {options.held_out} held-out games with the final weights")
        held_out = table.play_held_out(options.held_out)
        run.add_held_out(measure(model, held_out, push.version), held_out)


def measure(model: torch.nn.Module, samples: Sequence[TrainingSample], version: int) -> HeldOut:
    """Return how held-out games ended and how far the trainer's log-probabilities of their tokens are from the service's.

    Raises: RuntimeError when a game failed, since a win rate over fewer games would be another one.
    """
    failed = [sample.info.get("cause", str(sample.status)) for sample in samples if not sample.is_trainable]
    if failed:
        raise RuntimeError(f"{len(failed)} held-out games failed, first by {failed[0]}: there is no win rate to report")
    with torch.no_grad():
        batch = collate(samples, np.zeros(len(samples)), version=version)
        gap = logprob_gap(forward(model, batch), batch)
    return HeldOut(version=version, rates=WinRate.of(sample.info["outcome"] for sample in samples), gap=gap)


def record(step: int, groups: Sequence[RolloutGroup[int]], gap: LogprobGap, report: PushReport, seconds: float) -> StepRecord:
    """Return what the report shows of a step."""
    samples = [sample for group in groups for sample in group.samples if sample.is_trainable]
    rates = WinRate.of(sample.info["outcome"] for sample in samples)
    return StepRecord(
        step=step,
        reward=float(np.mean([sample.reward for sample in samples])),
        win_rate=rates.win,
        illegal_rate=rates.illegal,
        tokens=sum(sample.num_sampled for sample in samples),
        seconds=seconds,
        cached_share=sum(sample.info["cached_tokens"] for sample in samples) / sum(sample.info["prompt_tokens"] for sample in samples),
        version=report.version,
        staleness=float(np.mean([group.staleness for group in groups])),
        push=report,
        max_logprob_gap=gap.max_exact,
        gap_tokens=gap.num_exact,
        mean_abs_log_ratio=gap.mean_other,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then show what came of it; a run that is interrupted shows the steps that it finished."""
    interrupts, started = Interrupts(), time.monotonic()
    torch.set_num_threads(1)
    disable_progress_bar()
    options = parse_options(arguments)
    run = Run(seed=options.seed, steps=options.steps, tokenizer=Tokenizer.from_file(str(options.model / "tokenizer.json")))
    live = LiveReport(options.steps, quiet=options.json)
    # The interruption ends here, after the `with` blocks inside `train` have ended the service.
    with contextlib.suppress(Interrupted), live:
        train(options, run, live, interrupts)
    run.seconds = time.monotonic() - started
    if run.rows:
        show(live.console, run, write_files(run, options.out, live.console))
        if options.json:
            print(json.dumps(run.summary()), flush=True)
    else:
        live.console.print("stopped before the first step was finished: there is nothing to write")
    sys.exit(interrupts.exit_code)


if __name__ == "__main__":
    main()
