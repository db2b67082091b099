"""Kept sets, scored prompts and texts of a flush find their streams, or the flush is not read at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.client.flush_extras import FlushExtras
from rollout.wire.generation_messages import Deltas, Ending

TEXTS = "aé".encode()


def arrays(**changed: Any) -> dict[str, np.ndarray]:
    every = {
        "kept_counts": np.array([2, 0, 1], np.int32),
        "kept_ids": np.array([5, 6, 9], np.int32),
        "prompt_scores": np.array([[1, 4, 2, 7], [0, 1, 1, 8]], np.int64),
        "prompt_logprobs": np.array([-1, -2, -3], np.float32),
        "prompt_raw_logprobs": np.array([-4, -5, -6], np.float32),
        "texts": np.frombuffer(TEXTS, np.uint8),
        **changed,
    }
    return {name: array for name, array in every.items() if array is not None}


def body(*sizes: int | None) -> Deltas:
    return Deltas(seq=1, finished=[Ending(index=index, kind="stop", output_tokens=1, text_bytes=size) for index, size in enumerate(sizes)])


def extras(found: dict[str, np.ndarray], ended: Deltas) -> FlushExtras:
    return FlushExtras(found, ended, num_streams=2, num_tokens=3)


def test_everything_finds_its_stream() -> None:
    read = extras(arrays(), body(1, 2))
    assert read.fits
    kept = read.kept(0, 2)
    assert kept is not None and kept[0].tolist() == [2, 0] and kept[1].tolist() == [5, 6]
    assert read.texts == {0: "a", 1: "é"}
    first, second = read.scores[0], read.scores[1]
    assert (first.start, first.version, first.logprobs.tolist(), first.raw_logprobs.tolist()) == (1, 8, [-3], [-6])
    assert (second.start, second.version, second.logprobs.tolist()) == (4, 7, [-1, -2])


def test_a_flush_without_extras_has_none() -> None:
    read = extras({}, body(None))
    assert read.fits and read.kept(0, 3) is None and not read.scores and not read.texts


@pytest.mark.parametrize(
    ("changed", "sizes"),
    [
        ({"kept_counts": None}, (1, 2)),
        ({"kept_ids": np.array([5], np.int32)}, (1, 2)),
        ({"kept_counts": np.array([3], np.int32)}, (1, 2)),
        ({"kept_counts": np.array([4, -2, 1], np.int32)}, (1, 2)),
        ({"prompt_scores": np.array([[0, 1, 9, 0]], np.int64)}, (1, 2)),
        ({"prompt_scores": np.array([[5, 1, 3, 0]], np.int64)}, (1, 2)),
        ({"prompt_scores": np.array([[0, 1, -3, 0], [1, 1, 6, 0]], np.int64)}, (1, 2)),
        ({"prompt_raw_logprobs": None}, (1, 2)),
        ({}, (1, 1)),
        ({}, (1, 9)),
        ({"texts": None}, (1, 2)),
    ],
)
def test_extras_that_do_not_fit_are_found(changed: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert not extras(arrays(**changed), body(*sizes)).fits
