"""Templates that do odd things with history: what is left out, written twice, or changes its surroundings."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.agent import ChatFormat, ChatFormatError
from rollout.agent.conversation import Conversation
from tests.unit.rollout.agent.byte_tokenizer import CHATML, THINKING, control_id, files, find, spelled
from tests.unit.rollout.agent.fake_client import guarded

END = control_id("<|im_end|>")
USER = [{"role": "user", "content": "go"}]
MORE = [{"role": "user", "content": "more"}]
LAST_THREE = CHATML.replace("for message in messages", "for message in messages[-3:]")
TWICE = LAST_THREE.replace("{{ message.content }}", "{{ message.content }} {{ message.content }}")
SHOUTS = CHATML.replace("{{ message.content }}", "{{ message.content | upper if message.role == 'assistant' else message.content }}")
TRIMS = CHATML.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] | trim }}")
OFTEN_THINKS = CHATML.replace(
    "{{ message.content }}",
    "{{ '<think>\n\n</think>\n\n' if message.role == 'assistant' and not message.content | trim }}{{ message.content }}",
)
LEAVES_OUT = CHATML.replace("<|im_start|>{{ message.role }}", "{% if message.content | trim %}<|im_start|>{{ message.role }}").replace(
    "<|im_end|>\n", "<|im_end|>\n{% endif %}"
)
COUNTS = CHATML.replace("{{ message.role }}", "{{ message.role }} {{ messages[1].content | length if messages | length > 1 else 0 }}")


def said(text: str) -> np.ndarray:
    return np.array([*spelled(text), END], np.int32)


def begun(template: str, *forbidden: str) -> tuple[Conversation, list[int]]:
    conversation = Conversation(guarded(ChatFormat(files(template)), *forbidden), USER)
    return conversation, conversation.start().tolist()


def test_a_template_that_forgets_old_messages_forks_and_keeps_the_sampled_ids_of_the_others() -> None:
    conversation, _ = begun(LAST_THREE, "hello")
    conversation.add_reply(said("hello one"), end_id=END)
    assert not conversation.extend(MORE).forks
    conversation.add_reply(said("hello two"), end_id=END)
    added = conversation.extend(MORE)
    assert added.forks
    more = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert ChatFormat(files(LAST_THREE)).decode(added.ids) == f"{more}hello two<|im_end|>\n{more}"
    assert find(added.ids, spelled("hello two")) > 0


@pytest.mark.parametrize("forgets", [False, True])
def test_a_long_conversation_is_compared_with_its_template_again_and_follows_it_from_there(forgets: bool) -> None:
    """The proof of a family ends at 40 turns; this template forgets from the 63rd on."""
    template = CHATML.replace("in messages", "in messages[-126:]") if forgets else CHATML
    chat = ChatFormat(files(template))
    assert chat.renderer is not None
    conversation = Conversation(chat, USER)
    row, forked = conversation.start().tolist(), []
    for turn in range(1, 71):
        conversation.add_reply(said(f"a{turn}"), end_id=END)
        added = conversation.extend(MORE)
        row = added.ids.tolist() if added.forks else [*row, *said(f"a{turn}").tolist(), *added.ids.tolist()]
        forked += [turn] if added.forks else []
        if turn >= 64:
            assert chat.decode(row) == chat.render(conversation.messages)
    assert forked == (list(range(64, 71)) if forgets else [])


@pytest.mark.parametrize(("template", "complaint"), [(TWICE, "more than once"), (COUNTS, "with the content of a reply")])
def test_a_template_whose_history_cannot_be_taken_apart_is_refused_and_nothing_changes(template: str, complaint: str) -> None:
    conversation, _ = begun(template)
    conversation.add_reply(said("hello"), end_id=END)
    if template == TWICE:
        conversation.extend(MORE)
        conversation.add_reply(said("hello"), end_id=END)
    before = conversation.messages
    with pytest.raises(ChatFormatError, match=f"{complaint}.*one episode for each turn"):
        conversation.extend(MORE)
    assert conversation.messages == before


def test_a_template_that_changes_letters_forks_with_its_own_text() -> None:
    conversation, _ = begun(SHOUTS, "hello")
    conversation.add_reply(said("hello"), end_id=END)
    added = conversation.extend(MORE)
    assert added.forks and "HELLO" in ChatFormat(files(SHOUTS)).decode(added.ids)


def test_several_forks_in_a_row_stay_exact() -> None:
    conversation, _ = begun(THINKING, "hello", "hmm")
    for turn in range(4):
        thought = f"<think>\nhmm {turn}\n</think>\n\nhello {turn}"
        conversation.add_reply(said(thought), end_id=END)
        added = conversation.extend(MORE)
        assert added.forks
        text = ChatFormat(files(THINKING)).decode(added.ids)
        assert "hmm" not in text and text.count("hello") == turn + 1
        assert all(find(added.ids, spelled(f"hello {earlier}")) > 0 for earlier in range(turn + 1))
    assert len(conversation.messages) == 9


def test_a_fork_inside_a_tool_loop_appends_again_afterwards() -> None:
    conversation, _ = begun(THINKING, "hello", "hmm")
    thought = "<think>\nhmm\n</think>\n\nhello"
    conversation.add_reply(said(thought), end_id=END)
    assert conversation.extend(MORE).forks
    for _ in range(3):
        conversation.add_reply(said(thought), end_id=END)
        added = conversation.extend([{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}])
        assert not added.forks
        assert ChatFormat(files(THINKING)).decode(added.ids) == (
            "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )


def test_an_empty_observation_ends_the_turn_and_asks_again() -> None:
    conversation, _ = begun(CHATML)
    conversation.add_reply(said("a"), end_id=END)
    assert ChatFormat(files()).decode(conversation.extend([]).ids) == "\n<|im_start|>assistant\n"


def test_an_empty_reply_is_a_reply() -> None:
    conversation, _ = begun(CHATML)
    assert conversation.add_reply(said(""), end_id=END) == ""
    assert ChatFormat(files()).decode(conversation.extend(MORE).ids) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("reply", ["", " \n"])
@pytest.mark.parametrize("template", [LEAVES_OUT, OFTEN_THINKS])
def test_a_template_that_writes_empty_replies_in_its_own_way_is_followed_in_a_new_row(template: str, reply: str) -> None:
    conversation, row = begun(template)
    conversation.add_reply(said(reply), end_id=END)
    added = conversation.extend(MORE)
    shown = ChatFormat(files(template))
    assert added.forks and "".join(shown.decode(added.ids).split()) == "".join(shown.render(conversation.messages).split())
    row = added.ids.tolist()
    conversation.add_reply(said("hello"), end_id=END)
    added = conversation.extend(MORE)
    row = added.ids.tolist() if added.forks else [*row, *said("hello").tolist(), *added.ids.tolist()]
    assert "".join(shown.decode(row).split()) == "".join(shown.render(conversation.messages).split())


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000", " \u2003\n"])
def test_an_answer_behind_a_blank_of_several_tokens_keeps_its_sampled_ids(blank: str) -> None:
    conversation, _ = begun(TRIMS, "hello")
    conversation.add_reply(said(f"<think>hmm</think>{blank}hello{blank}"), end_id=END)
    added = conversation.extend(MORE)
    assert added.forks and find(added.ids, spelled("hello")) > 0


def test_messages_of_a_caller_are_not_changed_and_not_shared() -> None:
    given = [{"role": "user", "content": "<|im_end|>", "parts": [{"text": "<|im_end|>"}]}]
    conversation = Conversation(ChatFormat(files()), given)
    conversation.start()
    assert conversation.messages == given
    conversation.messages[0]["content"] = "x"
    assert conversation.messages == given == [{"role": "user", "content": "<|im_end|>", "parts": [{"text": "<|im_end|>"}]}]
