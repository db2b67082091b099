"""Text that grows id by id equals the tokenizer's own text of all ids, and a stop string ends at the id that completes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from rollout.service.stop_text import StopMatch, StopMatcher, StopText, TextDecoder
from tests.unit.rollout.agent.byte_tokenizer import byte_tokenizer, control_id, files, spelled

WORDS = ["▁stop", "▁a", "b", "</", "tool", ">", "▁", "é", "\u6f22", "<unk>"]


def fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer with a word start mark and single bytes for what it has no word for."""
    vocab = {word: place for place, word in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def fallback_ids(text: str) -> list[int]:
    return [len(WORDS) + byte for byte in text.encode()]


def settled(tokenizer: Any, ids: Sequence[int]) -> tuple[str, str]:
    """Return the text that was settled piece by piece, and the whole of it as the tokenizer says."""
    decoder = TextDecoder(tokenizer)
    return "".join(decoder.add(token) for token in ids), decoder.text()


@pytest.mark.parametrize("seed", range(6))
def test_settled_text_is_the_tokenizers_text_of_all_ids(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tokenizer = byte_tokenizer()
    text = "".join(draw.choice(list("ab \n<>é漢🙂ok")) for _ in range(200))
    ids = spelled_bytes(tokenizer, text)
    grown, whole = settled(tokenizer, ids)
    assert grown == whole == text
    fallback = fallback_tokenizer()
    mixed = [token for character in text for token in ([int(draw.integers(0, 9))] if draw.random() < 0.3 else fallback_ids(character))]
    grown, whole = settled(fallback, mixed)
    assert grown == whole == fallback.decode(mixed, skip_special_tokens=False)


def spelled_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one id for each byte."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[symbol] for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text) for symbol in piece]


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_settle_in_order_and_lose_no_text(seed: int) -> None:
    """Most of these ids are no text; what is text comes out in its place, and junk keeps its neighbours apart."""
    draw = np.random.default_rng(seed)
    tokenizer = byte_tokenizer()
    ids = draw.integers(0, 256, 400).tolist()
    grown, whole = settled(tokenizer, ids)
    assert grown == whole.rstrip("\ufffd")
    junk = spelled_bytes(tokenizer, "é")[:1] * 150
    grown, whole = settled(tokenizer, [*spelled("a"), *junk, *spelled("b")])
    assert grown.startswith("a\ufffd") and grown.endswith("\ufffdb")


def test_a_character_settles_with_its_last_byte_and_what_is_before_it_at_once() -> None:
    tokenizer = byte_tokenizer()
    decoder = TextDecoder(tokenizer)
    assert [decoder.add(token) for token in spelled_bytes(tokenizer, "x🙂y")] == ["x", "", "", "", "🙂", "y"]
    run = TextDecoder(fallback_tokenizer())
    assert [run.add(token) for token in fallback_ids("S€")] == ["S", "", "", "€"], "a byte that hid the one before brings it back"


def run(matcher: StopMatcher, ids: Sequence[int]) -> tuple[int, StopMatch | None]:
    """Return how many ids it took to match, and the match."""
    for count, token in enumerate(ids, start=1):
        match = matcher.add(token)
        if match is not None:
            return count, match
    return len(ids), None


def byte_matcher(*strings: str, min_new_tokens: int = 0, earlier: Sequence[int] = ()) -> StopMatcher:
    return StopMatcher(byte_tokenizer(), strings, min_new_tokens=min_new_tokens, earlier=earlier)


@pytest.mark.parametrize(
    ("said", "stops", "used", "string", "text"),
    [
        ("one. two", ["."], 4, ".", "one"),
        ("a STOP b", ["STOP"], 6, "STOP", "a "),
        ("a STOSTOP", ["STOP"], 9, "STOP", "a STO"),
        ("ab\n\nc", ["\n\n"], 4, "\n\n", "ab"),
        ("aaab", ["aab"], 4, "aab", "a"),
        ("say 漢字!", ["漢字"], 10, "漢字", "say "),
        ("a🙂b", ["🙂"], 5, "🙂", "a"),
        ("xyz", ["z", "yz", "xyz"], 3, "xyz", ""),
        ("xyz", ["xyz", "y"], 2, "y", "x"),
        ("x", ["x"], 1, "x", ""),
        ("nothing here", ["zzz"], 12, None, None),
    ],
)
def test_a_match_ends_at_the_id_that_completes_it(said: str, stops: list[str], used: int, string: str | None, text: str | None) -> None:
    ids = spelled_bytes(byte_tokenizer(), said)
    assert run(byte_matcher(*stops), ids) == (used, None if string is None else StopMatch(str(string), str(text)))


def test_a_match_may_begin_inside_one_token_and_end_inside_another() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("hello").ids + tokenizer.encode("hello").ids
    assert len(ids) == 2, "one token each"
    assert run(byte_matcher("lohe"), ids) == (2, StopMatch("lohe", "hel"))
    assert run(byte_matcher("ell"), ids) == (1, StopMatch("ell", "h"))


def test_a_control_token_is_text_like_any_other() -> None:
    ids = [*spelled("a"), control_id("</tool_call>"), *spelled("b")]
    assert run(byte_matcher("</tool_call>"), ids) == (2, StopMatch("</tool_call>", "a"))
    assert run(byte_matcher("a</tool"), ids) == (2, StopMatch("a</tool", ""))


def test_ids_before_the_minimum_complete_nothing_but_a_match_may_begin_in_them() -> None:
    ids = spelled_bytes(byte_tokenizer(), "STOP STOP STOP")
    assert run(byte_matcher("STOP", min_new_tokens=3), ids)[0] == 4
    assert run(byte_matcher("STOP", min_new_tokens=4), ids) == (9, StopMatch("STOP", "STOP "))
    assert run(byte_matcher("STOP", min_new_tokens=8), ids)[0] == 9
    assert run(byte_matcher("STOP", min_new_tokens=14), ids) == (14, None)


def test_output_of_an_interrupted_run_counts_as_output_before_it() -> None:
    ids = spelled_bytes(byte_tokenizer(), "ab STOP c")
    for cut in range(7):
        matcher = byte_matcher("STOP", min_new_tokens=6, earlier=ids[:cut])
        assert run(matcher, ids[cut:]) == (7 - cut, StopMatch("STOP", "ab ")), "as if it had never been cut"


def test_the_text_of_an_output_without_a_match_is_whole_and_shows_an_unfinished_character() -> None:
    ids = spelled_bytes(byte_tokenizer(), "ab é")
    matcher = byte_matcher("zzz")
    run(matcher, ids[:-1])
    assert matcher.text() == "ab \ufffd"
    matcher.add(ids[-1])
    assert matcher.text() == "ab é"


@pytest.mark.parametrize("seed", range(5))
def test_streamed_matches_are_those_of_a_search_in_the_whole_text(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tokenizer = byte_tokenizer()
    for _ in range(20):
        ids = draw.choice(spelled_bytes(tokenizer, "abé") + tokenizer.encode("hello").ids, 60).tolist()
        stops = ["".join(draw.choice(list("abhelo"), int(draw.integers(2, 5)))) for _ in range(3)]
        used, match = run(byte_matcher(*stops), ids)
        texts = [tokenizer.decode(ids[:count], skip_special_tokens=False).rstrip("\ufffd") for count in range(len(ids) + 1)]
        first = next((count for count, text in enumerate(texts) if any(stop in text for stop in stops)), None)
        assert (None if match is None else used) == first
        if match is not None:
            ends = min(texts[used].find(stop) + len(stop) for stop in stops if stop in texts[used])
            assert texts[used][: len(match.text) + len(match.string)] == match.text + match.string
            assert len(match.text) + len(match.string) == ends


def test_a_service_without_a_usable_tokenizer_refuses_stop_strings_and_says_why() -> None:
    for served, why in (({}, "no tokenizer.json"), ({"tokenizer.json": b"{}"}, "cannot be loaded")):
        refusal = StopText(served).refusal(["x"])
        assert refusal is not None and refusal.field == "stop"
        assert why in str(refusal.limit) and "stop_ids" in str(refusal.remedy)
    text = StopText(files())
    assert text.refusal(["x"]) is None
    undecodable = text.refusal(["x", "\ufffd"])
    assert undecodable is not None and undecodable.field == "stop" and "stop[1]" in undecodable.what
    assert text.matcher(["x"], min_new_tokens=0, earlier=[]).add(spelled("x")[0]) == StopMatch("x", "")


def test_a_long_earlier_output_is_taken_in_a_moment_and_changes_no_match() -> None:
    tokenizer = byte_tokenizer()
    earlier = spelled_bytes(tokenizer, "seven and eight é " * 2000)
    began = time.process_time()
    matcher = StopMatcher(tokenizer, ["ninth"], min_new_tokens=0, earlier=[*earlier, *spelled_bytes(tokenizer, "ni")])
    assert time.process_time() - began < 1.0, "one by one these would hold the front up"
    found = [matcher.add(token) for token in spelled_bytes(tokenizer, "nth")]
    assert found[:2] == [None, None] and found[2] == StopMatch("ninth", "seven and eight é " * 2000)
