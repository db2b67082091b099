"""Growing columns that share flushes for a while: every stretch equals a list's, whoever reads it and whenever."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rollout.client.columns import MAX_PARTS, Columns, FlushColumns, TokenLog


def flush_of(first: int, count: int, *, behaviour: float = float("nan"), before: int = 3) -> FlushColumns:
    """Return a flush in which this stream's tokens `first`... lie behind `before` of others."""
    ids = np.concatenate([np.full(before, -1), np.arange(first, first + count), np.full(2, -1)]).astype(np.int32)
    return FlushColumns(
        Columns(
            ids,
            (-ids).astype(np.float32),
            (-2 * ids).astype(np.float32),
            np.full(ids.size, behaviour, np.float32),
            (ids // 10).astype(np.int64),
        )
    )


def assert_is(part: Columns, start: int, stop: int) -> None:
    expected = np.arange(start, stop)
    assert part.ids.tolist() == expected.tolist()
    assert part.logprobs.tolist() == (-expected).tolist() and part.raw_logprobs.tolist() == (-2 * expected).tolist()
    assert part.versions.tolist() == (expected // 10).tolist()
    assert not any(column.flags.writeable for column in part)


@pytest.mark.parametrize("seed", range(4))
def test_every_stretch_is_what_was_appended_and_stays_so(seed: int) -> None:
    draw = np.random.default_rng(seed)
    log, length, held = TokenLog(stagger=seed * 17), 0, []
    for _ in range(400):
        count = int(draw.choice([1, 1, 1, 2, 7, 90]))
        log.append(length, flush_of(length, count), 3, 3 + count)
        length += count
        start = int(draw.integers(max(0, length - 40), length + 1)) if draw.random() < 0.8 else int(draw.integers(0, length + 1))
        stop = int(draw.integers(start, length + 1))
        held.append((start, stop, log.cut(start, stop)))
        assert_is(log.cut(start, length), start, length)
    log.settle()
    held.append((0, length, log.cut(0, length)))
    for start, stop, part in held:
        assert_is(part, start, stop)


def test_a_log_lets_flushes_go_after_some_parts_and_sooner_after_large_ones() -> None:
    small, large = TokenLog(stagger=0), TokenLog(stagger=0)
    for number in range(3 * MAX_PARTS):
        small.append(number, flush_of(number, 1), 3, 4)
        assert len(small._state.parts) < MAX_PARTS
    wide = flush_of(0, 1, before=2**15)
    for number in range(10):
        large.append(number, wide, 0, 1)
        assert len(large._state.parts) <= 2


def test_a_stream_that_waits_lets_the_flushes_go() -> None:
    log = TokenLog(stagger=20)
    log.append(0, flush_of(0, 2), 3, 5)
    log.settle_idle()
    assert log._state.parts, "it has just grown"
    log.settle_idle()
    assert not log._state.parts
    log.append(2, flush_of(2, 3), 3, 6)
    assert_is(log.cut(0, 5), 0, 5)


def test_a_log_is_plain_until_something_of_the_behaviour_differs() -> None:
    log = TokenLog(stagger=0)
    log.append(0, flush_of(0, 2), 3, 5)
    assert log.plain
    log.append(2, flush_of(2, 2, behaviour=-0.5), 3, 5)
    assert not log.plain


def test_a_reader_in_another_thread_sees_whole_tokens_only() -> None:
    log, published, wrong = TokenLog(stagger=3), [0], []
    total = 30_000

    def read() -> None:
        seen = 0
        while seen < total:
            length = published[0]
            ids = log.cut(seen, length).ids
            if ids.tolist() != list(range(seen, length)):
                wrong.append((seen, length))
            seen = length

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(0, total, 3):
        log.append(number, flush_of(number, 3), 3, 6)
        published[0] = number + 3
    reader.join(30)
    assert not reader.is_alive() and not wrong
