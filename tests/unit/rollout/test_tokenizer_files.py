"""Only the known files are sent, and the digests say what matters of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rollout.tokenizer_files import chat_template, chat_template_digest, read_tokenizer_files, tokenizer_digest


def test_only_known_files_are_read(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors", "secrets.txt", "config.json"):
        (tmp_path / name).write_bytes(name.encode())
    assert set(read_tokenizer_files(tmp_path)) == {"tokenizer.json", "config.json"}


def test_the_template_file_wins_over_the_entry_in_the_config() -> None:
    config = b'{"chat_template": "old"}'
    assert chat_template({"tokenizer_config.json": config}) == "old"
    assert chat_template({"tokenizer_config.json": config, "chat_template.jinja": b"new"}) == "new"
    assert chat_template({"tokenizer_config.json": b"[1]"}) is None
    assert chat_template({"tokenizer_config.json": b"{"}) is None


def test_digests_are_sha256_or_absent() -> None:
    assert tokenizer_digest({"tokenizer.json": b"{}"}) == hashlib.sha256(b"{}").hexdigest()
    assert chat_template_digest({"chat_template.jinja": b"t"}) == hashlib.sha256(b"t").hexdigest()
    assert tokenizer_digest({}) is None
    assert chat_template_digest({}) is None
