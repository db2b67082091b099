"""Small byte-level tokenizers with their chat templates, as the files that a service sends; every template is our own writing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# A default system message, as small instruct models have it.
SMOL = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful bot<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Writes the start token itself, trims contents, has no newline after the end of a turn.
LLAMA = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message.role if message.role != 'tool' else 'ipython' }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Drops the thinking of every reply before the last user message, normalises the rest, wraps tool results into a user turn.
THINKING = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% set state = namespace(last=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set state.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% set answer = message.content.split('</think>')[-1].lstrip('\n') %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > state.last and '</think>' in message.content %}"
    "<think>\n{{ message.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n"
    "{% endif %}{{ answer }}<|im_end|>\n"
    "{% elif message.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
MERGES = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o"), ("Ċ", "Ċ"), ("o", "k")]


def byte_tokenizer(
    *, adds_bos: bool = False, lowercase: bool = False, special: Sequence[str] = SPECIAL, added: Sequence[str] = ADDED
) -> Tokenizer:
    """Return a byte-level BPE whose longest merge is "hello"; control tokens come after the vocabulary."""
    vocab = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(text, normalized=lowercase, special=False) for text in added])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def files(template: str | None = CHATML, *, eos: str = "<|im_end|>", **options: bool) -> dict[str, bytes]:
    """Return the files of a byte tokenizer and a template."""
    found = {
        "tokenizer.json": byte_tokenizer(**options).to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": eos, "tokenizer_class": "SomeoneElses"}).encode(),
    }
    if template is not None:
        found["chat_template.jinja"] = template.encode()
    return found


def spelled(text: str) -> list[int]:
    """Return the ids of a text one byte at a time, control tokens as theirs: what a policy may sample and encode never gives."""
    tokenizer = byte_tokenizer()
    ids: list[int] = []
    while text:
        piece = next((token for token in (*SPECIAL, *ADDED) if text.startswith(token)), text[0])
        ids += tokenizer.encode(piece).ids
        text = text[len(piece) :]
    return ids


def control_id(text: str) -> int:
    """Return the id of a control token."""
    found = byte_tokenizer().token_to_id(text)
    assert found is not None
    return found


def find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Return where `part` begins in `ids`, -1 if nowhere."""
    ids, part = list(ids), list(part)
    return next((at for at in range(len(ids) - len(part) + 1) if ids[at : at + len(part)] == part), -1)
