"""One episode: a conversation with a policy whose token record is exact.

    prompt -> act -> observe -> act -> ... -> finish          rows() at any time

An `Episode` owns its token record, its conversation and its standing; nobody else writes them. It sends ids and keeps the ids that
come back: the next prompt is always the row so far, never a text encoded again. It talks to a service through the five calls of
`PolicyClient` and holds no connection of its own. Invariant: every sampled token is in exactly one row, with the log-probability
and the weights' version that the service reported, and an episode that ended stays as it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Protocol

import numpy as np

from rollout.agent.chat import ChatFormat, Message
from rollout.agent.conversation import Conversation
from rollout.agent.errors import EpisodeStateError, InvalidEpisode
from rollout.agent.given import as_messages, checked_ids, checked_seed, num_characters
from rollout.agent.limits import EpisodeLimits, Limit, total_tokens
from rollout.agent.lineage import Branch, BranchKind, Lineage
from rollout.agent.option_values import check_client, check_kind
from rollout.agent.record import Draw, EpisodeRow, GenerationLike, TokenRecord, TurnRecord
from rollout.agent.standing import EpisodeStatus, Standing
from rollout.agent.tools import BadCall, CallCounts, Tool, ToolBox, ToolCall, ToolResult
from rollout.agent.turn import DEFAULT_MAX_NEW_TOKENS, Turn, TurnSampling
from rollout.option_names import checks_names
from rollout.seeds import derive_seed

CANCEL_WAIT_S = 2.0
POLL_S = 0.005


class PolicyClient(Protocol):
    """What an episode needs of a client."""

    async def generate(self, prompt_ids: np.ndarray, **options: Any) -> Any:
        """Sample a continuation of ids."""
        ...

    async def cancel(self, request_id: bytes) -> Any:
        """End a request; what it sampled comes back from `generate`."""
        ...

    def tool_wait(self, lineage: str, expect_s: float, *, cache_salt: str | None = None) -> None:
        """Say when a lineage's next request is expected."""
        ...

    async def info(self) -> Any:
        """Return the service's limits and digests."""
        ...

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name."""
        ...


@checks_names(InvalidEpisode)
class Episode:
    """A multi-turn rollout. Make it with `open`, or directly where info and format are at hand already.

    Starts from exactly one of `messages` (rendered with the model's template), `text` (plain: control tokens stay text, a start
    token is added once if the tokenizer adds one), `rendered` (text that a template rendered: taken as it is) and `prompt_ids`
    (untouched). With `parent`, which `subagent` passes, its rows belong to that episode's tree. Its calls that reach the service are
    awaited (`act`, `run_tools`, `cancel`), also for an episode that a blocking client made. `async with` finishes a running episode at
    the block's end, and cancels it if the block raised.
    Raises: InvalidEpisode, TokenizerMismatch, ChatFormatError.
    """

    __slots__ = (
        "_cancelling",
        "_children",
        "_client",
        "_conversation",
        "_eos_ids",
        "_format",
        "_info",
        "_options",
        "_record",
        "_sampling",
        "_standing",
        "_tools",
        "_tree",
        "call_counts",
        "lineage",
        "seed",
    )

    def __init__(
        self,
        client: PolicyClient,
        *,
        info: Any,
        format: ChatFormat | None = None,
        messages: Sequence[Message] | None = None,
        text: str | None = None,
        rendered: str | None = None,
        prompt_ids: Sequence[int] | np.ndarray | None = None,
        tools: ToolBox | Iterable[Tool | Callable[..., Any]] = (),
        seed: int | None = None,
        sampling: TurnSampling | None = None,
        limits: EpisodeLimits | None = None,
        lineage: str | None = None,
        cache_salt: str | None = None,
        kv_policy: str = "keep",
        max_kv_lag: int = 4,
        parent: Episode | None = None,
    ):
        check_client(client)
        check_kind("sampling", sampling, TurnSampling, absent=True)
        check_kind("limits", limits, EpisodeLimits, absent=True)
        starts = {"messages": messages, "text": text, "rendered": rendered, "prompt_ids": prompt_ids}
        given = {name for name, value in starts.items() if value is not None}
        if len(given) != 1:
            raise InvalidEpisode(
                f"the episode starts from {sorted(given) or 'nothing'}",
                field="messages",
                value=sorted(given),
                limit="exactly one of messages, text, rendered, prompt_ids",
                remedy="pass one of them",
            )
        if format is None and prompt_ids is None:
            raise InvalidEpisode(
                "there is no chat format", field="format", limit=f"{given.pop()} needs one", remedy="use Episode.open, or pass format="
            )
        if format is not None:
            format.check_served(info.tokenizer_digest)
        self._client, self._format, self._info = client, format, info
        self._tools = tools if isinstance(tools, ToolBox) else ToolBox(tools)
        self._sampling = sampling or TurnSampling()
        self.seed = secrets.randbits(64) if seed is None else checked_seed(seed)
        self.lineage = lineage or secrets.token_hex(16)
        self._options: dict[str, Any] = {
            "lineage": self.lineage,
            "cache_salt": cache_salt,
            "kv_policy": kv_policy,
            "max_kv_lag": max_kv_lag,
        }
        self._eos_ids = frozenset(getattr(info.engine, "eos_ids", ()))
        limits = limits or EpisodeLimits()
        self._standing = Standing(limits, *total_tokens(info.engine, limits))
        self._cancelling = False
        self.call_counts = CallCounts()
        self._children: list[Episode] = []
        self._tree: Lineage = parent._tree if parent is not None else Lineage()
        self._record: TokenRecord = TokenRecord(self._tree, parent=parent._record if parent is not None else None)
        self._conversation: Conversation | None = None
        length = len(text or rendered or "") if messages is None else num_characters(messages)
        if self._standing.takes_text(length):
            self._append(self._prompt(messages, text, rendered, prompt_ids))

    def _prompt(self, messages: Sequence[Message] | None, text: str | None, rendered: str | None, prompt_ids: Any) -> np.ndarray:
        if self._format is not None and messages is not None:
            self._conversation = Conversation(self._format, messages, self._tools.schemas)
            return self._conversation.start()
        if self._format is not None and text is not None:
            return self._format.text_ids(text)
        if self._format is not None and rendered is not None:
            return self._format.rendered_ids(rendered)
        return checked_ids(prompt_ids)

    @classmethod
    async def open(cls, client: PolicyClient, *, format: ChatFormat | None = None, info: Any = None, **options: Any) -> Episode:
        """Start an episode with what the service says about itself; pass `format` to load the tokenizer only once.

        Raises: as the constructor, and what the client raises.
        """
        check_client(client)
        if info is None:
            info = await client.info()
        if format is None and options.get("prompt_ids") is None:
            format = await ChatFormat.of(client)
        return cls(client, info=info, format=format, **options)

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        elif self.running:
            await self.cancel()
        await self.end_subagents()

    def __enter__(self) -> NoReturn:
        raise EpisodeStateError(
            "an episode was entered with `with`",
            field="episode",
            limit="its turns are awaited, whichever client made it",
            remedy="write `async with client.episode(...) as episode:` and `await episode.act()` in an async function; asyncio.run it",
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Be there for `with`, which looks for it before `__enter__` can tell what is wrong."""

    @property
    def running(self) -> bool:
        """Return whether the episode can go on."""
        return self._standing.running

    @property
    def status(self) -> EpisodeStatus:
        """Return how the episode stands."""
        return self._standing.status

    @property
    def limit(self) -> Limit | None:
        """Return which limit ended the episode, if one did."""
        return self._standing.limit

    @property
    def reason(self) -> str | None:
        """Return in words why the episode ended, where there is more to say than the status and the limit."""
        return self._standing.reason

    @property
    def num_turns(self) -> int:
        """Return how many turns were sampled."""
        return self._record.num_turns

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation so far; empty for an episode that did not start from messages."""
        return self._conversation.messages if self._conversation else []

    def current_ids(self) -> np.ndarray:
        """Return the ids of the current row, int32 [n]: the next prompt."""
        return self._record.current_ids()

    def rows(self) -> list[EpisodeRow]:
        """Return the rows to train on, in any state, those of retries, compactions and subagents with it; a subagent has its own only."""
        return self._record.rows() if self._record.is_branch else self._tree.rows()

    @property
    def branches(self) -> Sequence[Branch]:
        """Return how each row of the episode's tree began, in order; `EpisodeRow.branch` names a row's."""
        return self._tree.branches

    @property
    def tokens_left(self) -> int:
        """Return how many tokens the current row may still take, sampled or not."""
        return max(0, self._standing.context - self._record.length)

    def turns(self) -> list[TurnRecord]:
        """Return how each turn was drawn, in order."""
        return self._record.turns()

    async def act(self, **sampling: Any) -> Turn:
        """Sample the next turn; keyword arguments replace parts of the episode's `TurnSampling` for this turn.

        An error of the service leaves the record as it was, so the call may be made again. A cancelled task cancels the
        request. Raises: EpisodeStateError, InvalidEpisode, IncompleteGeneration; what the client raises.
        """
        self._standing.require(acting=True)
        plan = self._sampling.replaced(sampling)
        budget, shortened = self._standing.budget(plan.max_new_tokens, DEFAULT_MAX_NEW_TOKENS, length=self._record.length)
        seed = derive_seed(self.seed, self._record.num_turns) if plan.seed is None else plan.seed
        options = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        options.update(max_new_tokens=budget, min_new_tokens=min(plan.min_new_tokens, budget), seed=seed)
        self._standing.in_flight = options["request_id"] = secrets.token_bytes(16)
        try:
            generation = await self._client.generate(self._record.current_ids(), **options, **self._options)
        except asyncio.CancelledError:
            await self._give_up(options["request_id"])
            raise
        finally:
            self._standing.in_flight = None
        draw = Draw(temperature=plan.temperature, filtered=plan.filters, shaped=plan.shapes, forced_tokens=len(plan.forced_ids or ()))
        return self._take(generation, draw, shortened=shortened)

    async def _give_up(self, request_id: bytes) -> None:
        """Cancel a request whose waiter was cancelled; a service that does not answer holds it up for a moment only."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._client.cancel(request_id), CANCEL_WAIT_S)

    def _take(self, generation: GenerationLike, draw: Draw, *, shortened: bool) -> Turn:
        record = self._record.add_turn(generation, draw)
        ids = np.asarray(generation.ids, np.int32)
        end_id = self._end_id(record, ids)
        if self._conversation:
            text = self._conversation.add_reply(ids, end_id=end_id)
        else:
            text = self._format.decode(ids[:-1] if end_id is not None else ids) if self._format else ""
        good, bad = self._read_calls(text)
        limit = self._standing.settle(record.finish_kind, length=self._record.length, shortened=shortened)
        self._standing.count_bad(good, bad)
        if self._cancelling:
            self._standing.end(EpisodeStatus.CANCELLED)
        self._standing.awaits_act = False
        return Turn(
            index=record.index, ids=ids, text=text, tool_calls=good, bad_calls=bad, limit=limit, record=record, generation=generation
        )

    def _end_id(self, record: TurnRecord, ids: np.ndarray) -> int | None:
        """Return the last id of a turn if it ended the turn and is no part of its text."""
        ended = record.finish_kind == "stop" and record.stop_id is not None and len(ids) > 0 and int(ids[-1]) == record.stop_id
        end_of_turn = self._format.end_of_turn_id if self._format else None
        return record.stop_id if ended and (record.stop_id in self._eos_ids or record.stop_id == end_of_turn) else None

    def _read_calls(self, text: str) -> tuple[tuple[ToolCall, ...], tuple[BadCall, ...]]:
        if not len(self._tools):
            return (), ()
        shown = self._format
        good, bad = self._tools.read(text, form=shown.call_form, thinking=shown.opens_thinking) if shown else self._tools.read(text)
        self.call_counts.count(good, bad)
        return good, bad

    async def run_tools(self, turn: Turn) -> list[ToolResult]:
        """Run the turn's tool calls and return one result for each, bad ones included; pass them to `observe`. Raises: ToolFailed."""
        return await self._tools.run(turn.tool_calls, turn.bad_calls)

    def tool_wait(self, expect_s: float) -> None:
        """Say that the next turn is expected in about `expect_s` seconds, because a tool runs: the episode's KV then goes last.

        A hint: overdue by more than its own length it counts no more, and running requests always come first. Raises: InvalidRequest.
        """
        self._client.tool_wait(self.lineage, expect_s, cache_salt=self._options["cache_salt"])

    def observe(self, observation: str | Message | ToolResult | Sequence[Message | ToolResult]) -> bool:
        """Add what the environment says after a turn, as the template writes it, mask 0; return whether the episode goes on.

        A string is a user message. Where the next turn would break a limit, the episode ends as truncated and nothing is added;
        text of more than 32 characters for each token of the context counts as that without being encoded.
        Raises: EpisodeStateError, ChatFormatError, UntrustedControlToken.
        """
        self._standing.require(acting=False)
        if self._conversation is None:
            raise EpisodeStateError(
                "the episode did not start from messages",
                field="observation",
                limit="there is no conversation to add to",
                remedy="use observe_ids, or start from messages=",
            )
        given = as_messages(observation)
        if not (self._may_go_on() and self._standing.takes_text(num_characters(given))):
            return False
        added = self._conversation.extend(given)
        return self._append(added.ids, BranchKind.REWRITE if added.forks else None)

    def add_user(self, text: str) -> bool:
        """Add a user message after a turn; as `observe`."""
        return self.observe([{"role": "user", "content": text}])

    def observe_ids(self, ids: Sequence[int] | np.ndarray) -> bool:
        """Add environment ids as they are, for episodes that started from ids or text; as `observe`."""
        self._standing.require(acting=False)
        if self._conversation is not None:
            raise EpisodeStateError(
                "the episode started from messages", field="ids", limit="its template writes the environment's tokens", remedy="use observe"
            )
        return self._may_go_on() and self._append(checked_ids(ids, allow_empty=True))

    def retry(self) -> bool:
        """Take the last turn back, so that `act` draws it anew, with a seed of its own; return whether the episode goes on.

        What was drawn stays in its row, to be trained there; a new row begins with what the turn was drawn from. It counts as a turn.
        Raises: EpisodeStateError.
        """
        self._standing.require(acting=False)
        if not self._may_go_on():
            return False
        if self._conversation is not None:
            self._conversation.drop_reply()
        ids = self._record.current_ids()[: self._record.turns()[-1].start]
        return self._append(ids, BranchKind.RETRY)

    def compact(self, messages: Sequence[Message | Turn]) -> bool:
        """Go on from these messages instead of the history so far, in a new row; return whether the episode goes on.

        A `Turn` among them stands as the policy's message with the ids that were sampled; any other message is encoded as the template
        writes it. Raises: EpisodeStateError, ChatFormatError, UntrustedControlToken.
        """
        self._standing.require()
        if self._conversation is None or self._format is None:
            raise EpisodeStateError(
                "the episode did not start from messages",
                field="messages",
                limit="there is no conversation to replace",
                remedy="start it from messages=",
            )
        if not (self._may_go_on() and self._standing.takes_text(num_characters(messages))):
            return False
        conversation = Conversation(self._format, (), self._tools.schemas)
        for message in messages:
            if isinstance(message, Turn):
                conversation.add_reply(message.ids, end_id=self._end_id(message.record, message.ids))
            else:
                conversation.add_messages([message])
        ids = conversation.start()
        self._conversation = conversation
        return self._append(ids, BranchKind.COMPACTION)

    def subagent(self, **options: Any) -> Episode:
        """Return a new episode within this one's tree, of the same service; `options` are those of the constructor.

        Its rows are among this episode's `rows()` and get its reward. Sampling, limits, chat format and cache options are this
        episode's unless given; its seed is derived from this one's. Several may run at once; `cancel` of this one cancels them, and so
        does its end in `async with` and in a runner (`end_subagents`).
        Raises: as the constructor.
        """
        same = {
            "format": self._format,
            "sampling": self._sampling,
            "limits": self._standing.limits,
            "seed": derive_seed(self.seed, len(self._children), 1),
        }
        kept = {name: value for name, value in self._options.items() if name != "lineage"}
        child = Episode(self._client, info=self._info, parent=self, **{**same, **kept, **options})
        self._children.append(child)
        return child

    def _may_go_on(self) -> bool:
        return self._standing.may_go_on(self.num_turns)

    def _append(self, ids: np.ndarray, branch: BranchKind | None = None) -> bool:
        """Add environment ids to the row, or to a new row of that kind; return whether a turn still fits."""
        length = len(ids) + (self._record.length if branch is None else 0)
        if not self._standing.takes_row(length):
            return False
        if branch is None:
            self._record.add_environment(ids)
        else:
            self._record.fork(ids, branch)
        self._standing.awaits_act = True
        return True

    def finish(self) -> None:
        """End a running episode as done; one that ended already keeps its status."""
        self._standing.end(EpisodeStatus.DONE)

    def fail(self, reason: str) -> None:
        """End a running episode as failed, for reasons outside the policy."""
        self._standing.end(EpisodeStatus.FAILED, reason=reason)

    async def cancel(self) -> None:
        """End the episode and its subagents as cancelled. A running `act` returns what was sampled so far, and it stays in the record."""
        if self._children:
            await asyncio.gather(*(child.cancel() for child in self._children))
        request_id = self._standing.in_flight
        if request_id is None:
            self._standing.end(EpisodeStatus.CANCELLED)
        else:
            self._cancelling = True
            await self._client.cancel(request_id)

    @property
    def subagents(self) -> tuple[Episode, ...]:
        """Return the episodes that this one handed a part of its work to, running or not."""
        return tuple(self._children)

    async def end_subagents(self) -> None:
        """Cancel subagents that still run, and theirs, and wait for a bounded time until what they had sampled is in their rows.

        What a subagent samples after its episode's rows were taken is trained nowhere. Raises: nothing.
        """
        ending = [asyncio.ensure_future(child._end_all()) for child in self._children]
        if ending:
            _, late = await asyncio.wait(ending, timeout=CANCEL_WAIT_S)
            for task in late:
                task.cancel()

    async def _end_all(self) -> None:
        with contextlib.suppress(Exception):  # a service that is away cancels nothing; what is sampled then ends with its own wait
            if self.running:
                await self.cancel()
        while self._standing.in_flight is not None:
            await asyncio.sleep(POLL_S)
        await self.end_subagents()

    def check_integrity(self) -> None:
        """Assert the invariants of the token records and of their tree."""
        self._tree.check_integrity()
