"""Chat templates that real models ship, and one byte-level tokenizer that knows all of their control tokens.

Those of TRL are read from the installed package's files (it is never imported), SmolLM2's from the GGUF of its package; Ling's are our own
writing of its published format, without and with thinking kept.
"""

from __future__ import annotations

import functools
import json
import struct
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from examples.agentic.smollm2 import find_gguf
from rollout.agent import ChatFormat
from tests.unit.rollout.agent import byte_tokenizer as small_tokenizer

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<role>", "</role>", "<|role_end|>", "<|startoftext|>", "<start_of_turn>"),
    *("<end_of_turn>", "<bos>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|end|>", "[gMASK]", "<sop>", "<unk>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
)
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
CONTROLS = (*SPECIAL, *ADDED)

_LING_START = (
    "{{ '<role>SYSTEM</role>' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}"
    "{% if tools %}{{ '# Tools\\n<tools>' }}{% for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}{{ '\\n</tools>\\n' }}"
    '{{ \'<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\\n\' }}{% endif %}'
    "{{ 'detailed thinking ' ~ MODE ~ '<|role_end|>' }}"
)
_LING_MESSAGES = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '<role>HUMAN</role>' + message.content + '<|role_end|>' }}"
    "{% elif message.role == 'system' and not loop.first %}{{ '<role>SYSTEM</role>' + message.content + '<|role_end|>' }}"
    "{% elif message.role == 'assistant' %}{{ '<role>ASSISTANT</role>' + REPLY + '<|role_end|>' }}"
    "{% elif message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<role>OBSERVATION</role>' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|role_end|>' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' + PROMPT }}{% endif %}"
)


def _ling(mode: str, reply: str, prompt: str) -> str:
    return (_LING_START + _LING_MESSAGES).replace("MODE", mode).replace("REPLY", reply).replace("PROMPT", prompt)


LING = _ling("'off'", "message.content.split('</think>')[-1].lstrip('\\n')", "''")
LING_KEEPS = _ling("'on'", "('' if '<think>' in message.content else '\\n<think>') + message.content", "'\\n<think>'")

# As Mistral's: turns alternate unless calls are given as data, results name their calls by nine characters, and nothing asks for a reply.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(index=0) %}{% for message in messages %}"
    "{% if message.role == 'user' or (message.role == 'assistant' and message.tool_calls is not defined) %}"
    "{% if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + '[/INST]' }}"
    "{% elif message.role == 'tool' %}{% if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' + (message.content | tojson) + ', \"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% elif message.tool_calls is defined %}{{ '[TOOL_CALLS] ' + (message.tool_calls | tojson) + eos_token }}"
    "{% else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}{% endfor %}"
)

# name: (TRL's file, the token that ends a turn, what its template is passed)
_TRL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2.5": ("qwen2_5", "<|im_end|>", {}),
    "qwen3": ("qwen3", "<|im_end|>", {}),
    "qwen3 without thinking": ("qwen3", "<|im_end|>", {"enable_thinking": False}),
    "qwen3 2507": ("qwen3_instruct_2507", "<|im_end|>", {}),
    "qwen3 for training": ("qwen3_training", "<|im_end|>", {}),
    "qwen3 for training without thinking": ("qwen3_training", "<|im_end|>", {"enable_thinking": False}),
    "qwen3.5": ("qwen3_5_think", "<|im_end|>", {}),
    "llama3": ("llama3", "<|eot_id|>", {}),
    "llama3.1": ("llama3_1", "<|eot_id|>", {}),
    "llama3.2": ("llama3_2", "<|eot_id|>", {"date_string": "26 Jul 2024"}),
    "gemma": ("gemma", "<end_of_turn>", {}),
    "phi3": ("phi3", "<|end|>", {}),
    "glm4": ("glm4moe", "<|user|>", {}),
    "deepseek": ("deepseekv3", "<｜end▁of▁sentence｜>", {}),
    "lfm2": ("lfm2", "<|im_end|>", {}),
}
NAMES = (*_TRL, "smollm2", "ling", "ling keeping thinking", "mistral")


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Return a byte-level BPE with every control token."""
    return small_tokenizer.byte_tokenizer(special=SPECIAL, added=ADDED)


@functools.cache
def smollm2_template() -> str:
    """Return the template inside the GGUF that SmolLM2's package ships."""
    data = find_gguf().read_bytes()[: 1 << 23]
    key = b"tokenizer.chat_template"
    at = data.rindex(key) + len(key)
    kind, length = struct.unpack_from("<IQ", data, at)
    assert kind == 8, "the value is a string"
    return data[at + 12 : at + 12 + length].decode()


@functools.cache
def template(name: str) -> str:
    """Return a model's template."""
    if name == "smollm2":
        return smollm2_template()
    if name == "mistral":
        return MISTRAL
    if name.startswith("ling"):
        return LING if name == "ling" else LING_KEEPS
    files = metadata.distribution("trl").files or []
    found = next(file for file in files if file.name == f"{_TRL[name][0]}.jinja")
    return Path(str(found.locate())).read_text(encoding="utf-8")


def end_of_turn(name: str) -> str:
    """Return the token that ends a turn of a model."""
    return _TRL[name][1] if name in _TRL else {"smollm2": "<|im_end|>", "mistral": "</s>"}.get(name, "<|role_end|>")


def files(name: str) -> dict[str, bytes]:
    """Return the files that a service of that model would send."""
    bos = "<|begin_of_text|>" if name.startswith("llama") else "<bos>"
    config = {"bos_token": bos, "eos_token": end_of_turn(name), "unk_token": "<unk>"}
    return {
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": template(name).encode(),
    }


def chat_format(name: str, **options: Any) -> ChatFormat:
    """Return the chat format of a model."""
    kwargs = _TRL[name][2] if name in _TRL else {}
    return ChatFormat(files(name), template_kwargs=kwargs, **options)


def spelled(text: str) -> list[int]:
    """Return the ids of a text byte by byte, control tokens as theirs: what encoding the text never gives."""
    tokenizer = byte_tokenizer()
    ids: list[int] = []
    while text:
        piece = next((token for token in CONTROLS if text.startswith(token)), text[0])
        ids += [i for byte in (piece.encode() if piece not in CONTROLS else [piece]) for i in _one(tokenizer, byte)]
        text = text[len(piece) :]
    return ids


def _one(tokenizer: Tokenizer, piece: int | str) -> list[int]:
    if isinstance(piece, str):
        found = tokenizer.token_to_id(piece)
        assert found is not None
        return [found]
    symbol = _SYMBOLS[piece]
    found = tokenizer.token_to_id(symbol)
    assert found is not None
    return [found]


def _byte_symbols() -> dict[int, str]:
    """Return the symbol that byte-level tokenizers write for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + place) for place, byte in enumerate(others)}}


_SYMBOLS = _byte_symbols()
