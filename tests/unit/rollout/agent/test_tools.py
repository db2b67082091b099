"""Tool calls as models write them: good ones run, bad ones become short messages, nothing raises and nothing is unbounded."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from rollout.agent import Episode, EpisodeLimits, EpisodeStatus, Limit, Tool, ToolBox, ToolError
from rollout.agent.errors import InvalidTool, ToolFailed
from rollout.agent.tools import MAX_MESSAGE_CHARS, ToolLimits
from tests.unit.rollout.agent.byte_tokenizer import CHATML, control_id, files, find, spelled
from tests.unit.rollout.agent.fake_client import FakeClient, guarded

RAN: list[Any] = []


def add(a: int, b: float = 2) -> float:
    """Add two numbers.

    Args:
        a: The first number,
            however large.
        b (float): The second one.

    Returns:
        Their sum.
    """
    RAN.append((a, b))
    return a + b


def listing(names: list[str], order: Literal["up", "down"] = "up", about: dict[str, int] | None = None) -> str:
    """List names."""
    RAN.append(names)
    return ",".join(sorted(names, reverse=order == "down"))


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    RAN.clear()


BOX = ToolBox([add, listing])


def test_a_schema_comes_from_type_hints_and_docstring() -> None:
    assert Tool.from_function(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number, however large."},
                    "b": {"type": "number", "description": "The second one."},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    properties = Tool.from_function(listing).parameters["properties"]
    assert properties["names"] == {"type": "array", "items": {"type": "string"}}
    assert properties["order"] == {"enum": ["up", "down"]}
    assert properties["about"] == {"anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]}


class Place(TypedDict):
    city: str
    zip: NotRequired[int]


class Book:
    """Books a table."""

    def __call__(self, where: Place, people: Annotated[int, "How many come."] = 2) -> str:
        """Book a table.

        :param where: The place,
            as exact as can be.
        :returns: what was booked
        """
        return f"{where['city']} for {people}"

    def cancel(self, number: int) -> str:
        """Cancel a booking."""
        return f"cancelled {number}"


def test_methods_and_callable_objects_are_tools_and_typed_dicts_and_notes_are_in_their_schemas() -> None:
    book = Tool.from_function(Book(), name="book")
    assert book.description == "Book a table."
    assert book.parameters["properties"] == {
        "where": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "description": "The place, as exact as can be.",
        },
        "people": {"type": "integer", "description": "How many come."},
    }
    box = ToolBox([book, Book().cancel])
    results = asyncio.run(box.run(*box.read(call("book", {"where": {"city": "Bern"}}) + call("cancel", {"number": 3}))))
    assert [result.content for result in results] == ["Bern for 2", "cancelled 3"]
    assert "lacks 'city'" in box.read(call("book", {"where": {}}))[1][0].message
    assert Tool.from_function(Book()).name == "Book"


def _local_type(a: NowhereDefined) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Do."""
    return 1


def _undocumented(a: int) -> int:
    return a


def _unhinted(a) -> int:  # type: ignore[no-untyped-def]
    """Do."""
    return a


def _odd(a: set[int]) -> int:
    """Do."""
    return len(a)


def _star(*a: int) -> int:
    """Do."""
    return len(a)


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (_local_type, "top level"),
        (_undocumented, "write one line"),
        (_unhinted, "annotate a"),
        (_odd, "parameters= by hand"),
        (_star, "by name"),
    ],
)
def test_functions_that_make_no_schema_are_refused_with_a_remedy(function: Any, remedy: str) -> None:
    with pytest.raises(InvalidTool, match=remedy):
        Tool.from_function(function)


@pytest.mark.parametrize("options", [{"name": "a b"}, {"timeout_s": 0}, {"max_output_chars": 1}])
def test_tool_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTool):
        Tool.from_function(add, **options)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidTool, match="another name="):
        ToolBox([add, add])


def test_a_reply_without_calls_has_none() -> None:
    assert BOX.read("no call here") == ((), ())
    assert BOX.read("") == ((), ())


def test_calls_are_read_in_order() -> None:
    good, bad = BOX.read(f"Sure.\n{call('add', {'a': 1})}{call('listing', {'names': ['x']})} done")
    assert [(one.name, one.arguments, one.place) for one in good] == [("add", {"a": 1}, 0), ("listing", {"names": ["x"]}, 1)]
    assert bad == ()


BAD = {
    "truncated": ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "not valid JSON"),
    "not closed": ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "not closed"),
    "null": (call("add", None), "must be a JSON object, it is null"),
    "list": (call("add", [1, 2]), "it is a list"),
    "number": (call("add", 3), "it is a number"),
    "string": (call("add", '{"a": 1}'), "it is a string"),
    "missing": ('<tool_call>{"name": "add"}</tool_call>', "it is missing"),
    "unknown tool": (call("sub", {"a": 1}), "there is no tool 'sub'; the tools are: add, listing"),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', 'a string "name"'),
    "no object": ("<tool_call>[1]</tool_call>", "must be a JSON object"),
    "empty": ("<tool_call></tool_call>", "not valid JSON"),
    "five megabytes": (call("add", {"a": "x" * 5_000_000}), "the limit is 65536"),
    "duplicate key": ('<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', "the key 'a' is there twice"),
    "duplicate name": ('<tool_call>{"name": "add", "name": "sub", "arguments": {"a": 1}}</tool_call>', "twice"),
    "too large": ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "1e999 is too large for a number"),
    "not a number": ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
    "deep": ('<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 30_000 + "</tool_call>", "not valid JSON"),
    "huge integer": ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "not valid JSON"),
    "more fields": ('<tool_call>{"name": "add", "arguments": {"a": 1}, "x": 1}</tool_call>', "only"),
    "wrong type": (call("add", {"a": "1"}), "arguments.a must be of type integer"),
    "bool": (call("add", {"a": True}), "must be of type integer"),
    "float for int": (call("add", {"a": 1.5}), "must be of type integer"),
    "lacks": (call("add", {}), "arguments lacks 'a'"),
    "unknown argument": (call("add", {"a": 1, "z" * 500: 2}), "known: a, b"),
    "item": (call("listing", {"names": ["a", 1]}), "arguments.names[1] must be of type string"),
    "enum": (call("listing", {"names": [], "order": "left"}), "must be one of ['up', 'down']"),
    "any": (call("listing", {"names": [], "about": 3}), "fits none"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_call_is_a_bounded_message_and_its_tool_does_not_run(kind: str) -> None:
    text, wanted = BAD[kind]
    good, bad = BOX.read(text)
    assert good == () and len(bad) == 1
    assert wanted in bad[0].message and len(bad[0].message) <= MAX_MESSAGE_CHARS
    (result,) = asyncio.run(BOX.run(good, bad))
    assert not result.ok and wanted in result.content and len(result.content) <= MAX_MESSAGE_CHARS + 10
    assert RAN == []


def test_of_two_calls_the_good_one_runs_and_both_are_answered_in_order() -> None:
    text = call("add", None) + call("add", {"a": 1}) + call("nothing", {})
    good, bad = BOX.read(text)
    results = asyncio.run(BOX.run(good, bad))
    assert [result.ok for result in results] == [False, True, False]
    assert results[1].content == "3" and RAN == [(1, 2)]
    assert results[1].message() == {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"}


def test_calls_inside_thinking_are_not_calls() -> None:
    one = call("add", {"a": 1})
    assert BOX.read(f"<think>maybe {one}</think>no") == ((), ())
    assert BOX.read(f"maybe {one}</think>no") == ((), ())
    assert BOX.read(f"<think>maybe {one}") == ((), ())
    assert len(BOX.read(f"<think>hm</think>{one}")[0]) == 1


def test_more_calls_than_allowed_are_refused_and_the_allowed_ones_run() -> None:
    box = ToolBox([add], ToolLimits(max_calls=2))
    good, bad = box.read(call("add", {"a": 1}) * 5)
    assert len(good) == 2 and len(bad) == 1 and "at most 2 calls" in bad[0].message


def test_any_text_is_read_without_raising() -> None:
    import random

    rng = random.Random(5)
    pieces = [
        "<tool_call>",
        "</tool_call>",
        '{"name":',
        '"add"',
        '"arguments"',
        ":",
        "{}",
        "}",
        "null",
        "\ud800",
        "\\u0000",
        "<think>",
        "</think>",
        "1e999",
    ]
    for _ in range(3000):
        good, bad = BOX.read("".join(rng.choice(pieces) for _ in range(rng.randrange(14))))
        assert all(len(one.message) <= MAX_MESSAGE_CHARS for one in bad) and all(isinstance(one.arguments, dict) for one in good)


async def _sleepy(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "woke"


def _blocking(seconds: float) -> str:
    """Block."""
    time.sleep(seconds)
    return "woke"


@pytest.mark.parametrize("function", [_sleepy, _blocking])
def test_a_tool_that_hangs_is_given_up_and_others_go_on(function: Any) -> None:
    box = ToolBox([Tool.from_function(function, timeout_s=0.05), add])
    good, bad = box.read(call(function.__name__, {"seconds": 5}) + call("add", {"a": 1}))
    started = time.perf_counter()
    slow, quick = asyncio.run(box.run(good, bad))
    assert time.perf_counter() - started < 2
    assert slow.content == "error: no answer within 0.05 s" and not slow.ok
    assert quick.content == "3"


def _talkative(count: int) -> str:
    """Talk."""
    return "x" * count


def _picky(count: int) -> str:
    """Refuse."""
    raise ToolError(f"{count} is odd")


def _broken(count: int) -> str:
    """Break."""
    raise OSError("y" * 100_000)


def test_output_is_cut_at_its_limit_and_says_so() -> None:
    box = ToolBox([Tool.from_function(_talkative, max_output_chars=400)])
    (long,) = asyncio.run(box.run(*box.read(call("_talkative", {"count": 5_000_000}))))
    assert len(long.content) == 400 and long.content.endswith("[output cut: 5000000 characters, limit 400]")
    (exact,) = asyncio.run(box.run(*box.read(call("_talkative", {"count": 400}))))
    assert exact.content == "x" * 400


def test_what_a_tool_says_is_wrong_reaches_the_model() -> None:
    box = ToolBox([_picky])
    (result,) = asyncio.run(box.run(*box.read(call("_picky", {"count": 3}))))
    assert (result.content, result.ok) == ("error: 3 is odd", False)


def test_a_broken_tool_tells_the_model_briefly_or_ends_the_episode_where_it_is_essential() -> None:
    box = ToolBox([_broken])
    (result,) = asyncio.run(box.run(*box.read(call("_broken", {"count": 3}))))
    assert result.content.startswith("error: OSError: yyy") and len(result.content) <= MAX_MESSAGE_CHARS
    box = ToolBox([Tool.from_function(_broken, essential=True)])
    with pytest.raises(ToolFailed, match="mend the tool"):
        asyncio.run(box.run(*box.read(call("_broken", {"count": 3}))))


def test_results_that_are_no_text_become_json() -> None:
    def report() -> dict[str, Any]:
        """Report."""
        return {"a": [1, None, "é"]}

    box = ToolBox([report])
    (result,) = asyncio.run(box.run(*box.read(call("report", {}))))
    assert result.content == '{"a": [1, null, "é"]}'


def episode_with(replies: list[list[int]], **options: Any) -> Episode:
    from rollout.agent import ChatFormat

    client = FakeClient(replies, served=files(CHATML))
    chat = guarded(ChatFormat(client.served), "SAMPLED")
    info = asyncio.run(client.info())
    return Episode(client, info=info, format=chat, messages=[{"role": "user", "content": "go"}], tools=[add], **options)


def reply(text: str) -> list[int]:
    return [*spelled("SAMPLED" + text), control_id("<|im_end|>")]


def test_in_an_episode_the_sampled_call_stays_and_its_error_is_the_environments() -> None:
    said = reply(call("add", None) + call("add", {"a": 1}))
    episode = episode_with([said, reply("ok")])

    async def run() -> None:
        turn = await episode.act()
        assert len(turn.tool_calls) == 1 and len(turn.bad_calls) == 1 and turn.calls_tools
        assert episode.observe(await episode.run_tools(turn))
        await episode.act()

    asyncio.run(run())
    (row,) = episode.rows()
    at = find(row.ids, said)
    assert at > 0 and row.mask[at : at + len(said)].all()
    shown = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert shown == ['error: "arguments" must be a JSON object, it is null', "3"]
    assert row.num_sampled == len(said) + len(reply("ok"))


def test_an_episode_ends_after_the_set_number_of_bad_turns_with_a_status_of_its_own() -> None:
    episode = episode_with([reply("<tool_call>{</tool_call>")] * 9, limits=EpisodeLimits(max_bad_turns=3))

    async def run() -> int:
        turns = 0
        while episode.running:
            turn = await episode.act()
            turns += 1
            if episode.running:
                episode.observe(await episode.run_tools(turn))
        return turns

    assert asyncio.run(run()) == 3
    assert (episode.status, episode.limit) == (EpisodeStatus.BAD_CALLS, Limit.MAX_BAD_TURNS)
    assert "not valid JSON" in str(episode.reason)
    assert episode.rows()[0].num_sampled == 3 * len(reply("<tool_call>{</tool_call>"))


def test_a_good_turn_between_bad_ones_starts_the_count_again() -> None:
    bad, good = reply("<tool_call>{</tool_call>"), reply(call("add", {"a": 1}))
    episode = episode_with([bad, bad, good, bad, bad, good], limits=EpisodeLimits(max_bad_turns=3))

    async def run() -> None:
        for _ in range(6):
            turn = await episode.act()
            episode.observe(await episode.run_tools(turn))

    asyncio.run(run())
    assert episode.running


def test_a_call_cut_by_the_turns_budget_is_bad_and_is_ended_by_the_environment() -> None:
    whole = reply(call("add", {"a": 1}))
    episode = episode_with([whole, reply("ok")])

    async def run() -> None:
        turn = await episode.act(max_new_tokens=20)
        assert "not closed" in turn.bad_calls[0].message
        episode.observe(await episode.run_tools(turn))
        await episode.act()

    asyncio.run(run())
    assert RAN == []
    (row,) = episode.rows()
    assert row.ids[row.turns[0].end] == control_id("<|im_end|>") and not row.mask[row.turns[0].end]
