"""The tiny model's tokenizer and chat template: 256 bytes, whose id is their value, and eight added tokens.

Called by `make` when the folder is written. The invariant: a role costs one token and no text is ever merged, so ids and bytes map
one to one and an episode stays short; the template only ever appends (rendering one message more never changes what was rendered
before).
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_BYTES = 256
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CONTROL_IDS = {text: NUM_BYTES + place for place, text in enumerate(CONTROL_TOKENS)}
# Ordinary text that happens to be one token each; what a tool call is written between.
TOOL_CALL_TOKENS = ("<tool_call>", "</tool_call>")
VOCAB_SIZE = NUM_BYTES + len(CONTROL_TOKENS) + len(TOOL_CALL_TOKENS)
MAX_MODEL_LEN = 2048

CHAT_TEMPLATE = r"""
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call these functions:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nCall one by answering with its name and arguments as JSON:\n' }}
    {{- '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('unknown role ' + message.role + '; known: system, user, assistant, tool') }}
    {%- endif %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|' + message.role + '|>' }}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if message.content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
            {{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
""".strip()


def build_tokenizer() -> Tokenizer:
    """Make a tokenizer in which byte b is id b and the added tokens follow."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TOOL_CALL_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def byte_symbols() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte, in byte order.

    Source: GPT-2's byte-level encoding. Printable Latin-1 characters stand for themselves, the others for U+0100 and up in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(NUM_BYTES)]


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_MODEL_LEN,
            "eos_token": END_OF_TURN,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [CONTROL_IDS[END_OF_TURN], CONTROL_IDS[END_OF_TEXT]],
            "pad_token_id": CONTROL_IDS[END_OF_TEXT],
            "temperature": 1.0,
        },
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
