"""Let a small real model repair Python functions in a sandbox, and train it if asked: `python -m examples.agentic.coding.train`.

    SmolLM2 (or --model) -> service -> groups of episodes: broken function, reply, verdict of the sandbox, ... -> figures, transcripts
                               ^------ with --steps N: policy gradient, then a push of the weights -------------'

The sandbox is found before anything else starts; where there is none, the run is refused with what would help.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import rollout
from examples.agentic.calculator.train import learn, write_transcripts
from examples.agentic.coding.env import CodeRepair
from examples.agentic.coding.sandbox import Sandbox, SandboxUnavailable, find_sandbox
from examples.agentic.gguf_checkpoint import ModelSourceError
from examples.agentic.script import add_model_options, add_options, end_on_sigterm, model_folder, show, trainer_of
from rollout.agent import ChatFormat, EpisodeGroup, EpisodeLimits, EpisodeStatistics, GroupResult, TurnSampling, run_groups

MAX_REPLY_TOKENS = 96
FIRST_TRAINING_SEED = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What decides a run: groups of `members` episodes that share a task, played once, then `steps` times for training."""

    groups: int = 4
    members: int = 4
    concurrency: int = 8
    temperature: float = 0.7
    seed: int = 0
    steps: int = 0
    lr: float = 3e-6
    threads: int = 1
    unsandboxed: bool = False
    model: Path | None = None
    gguf: Path | None = None
    json: bool = False


class Workshop:
    """Where episodes are played: the client, the chat format and the sandbox, which all episodes share."""

    def __init__(self, client: rollout.Client, sandbox: Sandbox, options: Options):
        self._client, self._sandbox, self._options = client.aio, sandbox, options
        self._info = client.info()
        self._format = asyncio.run(ChatFormat.of(client.aio))

    def play(self, first_seed: int, on_group: Callable[[GroupResult], None] | None = None) -> list[GroupResult]:
        """Play the groups of consecutive seeds. Blocks: until all have ended."""
        options = self._options
        groups = [
            EpisodeGroup(make_environment=lambda: CodeRepair(self._sandbox), members=options.members, seed=seed, group=seed)
            for seed in range(first_seed, first_seed + options.groups)
        ]
        return asyncio.run(
            run_groups(
                self._client,
                groups,
                concurrency=options.concurrency,
                format=self._format,
                info=self._info,
                sampling=TurnSampling(temperature=options.temperature),
                limits=EpisodeLimits(max_new_tokens=MAX_REPLY_TOKENS),
                on_group=on_group,
            )
        )


def figures(groups: Sequence[GroupResult], seconds: float) -> dict[str, Any]:
    """Return what some groups came to."""
    results = [result for group in groups for result in group.results]
    statistics = EpisodeStatistics.of(results)
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "episodes": len(results),
        "failed_episodes": statistics.failed,
        "mean_reward": round(sum(rewards) / len(rewards), 4) if rewards else None,
        "repaired_share": round(sum(reward > 0.5 for reward in rewards) / len(rewards), 4) if rewards else None,
        "mean_tokens": round(statistics.mean_kept_tokens, 1),
        "cached_share": round(statistics.cached_share, 4),
        "episodes_per_s": round(len(results) / seconds, 3),
    }


def train(client: rollout.Client, workshop: Workshop, options: Options, folder: Path, out: TextIO) -> dict[str, Any]:
    """Take the optimizer steps, each on episodes that the weights before it played; return their figures."""
    from trainer_bridge import WeightPush

    model, optimizer = trainer_of(folder, lr=options.lr, threads=options.threads, seed=options.seed)
    push = WeightPush(client, model)
    rewards = []
    for step in range(1, options.steps + 1):
        started = time.monotonic()
        groups = workshop.play(FIRST_TRAINING_SEED + (step - 1) * options.groups)
        rewards.append(figures(groups, time.monotonic() - started)["mean_reward"])
        gap = learn(model, optimizer, [result for group in groups for result in group.results], push.version)
        said = "no group had different rewards: nothing learnt"
        if gap is not None:
            said = f"version {push.push(trainer_step=step).version}, max logprob gap {gap:.1e}"
        print(f"step {step}/{options.steps}: reward {rewards[-1]}, {said}, {time.monotonic() - started:.0f} s", file=out, flush=True)
    return {"step_rewards": rewards, "version": push.version}


def run(options: Options, out: TextIO) -> dict[str, Any]:
    """Play, show, train if asked, and return the figures. Raises: SandboxUnavailable, ModelSourceError, RolloutError."""
    started = time.monotonic()
    sandbox = asyncio.run(find_sandbox(unsandboxed=options.unsandboxed))
    folder = model_folder(options.model, options.gguf, out)
    print(f"sandbox {sandbox.name}, model {folder.name}: starting the service", file=out, flush=True)
    with rollout.local(str(folder), device="cpu", dtype="float32", threads=options.threads, max_rows=options.concurrency) as client:
        workshop = Workshop(client, sandbox, options)
        playing = time.monotonic()
        print(f"playing {options.groups} groups of {options.members} episodes", file=out, flush=True)

        def told(group: GroupResult) -> None:
            print(f"a group has ended: mean reward {group.mean_reward:.2f}, {time.monotonic() - playing:.0f} s", file=out, flush=True)

        groups = workshop.play(options.seed * options.groups, told)
        facts = {"model": folder.name, "sandbox": sandbox.name, **figures(groups, time.monotonic() - playing)}
        write_transcripts([result for group in groups for result in group.results], 1, out)
        if options.steps:
            facts |= train(client, workshop, options, folder, out)
    return facts | {"seconds": round(time.monotonic() - started, 2)}


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.agentic.coding.train", description=(__doc__ or "").splitlines()[0])
    numbers = {
        "groups": "tasks to play, and tasks of each optimizer step",
        "members": "episodes of each task",
        "concurrency": "episodes played at once",
        "temperature": "sampling temperature",
        "seed": "decides tasks and draws",
        "steps": "optimizer steps after the episodes; 0 trains nothing",
        "lr": "learning rate of AdamW",
        "threads": "threads of the engine and of the trainer",
    }
    add_options(parser, Options(), numbers)
    parser.add_argument("--unsandboxed", action="store_true", help="run model-written code as yourself, where no sandbox works")
    add_model_options(parser)
    options = Options(**vars(parser.parse_args(arguments)))
    for name, value in asdict(options).items():
        least = {"groups": 1, "members": 1, "concurrency": 1, "threads": 1, "steps": 0, "seed": 0, "temperature": 0}.get(name)
        if least is not None and value < least:
            parser.error(f"--{name} is {value}; it must be at least {least}")
    if options.steps and options.members < 2:
        parser.error("--members is 1; training compares episodes of one task, so it must be at least 2")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Play, train if asked, and show what came of it."""
    end_on_sigterm()
    options = parse_options(arguments)
    show(lambda out: run(options, out), as_json=options.json, refusals=(SandboxUnavailable, ModelSourceError, rollout.RolloutError))


if __name__ == "__main__":
    main()
