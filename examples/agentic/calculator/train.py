"""Let a small real model use a calculator, and train it if asked: `python -m examples.agentic.calculator.train --episodes 8`.

    SmolLM2 (or --model) -> service -> concurrent episodes: question, tool call, result, answer, next question -> transcripts, figures
                               ^------ with --steps N: policy gradient on groups of episodes, then a push of the weights ------'

`play` is how episodes run side by side over one service; `learn` is one optimizer step on what they sampled. What an episode asks is in
`env.py`. Without `--steps` nothing is trained and no model is loaded here.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import rollout
from examples.agentic.calculator.env import NUM_QUESTIONS, Calculator, renders_tools
from examples.agentic.gguf_checkpoint import ModelSourceError
from examples.agentic.script import add_model_options, add_options, end_on_sigterm, model_folder, show, trainer_of
from rollout.agent import ChatFormat, EpisodeLimits, EpisodeResult, EpisodeTask, Progress, TurnSampling, group_tasks, run_episodes

MAX_REPLY_TOKENS = 64
TURNS_PER_QUESTION = 4
FIRST_TRAINING_SEED = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What decides a run. `episodes` is also how many are played for each optimizer step, in groups with the same questions."""

    episodes: int = 8
    questions: int = NUM_QUESTIONS
    concurrency: int = 16
    temperature: float = 0.3
    train_temperature: float = 0.8
    seed: int = 0
    steps: int = 0
    group_size: int = 4
    lr: float = 3e-6
    threads: int = 1
    model: Path | None = None
    gguf: Path | None = None
    json: bool = False


class Classroom:
    """Where episodes are played: the client, the chat format and what every episode of a run shares."""

    def __init__(self, client: rollout.Client, options: Options):
        self._client, self._options = client.aio, options
        self._info = client.info()
        self._format = asyncio.run(ChatFormat.of(client.aio))
        self._describe_tool = not renders_tools(self._format)

    def environment(self) -> Calculator:
        """Return a fresh episode's environment."""
        return Calculator(num_questions=self._options.questions, describe_tool=self._describe_tool)

    def play(
        self, tasks: Sequence[EpisodeTask], *, temperature: float, on_progress: Callable[[Progress], None] | None = None
    ) -> list[EpisodeResult]:
        """Play episodes side by side and return them in the order of the tasks. Blocks: until all have ended."""
        options = self._options
        return asyncio.run(
            run_episodes(
                self._client,
                tasks,
                concurrency=options.concurrency,
                format=self._format,
                info=self._info,
                sampling=TurnSampling(temperature=temperature),
                limits=EpisodeLimits(max_turns=TURNS_PER_QUESTION * options.questions, max_new_tokens=MAX_REPLY_TOKENS, max_bad_turns=2),
                on_progress=on_progress,
            )
        )

    def tasks(self) -> list[EpisodeTask]:
        """Return the episodes of a run: different questions each, the same ones for equal seeds."""
        first = self._options.seed * self._options.episodes
        return [EpisodeTask(make_environment=self.environment, seed=first + number) for number in range(self._options.episodes)]

    def training_tasks(self, step: int) -> list[EpisodeTask]:
        """Return the episodes of one optimizer step, in groups that share their questions; none is one of `tasks`."""
        groups = self._options.episodes // self._options.group_size
        first = FIRST_TRAINING_SEED * (1 + self._options.seed) + (step - 1) * groups
        return [
            task
            for group in range(groups)
            for task in group_tasks(self.environment, seed=first + group, members=self._options.group_size, group=first + group)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a number of episodes came to. `tokens` were sampled; `cached_share` is the share of prompt tokens from the prefix cache."""

    episodes: int
    failed_episodes: int
    turns: int
    tool_calls_parsed: int
    tool_calls_failed: int
    tokens: int
    tokens_per_s: float
    cached_share: float
    mean_reward: float | None

    @classmethod
    def of(cls, results: Sequence[EpisodeResult], seconds: float) -> Figures:
        """Add up results that took `seconds` of wall time; episodes that broke count in no mean."""
        turns = [turn for result in results for row in result.rows for turn in row.turns]
        rewards = [result.reward for result in results if result.reward is not None]
        tokens = sum(row.num_sampled for result in results for row in result.rows)
        prompt_tokens = sum(turn.prompt_tokens for turn in turns)
        return cls(
            episodes=len(results),
            failed_episodes=len(results) - len(rewards),
            turns=len(turns),
            tool_calls_parsed=sum(result.good_calls for result in results),
            tool_calls_failed=sum(result.bad_calls for result in results),
            tokens=tokens,
            tokens_per_s=round(tokens / seconds, 2),
            cached_share=round(sum(turn.cached_tokens for turn in turns) / prompt_tokens, 4) if prompt_tokens else 0.0,
            mean_reward=round(float(np.mean(rewards)), 4) if rewards else None,
        )


def write_transcripts(results: Sequence[EpisodeResult], num_opening: int, out: TextIO) -> None:
    """Write what was said in each episode, after the opening that all share."""
    if results and num_opening:
        print("--- every episode begins with", file=out)
        _write_messages(max((result.messages for result in results), key=len)[:num_opening], out)
    for number, result in enumerate(results):
        reward = "not scored" if result.reward is None else f"reward {result.reward:.2f}"
        cause = f" ({result.failure.text})" if result.failure else ""
        print(f"--- episode {number + 1}: {reward}, {result.status}{cause}", file=out)
        _write_messages(result.messages[num_opening:], out)
    print(file=out, flush=True)


def _write_messages(messages: Sequence[Mapping[str, Any]], out: TextIO) -> None:
    for message in messages:
        text = "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in message["content"])
        first, *others = text.splitlines() or [""]
        print(f"{message['role']:>10}  {first}", *(f"{'':>10}  {line}" for line in others), sep="\n", file=out)


def learn(model: Any, optimizer: Any, results: Sequence[EpisodeResult], version: int) -> float | None:
    """Take one policy-gradient step, one row at a time; return how far service and trainer disagreed on a log-probability before it.

    None: nothing was learnt, since every episode of a group had the same reward or failed.
    """
    import torch

    from trainer_bridge import LogprobGap, collate, logprob_gap, policy_loss, sample_advantages, samples_of, token_logprobs

    samples = [sample for result in results for sample in samples_of(result, group_id=result.task.group, member=result.task.member)]
    trained = [sample for sample in samples if sample.is_trainable]
    if not trained:
        return None
    advantages = sample_advantages(trained)
    if not advantages.any():
        return None
    num_tokens = sum(sample.num_sampled for sample in trained)
    gaps = []
    for sample, advantage in zip(trained, advantages):
        if not advantage:
            continue  # its gradient is zero, and a forward over its long opening is not
        batch = collate([sample], np.array([advantage]), version=version)
        new_logprobs = token_logprobs(model(input_ids=batch.ids_ST, use_cache=False).logits, batch)
        policy_loss(new_logprobs, batch, num_tokens=num_tokens).loss.backward()
        gaps.append(logprob_gap(new_logprobs, batch))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return LogprobGap.merged(gaps).max_exact


def train(client: rollout.Client, classroom: Classroom, options: Options, folder: Path, out: TextIO) -> dict[str, Any]:
    """Take the optimizer steps and return their figures; each step's episodes are played under the weights of the step before."""
    from trainer_bridge import WeightPush

    model, optimizer = trainer_of(folder, lr=options.lr, threads=options.threads, seed=options.seed)
    push = WeightPush(client, model)
    rewards, gaps = [], []
    for step in range(1, options.steps + 1):
        started = time.monotonic()
        results = classroom.play(classroom.training_tasks(step), temperature=options.train_temperature)
        figures = Figures.of(results, time.monotonic() - started)
        gap = learn(model, optimizer, results, push.version)
        rewards.append(figures.mean_reward)
        if gap is None:
            said = "no group had different rewards: nothing learnt"
        else:
            gaps.append(gap)
            report = push.push(trainer_step=step)
            said = f"version {report.version}, pause {report.pause_ms:.0f} ms, max logprob gap {gap:.1e}"
        print(
            f"step {step}/{options.steps}: reward {figures.mean_reward}, {said}, {time.monotonic() - started:.0f} s", file=out, flush=True
        )
    return {"step_rewards": rewards, "version": push.version, "max_logprob_gap": max(gaps) if gaps else None}


def run(options: Options, out: TextIO) -> dict[str, Any]:
    """Play, show, train if asked, and return the figures. Raises: ModelSourceError, RolloutError."""
    started = time.monotonic()
    folder = model_folder(options.model, options.gguf, out)
    print(f"model {folder.name}: starting the service", file=out, flush=True)
    with rollout.local(str(folder), device="cpu", dtype="float32", threads=options.threads, max_rows=options.concurrency) as client:
        classroom = Classroom(client, options)
        playing = time.monotonic()
        print(f"playing {options.episodes} episodes, at most {options.concurrency} at once", file=out, flush=True)

        def told(now: Progress) -> None:
            print(f"{now.finished} of {now.total} have ended: {now.sampled_tokens} tokens, {now.seconds:.0f} s", file=out, flush=True)

        results = classroom.play(classroom.tasks(), temperature=options.temperature, on_progress=told)
        figures = Figures.of(results, time.monotonic() - playing)
        write_transcripts(results, classroom.environment().num_opening, out)
        facts = {"model": folder.name, "seed": options.seed, "steps": options.steps}
        facts |= {name: getattr(figures, name) for name in Figures.__slots__}
        if options.steps:
            facts |= train(client, classroom, options, folder, out)
    return facts | {"seconds": round(time.monotonic() - started, 2)}


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.agentic.calculator.train", description=(__doc__ or "").splitlines()[0])
    numbers = {
        "episodes": "episodes to play, and episodes for each optimizer step",
        "questions": "questions in an episode",
        "concurrency": "episodes played at once",
        "temperature": "sampling temperature",
        "train_temperature": "sampling temperature of the episodes that are trained on",
        "seed": "decides questions and draws",
        "steps": "optimizer steps after the episodes; 0 trains nothing",
        "group_size": "episodes that share their questions while training",
        "lr": "learning rate of AdamW",
        "threads": "threads of the engine and of the trainer; more than one only helps where the cores are free",
    }
    add_options(parser, Options(), numbers)
    add_model_options(parser)
    options = Options(**vars(parser.parse_args(arguments)))
    for name in ("episodes", "questions", "concurrency", "threads", "group_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    for name in ("steps", "seed", "temperature", "train_temperature"):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must not be negative")
    if options.steps and (options.group_size < 2 or options.episodes % options.group_size):
        parser.error(f"--episodes {options.episodes} must be a multiple of --group-size {options.group_size}, which is at least 2")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Play, train if asked, and show what came of it."""
    end_on_sigterm()
    options = parse_options(arguments)
    show(lambda out: run(options, out), as_json=options.json, refusals=(ModelSourceError, rollout.RolloutError))


if __name__ == "__main__":
    main()
