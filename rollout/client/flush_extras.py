"""What a flush carries beside the tokens of its streams: kept sets, scored prompts, texts.

The I/O thread makes one for each flush and asks it, stream by stream; a flush without extras costs a few look-ups.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rollout.client.results import PromptScore
from rollout.wire.generation_messages import Deltas


class FlushExtras:
    """See the module. `scores` and `texts` are by the index of their stream; nothing is to be read unless `fits`."""

    __slots__ = ("_counts", "_ids", "_starts", "fits", "scores", "texts")

    def __init__(self, arrays: Mapping[str, np.ndarray], body: Deltas, *, num_streams: int, num_tokens: int) -> None:
        self._counts, self._ids = arrays.get("kept_counts"), arrays.get("kept_ids")
        self._starts = np.zeros(1, np.int64)
        self.scores: dict[int, PromptScore] = {}
        self.texts: dict[int, str] = {}
        self.fits = self._read_kept(num_tokens) and self._read_scores(arrays, num_streams) and self._read_texts(arrays, body)

    def _read_kept(self, num_tokens: int) -> bool:
        if self._counts is None or self._ids is None:
            return self._counts is self._ids
        if self._counts.size != num_tokens or (self._counts < 0).any():
            return False
        self._starts = np.concatenate([[0], np.cumsum(self._counts, dtype=np.int64)])
        return int(self._starts[-1]) == self._ids.size

    def _read_scores(self, arrays: Mapping[str, np.ndarray], num_streams: int) -> bool:
        table = arrays.get("prompt_scores")
        if table is None:
            return True
        nothing = np.empty(0, np.float32)
        logprobs, raw = arrays.get("prompt_logprobs", nothing), arrays.get("prompt_raw_logprobs", nothing)
        counts = table[:, 2]
        if (counts < 0).any() or not int(counts.sum()) == logprobs.size == raw.size:
            return False
        at = 0
        for index, start, count, version in table.tolist():
            # Copies: a slice would keep the whole message.
            part = slice(at, at + count)
            self.scores[index] = PromptScore(start=start, logprobs=logprobs[part].copy(), raw_logprobs=raw[part].copy(), version=version)
            at += count
        return all(0 <= index < num_streams for index in self.scores)

    def _read_texts(self, arrays: Mapping[str, np.ndarray], body: Deltas) -> bool:
        content, at = arrays.get("texts", np.empty(0, np.uint8)).tobytes(), 0
        for ending in body.finished:
            if ending.text_bytes is not None:
                self.texts[ending.index] = content[at : at + ending.text_bytes].decode("utf-8", "replace")
                at += ending.text_bytes
        return at == len(content)

    @property
    def has_kept(self) -> bool:
        """Whether some token of the flush has a kept set."""
        return self._counts is not None

    def kept(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return counts and ids of the kept sets of a stretch of the flush's tokens, None if it carries none."""
        if self._counts is None or self._ids is None:
            return None
        return self._counts[start:stop], self._ids[int(self._starts[start]) : int(self._starts[stop])]
