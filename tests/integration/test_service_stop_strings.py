"""Stop strings around a real engine that runs ahead: the record ends with the id that completes the match, whoever says so first."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import examples.agentic.tiny_model as tiny_model
import rollout

PROMPT = [72, 105]
STOPS: list[tuple[str, list[str], str, str]] = [
    ("one. two", ["."], ".", "one"),
    ("a STOSTOP b", ["STOP"], "STOP", "a STO"),
    ("say 漢字🙂 bye", ["字🙂"], "字🙂", "say 漢"),
    ("call <|im_end|> x", ["<|im_end|>"], "<|im_end|>", "call "),
    ("xyz", ["z", "yz", "xyz"], "xyz", ""),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollout.Client]:
    folder = Path(tiny_model.__file__).parent
    options = {"state_dir": str(tmp_path_factory.mktemp("state")), "threads": 1, "run_ahead": 2}
    with rollout.local(str(folder), dtype="float32", max_rows=8, **options) as client:
        yield client
        stats = client.stats()
        assert stats["live"] == stats["reserved_bytes"] == stats["record_pages"] == stats["watched_for_stop_strings"] == 0
        assert stats["accepted"] == sum(stats[kind] for kind in ("stop", "length", "cancelled", "expired", "failed"))


@pytest.fixture(scope="module")
def tokenizer(client: rollout.Client) -> Any:
    return client.tokenizer()


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


def decode(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)  # type: ignore[no-any-return]


def completing(tokenizer: Any, ids: np.ndarray, stop: str, start: int = 0) -> int:
    """Return how many ids it takes until their text holds a stop string that the id at `start` or a later one completes."""
    counts = range(start + 1, len(ids) + 1)
    texts = (decode(tokenizer, ids[:count]) for count in counts)
    return next(count for count, text in zip(counts, texts) if stop in text[max(0, len(decode(tokenizer, ids[:start])) - len(stop) + 1) :])


@pytest.mark.parametrize(("said", "stops", "string", "text"), STOPS)
def test_a_string_ends_the_request_at_the_id_that_completes_it(
    client: rollout.Client, tokenizer: Any, said: str, stops: list[str], string: str, text: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "forced_ids": encode(tokenizer, said), "seed": 3, "ignore_eos": True}
    whole = client.generate(PROMPT, **options)
    found = client.generate(PROMPT, stop=stops, **options)
    count = len(found.ids)
    assert (found.finish_reason.kind, found.finish_reason.stop_string, found.text) == ("stop", string, text)
    assert decode(tokenizer, found.ids) == text + string, "nothing after it"
    assert found.ids.tolist() == whole.ids[:count].tolist()
    assert found.logprobs is not None and whole.logprobs is not None
    np.testing.assert_allclose(found.logprobs, whole.logprobs[:count], atol=1e-4)
    assert len(found.versions) == count and all(start < len(PROMPT) + count for start, _ in found.kv_spans)
    assert whole.text is None and whole.finish_reason.stop_string is None


def test_free_text_stops_as_a_search_in_it_says_alone_in_company_and_in_a_stream(client: rollout.Client, tokenizer: Any) -> None:
    before = client.stats()
    cases = []
    every: list[dict[str, Any]] = [{"max_new_tokens": 40, "seed": seed, "ignore_eos": True, "temperature": 1.3} for seed in range(12)]
    free = [client.stream(PROMPT, **options) for options in every]
    for options, stream in zip(every, free):
        whole = list(stream)[-1].finished
        assert whole is not None
        text = decode(tokenizer, whole.ids)
        stop = next(part for at in range(10, 30) if "\ufffd" not in (part := text[at : at + 3]) and part)
        cases.append((options, whole, stop))
    streams = [client.stream(PROMPT, stop=[stop], **options) for options, _, stop in cases]
    for stream, (_, whole, stop) in zip(streams, cases):
        deltas = list(stream)
        found = deltas[-1].finished
        assert found is not None
        count = completing(tokenizer, whole.ids, stop)
        assert found.ids.tolist() == whole.ids[:count].tolist() == np.concatenate([delta.ids for delta in deltas]).tolist()
        assert (found.finish_reason.kind, found.finish_reason.stop_string) == ("stop", stop)
        assert found.text == decode(tokenizer, whole.ids[:count]).partition(stop)[0]
    deadline = time.monotonic() + 10
    # The last end is told before the engine has heard of it.
    while (after := client.stats())["engine"]["stop"] - before["engine"]["stop"] < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after["tokens_after_stop"] > before["tokens_after_stop"], "the engine had run ahead"
    assert after["stop"] - before["stop"] == 12 and after["engine"]["stop"] - before["engine"]["stop"] == 12


def test_minimum_budget_and_string_agree_on_one_end(client: rollout.Client, tokenizer: Any) -> None:
    ids = encode(tokenizer, "STOP STOP STOP")
    options: dict[str, Any] = {"forced_ids": ids, "stop": "STOP", "ignore_eos": True}
    late = client.generate(PROMPT, max_new_tokens=40, min_new_tokens=5, **options)
    assert (len(late.ids), late.text) == (9, "STOP ")
    exact = client.generate(PROMPT, max_new_tokens=14, min_new_tokens=10, **options)
    assert (len(exact.ids), exact.finish_reason.kind, exact.finish_reason.stop_string) == (14, "stop", "STOP")
    cut = client.generate(PROMPT, max_new_tokens=14, min_new_tokens=14, **options)
    assert (len(cut.ids), cut.finish_reason.kind, cut.text) == (14, "length", "STOP STOP STOP")
    end_id = client.generate(PROMPT, max_new_tokens=40, **{**options, "ignore_eos": False, "forced_ids": [*ids[:3], 257]})
    assert (end_id.finish_reason.stop_id, end_id.finish_reason.stop_string, end_id.text) == (257, None, "STO<|im_end|>")


def test_a_resumed_output_stops_as_if_it_had_never_been_cut(client: rollout.Client, tokenizer: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "forced_ids": encode(tokenizer, "ab STOP cd"), "stop": ["STOP"], "seed": 1}
    whole = client.generate(PROMPT, **options)
    for cut in (1, 5, 6):
        rest = client.generate([*PROMPT, *whole.ids[:cut].tolist()], prior_output_tokens=cut, **options)
        assert rest.ids.tolist() == whole.ids[cut:].tolist() and rest.text == whole.text == "ab "
        assert rest.finish_reason == whole.finish_reason


def test_a_groups_members_stop_one_by_one(client: rollout.Client, tokenizer: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "seed": 8, "ignore_eos": True, "temperature": 1.5}
    free = client.generate_group(PROMPT, 6, **options)
    stop = decode(tokenizer, free[2].ids[20:21])
    stopped = client.generate_group(PROMPT, 6, stop=[stop], **options)
    for one, whole in zip(stopped, free):
        if stop in decode(tokenizer, whole.ids):
            count = completing(tokenizer, whole.ids, stop)
            assert (one.ids.tolist(), one.finish_reason.stop_string) == (whole.ids[:count].tolist(), stop)
        else:
            assert (one.ids.tolist(), one.finish_reason.kind) == (whole.ids.tolist(), "length")
            assert one.text == decode(tokenizer, whole.ids)
    assert stopped[2].finish_reason.stop_string == stop


def test_cancels_at_any_moment_leave_one_end_and_no_token_after_the_string(client: rollout.Client, tokenizer: Any) -> None:
    ids = encode(tokenizer, "some text before the STOP and after it")
    at = len(encode(tokenizer, "some text before the STOP"))
    draw = random.Random(0)
    kinds = set()
    for turn in range(24):
        stream = client.stream(PROMPT, max_new_tokens=60, forced_ids=ids, stop=["STOP"], ignore_eos=True)
        time.sleep(0.004 * turn * draw.random())
        result = client.cancel(stream.request_id)
        deltas = list(stream)
        found = deltas[-1].finished
        assert found is not None and found.finish_reason.kind in ("stop", "cancelled")
        kinds.add(found.finish_reason.kind)
        stopped = found.finish_reason.kind == "stop"
        assert len(found.ids) == at if stopped else len(found.ids) < at
        assert found.text == decode(tokenizer, ids[: len(found.ids)]).partition("STOP")[0]
        assert not (result.cancelled and result.state == "stop")
    assert "cancelled" in kinds


@pytest.mark.parametrize(
    "stop",
    [[""], ["x"] * 17, ["x" * 257], [5], [None], {"x": 1}, ["\ufffd"], ["\ud800"], 5],
    ids=lambda stop: str(stop)[:12].encode().hex(),
)
def test_stop_strings_beyond_the_limits_are_refused_by_name(client: rollout.Client, stop: Any) -> None:
    with pytest.raises(rollout.RolloutError) as refused:
        client.generate(PROMPT, stop=stop, max_new_tokens=2)
    assert isinstance(refused.value, ValueError) and str(refused.value.field).startswith("stop")
    assert refused.value.remedy and refused.value.limit


def test_a_turn_that_a_string_ends_keeps_it_and_the_environment_writes_the_rest(client: rollout.Client, tokenizer: Any) -> None:
    said = encode(tokenizer, "abc</x>def")

    async def play() -> Any:
        episode = await client.aio.episode(messages=[{"role": "user", "content": "go"}])
        turn = await episode.act(forced_ids=said, stop=["</x>"], max_new_tokens=30)
        episode.observe("more")
        await episode.act(max_new_tokens=4)
        return episode, turn

    episode, turn = asyncio.run(play())
    assert turn.text == "abc</x>" and turn.generation.text == "abc"
    assert (turn.finish_reason, turn.limit, turn.record.stop_string) == ("stop", None, "</x>")
    (row,) = episode.rows()
    assert row.ids[turn.record.start : turn.record.end].tolist() == said[:7]
    assert row.ids[turn.record.end] == 257 and not row.mask[turn.record.end], "the end of the turn is the environment's"
