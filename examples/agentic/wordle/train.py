"""Train a tiny model at a word-guessing game: `python -m examples.agentic.wordle.train`.

    warm-up: a careless player -> service -> groups of games -> loss, optimizer step -> push -> the next groups, under the new weights

The embedded model first learns to write words of the list from games of a player who heeds few of the answers; then it plays, groups
of games about one word each, and learns from the rewards alone to heed them. `train` is the loop to copy.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

import rollout
from examples.agentic.script import add_options, end_on_sigterm, show
from examples.agentic.tictactoe.train import learn
from examples.agentic.tiny_model import MODEL_DIR
from examples.agentic.tiny_model.vocabulary import write_tokenizer
from examples.agentic.wordle.env import LENGTH, WORDS, Wordle
from examples.agentic.wordle.reward import Rates, held_out_seeds
from examples.agentic.wordle.warm_up import warm_up
from rollout.agent import ChatFormat, EpisodeGroup, EpisodeLimits, EpisodeTask, TurnSampling, run_episodes, run_group
from trainer_bridge import GroupTask, RolloutSource, TrainingSample, WeightPush, samples_of_group

MAX_GUESS_TOKENS = LENGTH + 3
CONCURRENT_HELD_OUT_GAMES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What decides a run: `words` of the list and `guesses` at one of them; `groups` of `members` games for each of the `steps`."""

    words: int = 12
    guesses: int = 3
    warm_steps: int = 120
    steps: int = 40
    groups: int = 16
    members: int = 16
    lr: float = 5e-4
    held_out: int = 240
    seed: int = 0
    json: bool = False


class GameTable:
    """Where games are played: the client and what every game of a run shares."""

    def __init__(self, client: rollout.Client, options: Options):
        self._client, self._options = client.aio, options
        self._words = WORDS[: options.words]
        format = asyncio.run(ChatFormat.of(client.aio))
        self._shared: dict[str, Any] = {
            "format": format,
            "info": client.info(),
            "sampling": TurnSampling(temperature=1.0),
            "limits": EpisodeLimits(max_new_tokens=MAX_GUESS_TOKENS),
        }

    def game(self) -> Wordle:
        """Return a fresh game."""
        return Wordle(self._words, self._options.guesses)

    async def play_group(self, task: GroupTask[int]) -> list[TrainingSample]:
        """Play one group for a `RolloutSource`: games about the same word."""
        group = EpisodeGroup(make_environment=self.game, members=task.group_size, seed=task.prompt, group=task.index, attempt=task.attempt)
        return samples_of_group(await run_group(self._client, group, **self._shared), group_id=task.index)

    def held_out(self) -> Rates:
        """Play the held-out games, each once, and return how they ended. Blocks. Raises: RuntimeError if one failed."""
        games: list[Wordle] = []

        def make() -> Wordle:
            games.append(self.game())
            return games[-1]

        tasks = [EpisodeTask(make_environment=make, seed=seed) for seed in held_out_seeds(self._options.held_out)]
        results = asyncio.run(run_episodes(self._client, tasks, concurrency=CONCURRENT_HELD_OUT_GAMES, **self._shared))
        failed = [result.failure.text for result in results if result.reward is None and result.failure]
        if failed:
            raise RuntimeError(f"{len(failed)} held-out games failed, first with {failed[0]}: there is no rate to report")
        return Rates.of(game.outcome for game in games if game.outcome)


def warmed_model(options: Options, folder: Path, out: TextIO) -> Any:
    """Return the embedded model after its warm-up, and leave it in `folder` for the service."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, local_files_only=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)

    def told(step: int, loss: float) -> None:
        if step % 20 == 0 or step == options.warm_steps:
            print(f"warm-up {step}/{options.warm_steps}: loss {loss:.3f}", file=out, flush=True)

    warm_up(model, tokenizer, WORDS[: options.words], options.guesses, steps=options.warm_steps, seed=options.seed, on_step=told)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def train(client: rollout.Client, model: Any, options: Options, out: TextIO) -> dict[str, Any]:
    """Measure, take the steps, measure again; return the figures. Mutates: the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    table, push = GameTable(client, options), WeightPush(client, model)
    print(f"playing {options.held_out} games that no step plays", file=out, flush=True)
    before = table.held_out()
    print(f"before: {before.found:.1%} found, {before.no_word:.1%} no word", file=out, flush=True)
    seeds = [(options.seed << 32) + number for number in range(options.steps * options.groups)]
    rewards, gaps = [], []
    with RolloutSource(
        seeds,
        table.play_group,
        group_size=options.members,
        push=push,
        max_staleness=1,
        max_ahead=options.groups,
        fresh_groups=max(1, options.groups // 8),
    ) as source:
        for step in range(1, options.steps + 1):
            started = time.monotonic()
            groups = source.next(options.groups)
            gap = learn(model, optimizer, [sample for group in groups for sample in group.samples], push.version)
            report = push.push(trainer_step=step)
            rewards.append(round(float(np.mean([group.mean_reward for group in groups])), 4))
            gaps.append(gap.max_exact)
            print(
                f"step {step}/{options.steps}: reward {rewards[-1]:.3f}, version {report.version}, pause {report.pause_ms:.0f} ms, "
                f"max logprob gap {gap.max_exact:.1e}, {time.monotonic() - started:.1f} s",
                file=out,
                flush=True,
            )
    print("playing them again", file=out, flush=True)
    after = table.held_out()
    return {
        "found_first": round(before.found, 4),
        "found_last": round(after.found, 4),
        "no_word_first": round(before.no_word, 4),
        "no_word_last": round(after.no_word, 4),
        "step_rewards": rewards,
        "max_logprob_gap": max(gaps),
        "version": push.version,
    }


def run(options: Options, out: TextIO) -> dict[str, Any]:
    """Warm up, train, and return the figures."""
    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="areno-wordle-") as folder:
        model = warmed_model(options, Path(folder), out)
        with rollout.local(folder, device="cpu", dtype="float32", threads=1, max_rows=64) as client:
            facts = train(client, model, options, out)
    settings = {name: value for name, value in asdict(options).items() if name != "json"}
    return {**settings, **facts, "seconds": round(time.monotonic() - started, 1)}


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.agentic.wordle.train", description=(__doc__ or "").splitlines()[0])
    about = {
        "words": f"words of the list that are played with, of {len(WORDS)}",
        "guesses": "guesses in a game",
        "warm_steps": "steps of the warm-up",
        "steps": "optimizer steps of the reinforcement learning",
        "groups": "groups of games for each step",
        "members": "games of a group, all about one word",
        "lr": "learning rate of AdamW",
        "held_out": "games that measure before and after",
        "seed": "decides words and draws",
    }
    add_options(parser, Options(), about)
    options = Options(**vars(parser.parse_args(arguments)))
    ranges = {"words": (2, len(WORDS)), "guesses": (1, 20), "warm_steps": (1, None), "steps": (1, None), "groups": (1, 2**31)}
    ranges |= {"members": (2, None), "held_out": (1, None), "seed": (0, 2**15)}
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if value < least or (most is not None and value > most):
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}" + (f" and at most {most}" if most else ""))
    return options


def outcome(facts: Mapping[str, Any]) -> str:
    """Return what a run came to in a sentence."""
    return f"words found: {facts['found_first']:.1%} -> {facts['found_last']:.1%} in {facts['seconds']:.0f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and show what came of it."""
    end_on_sigterm()
    options = parse_options(arguments)
    show(lambda out: run(options, out), as_json=options.json, text=outcome)


if __name__ == "__main__":
    main()
