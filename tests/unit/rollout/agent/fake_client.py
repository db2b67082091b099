"""A hand-made policy client: it says what it was told to say and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.agent import ChatFormat
from rollout.tokenizer_files import tokenizer_digest
from tests.unit.rollout.agent.byte_tokenizer import control_id, files


@dataclass(frozen=True)
class FakeFinish:
    kind: str
    stop_id: int | None = None
    stop_string: str | None = None
    detail: str | None = None


@dataclass(frozen=True)
class FakeGeneration:
    request_id: bytes
    prompt_ids: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray | None
    raw_logprobs: np.ndarray | None
    behaviour_logprobs: np.ndarray | None
    versions: np.ndarray
    kv_spans: tuple[tuple[int, int], ...]
    finish_reason: FakeFinish
    seed: int
    cached_tokens: int
    prompt_tokens: int
    kept_counts: np.ndarray | None = None
    kept_ids: np.ndarray | None = None
    kv_rebuilt_at: tuple[int, ...] = ()


@dataclass
class FakeEngine:
    eos_ids: tuple[int, ...]
    max_model_len: int = 4096
    pool_tokens: int = 100_000


@dataclass
class FakeInfo:
    engine: FakeEngine
    tokenizer_digest: str | None = None
    chat_template_digest: str | None = None


@dataclass
class FakeClient:
    """`replies` are the ids of the turns in order (or a function of prompt and options); a reply ends at a stop id or by length.

    `hang` makes every generation wait until it is cancelled by its id or its task.
    """

    replies: Iterable[Sequence[int]] | Callable[[np.ndarray, dict[str, Any]], Sequence[int]] = ()
    served: dict[str, bytes] = field(default_factory=files)
    eos_ids: tuple[int, ...] = (control_id("<|im_end|>"), control_id("<|endoftext|>"), control_id("<|eot_id|>"))
    version: int = 7
    max_model_len: int = 4096
    hang: bool = False
    error: Exception | None = None
    behaviour: bool = False
    requests: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    cancelled: list[bytes] = field(default_factory=list)
    live: int = 0
    most_live: int = 0
    waits: list[tuple[str, float, str | None]] = field(default_factory=list)
    waiting: dict[bytes, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._script = None if callable(self.replies) else iter(self.replies)

    async def info(self) -> FakeInfo:
        return FakeInfo(FakeEngine(self.eos_ids, self.max_model_len), tokenizer_digest(self.served))

    async def tokenizer_files(self) -> dict[str, bytes]:
        return self.served

    async def cancel(self, request_id: bytes) -> None:
        self.cancelled.append(request_id)
        if request_id in self.waiting:
            self.waiting[request_id].set()

    def tool_wait(self, lineage: str, expect_s: float, *, cache_salt: str | None = None) -> None:
        self.waits.append((lineage, expect_s, cache_salt))

    async def generate(self, prompt_ids: np.ndarray, **options: Any) -> FakeGeneration:
        self.requests.append((list(map(int, prompt_ids)), options))
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            if self.hang:
                self.waiting[options["request_id"]] = asyncio.Event()
                await self.waiting[options["request_id"]].wait()
                return self._generation(prompt_ids, options, [5, 6], FakeFinish("cancelled"))
            said = self.replies(prompt_ids, options) if self._script is None else next(self._script)
            return self._finished(prompt_ids, options, list(said))
        finally:
            self.live -= 1

    def _finished(self, prompt_ids: np.ndarray, options: dict[str, Any], said: list[int]) -> FakeGeneration:
        stops = set(options["stop_ids"]) | (set() if options["ignore_eos"] else set(self.eos_ids))
        at = next((place for place, token in enumerate(said) if token in stops), None)
        ids = said if at is None else said[: at + 1]
        if len(ids) > options["max_new_tokens"]:
            return self._generation(prompt_ids, options, ids[: options["max_new_tokens"]], FakeFinish("length"))
        finish = FakeFinish("length") if at is None else FakeFinish("stop", stop_id=ids[-1])
        return self._generation(prompt_ids, options, ids, finish)

    def _generation(self, prompt_ids: np.ndarray, options: dict[str, Any], ids: list[int], finish: FakeFinish) -> FakeGeneration:
        count = len(ids)
        logprobs = -0.5 - np.arange(count, dtype=np.float32) / 100 if options["logprobs"] else None
        return FakeGeneration(
            request_id=options["request_id"],
            prompt_ids=np.array(prompt_ids, np.int32),
            ids=np.array(ids, np.int32),
            logprobs=logprobs,
            raw_logprobs=None if logprobs is None else logprobs - 1,
            behaviour_logprobs=None if logprobs is None or not self.behaviour else logprobs + 0.1,
            versions=np.full(count, self.version, np.int64),
            kv_spans=((0, self.version),),
            finish_reason=finish,
            seed=options["seed"],
            cached_tokens=len(prompt_ids) // 2,
            prompt_tokens=len(prompt_ids),
            kept_counts=np.full(count, 2, np.int32) if options.get("return_kept_ids") else None,
            kept_ids=np.repeat(np.array(ids, np.int32), 2) if options.get("return_kept_ids") else None,
        )


class GuardedTokenizer:
    """A tokenizer that refuses to encode text in which any of `forbidden` occurs: what was sampled must never come here."""

    def __init__(self, tokenizer: Any, forbidden: Sequence[str]):
        self._tokenizer, self.forbidden = tokenizer, forbidden

    def encode(self, text: str, **options: Any) -> Any:
        for part in self.forbidden:
            assert part not in text, f"sampled text was encoded: {text!r}"
        return self._tokenizer.encode(text, **options)


def guarded(chat_format: ChatFormat, *forbidden: str) -> ChatFormat:
    """Return the format with every way to encode guarded against sampled text."""
    controls = chat_format._controls
    controls._full = GuardedTokenizer(controls._full, forbidden)
    controls._plain = GuardedTokenizer(controls._plain, forbidden)
    return chat_format
