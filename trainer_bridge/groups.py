"""What a group of episodes is: the task that starts it, the result that a trainer gets, the seeds of its members.

`source.RolloutSource` makes tasks and results; the user's `run_group` reads tasks. A group is named by its number (`index`),
never by its place in a list.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trainer_bridge.errors import InvalidOption, InvalidSample
from trainer_bridge.option_names import checks_names
from trainer_bridge.samples import SampleStatus, TrainingSample, as_samples

P = TypeVar("P")
_MASK64 = 2**64 - 1


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int, attempt: int = 0) -> int:
    """Return the 64-bit seed of part `index` in its given attempt; the engine derives group members in the same way."""
    return _splitmix64(_splitmix64((seed ^ _splitmix64(2**63 + index)) & _MASK64) ^ attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask(Generic[P]):
    """One group to run: `index` is the prompt's running number and the group's id, `attempt` counts earlier tries."""

    index: int
    prompt: P
    group_size: int
    seed: int
    attempt: int = 0

    def member_seed(self, member: int) -> int:
        """Return the seed of one member."""
        return derive_seed(self.seed, member)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup(Generic[P]):
    """A group as the trainer gets it; `staleness` counts versions from its oldest token to the one at take time."""

    index: int
    prompt: P
    samples: tuple[TrainingSample, ...]
    staleness: int
    attempt: int

    @property
    def mean_reward(self) -> float:
        """Return the mean reward of its trainable members, NaN without any; a member counts once however many rows it has."""
        rewards = {sample.member: sample.reward for sample in self.samples if sample.is_trainable and sample.reward is not None}
        return sum(rewards.values()) / len(rewards) if rewards else math.nan


def check_members(task: GroupTask[P], samples: Sequence[TrainingSample]) -> None:
    """Check that samples are of this group and of all of its members; a failed member has a failed sample.

    Members that were started beyond the group's size and let go may follow: cancelled, failed, or truncated with a reward of their own.
    A group without any sample passes: it has failed as a whole. Raises: InvalidSample.
    """
    strange = next((sample.group_id for sample in samples if sample.group_id != task.index), None)
    if strange is not None:
        raise InvalidSample(
            f"group {task.index} returned a sample of group {strange!r}",
            field="group_id",
            value=strange,
            limit="advantages are taken within a group, found by its id",
            remedy="make samples with group_id=task.index",
        )
    spare = (SampleStatus.CANCELLED, SampleStatus.FAILED, SampleStatus.TRUNCATED)
    members = {sample.member for sample in samples if sample.member < task.group_size or sample.status not in spare}
    wanted = set(range(task.group_size))
    if samples and members != wanted:
        lacking, foreign = sorted(wanted - members), sorted(members - wanted)
        raise InvalidSample(
            f"group {task.index} returned samples without members {lacking} and with foreign members {foreign}",
            field="member",
            value=foreign[0] if foreign else lacking[0],
            limit=f"exactly the members 0 to {task.group_size - 1} of group_size={task.group_size}",
            remedy="return at least one sample for each member, with status failed for one that broke",
        )


@checks_names(InvalidOption)
def each_member(
    run_episode: Callable[[GroupTask[P], int], Awaitable[TrainingSample | Sequence[TrainingSample]]],
) -> Callable[[GroupTask[P]], Awaitable[list[TrainingSample]]]:
    """Make a group runner out of an episode runner: all members at once, each called with the task and its number.

    An episode that forked returns several samples. An exception of one member fails the group and cancels the others; an
    episode runner that can tell a broken member apart returns a sample with status failed instead.
    """

    if not callable(run_episode):
        raise InvalidOption(
            f"run_episode is a {type(run_episode).__name__}",
            field="run_episode",
            value=type(run_episode).__name__,
            limit="an async function of a GroupTask and a member's number",
            remedy="pass the function itself: each_member(play)",
        )

    async def run_group(task: GroupTask[P]) -> list[TrainingSample]:
        async with asyncio.TaskGroup() as members:
            running = [members.create_task(played_samples("run_episode", run_episode(task, member))) for member in range(task.group_size)]
        return [sample for member in running for sample in member.result()]

    return run_group


async def played_samples(name: str, returned: Any) -> list[TrainingSample]:
    """Return the samples that a user's function, called `name`, has once its answer is awaited.

    Raises: InvalidOption for a function that is not async, InvalidSample for an answer without samples; what the function raises.
    """
    if not inspect.isawaitable(returned):
        raise InvalidOption(
            f"{name} returned a {type(returned).__name__}, which cannot be awaited",
            field=name,
            value=type(returned).__name__,
            limit="a function that plays is async",
            remedy="write `async def`, and await run_episode(...) or run_group(...) in it",
        )
    return as_samples(name, await returned, what=f"what {name} returned")
