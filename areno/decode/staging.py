"""Memory between host and device for rows that are sent anew for every step: one buffer out, one buffer back.

The outgoing buffer is laid out anew for each number of rows and width of page table, so that what a step reads is contiguous
and one copy sends it:

    ints [8, R] | floats [3, R] | seed [R] | alive [R] | stop ids [R, 16] | logits rows [R] | page table [R, P]

R is the number of rows rounded up to `ROW_MULTIPLE`, P that of pages to `PAGE_MULTIPLE`, so that fields are aligned as tensors
of their own are and kernels compiled for those serve. The buffer that comes back holds the records of one launch and, where an
engine returns kept sets, those behind them. Both are pinned on the host and stay at their addresses, as do all layouts.

The owner waits for each launch (`receive`) before it fills the buffer again, hence one of each is enough. On the CPU both sides
are plain memory, for tests of the layout.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from areno.decode.results import RECORD_WORDS
from areno.decode.row_state import FLOAT_FIELDS, INT_FIELDS, RowState
from areno.decode.steps import StepMemory
from areno.kernels.filters import KeptRing
from areno.request import MAX_STOP_IDS
from areno.sampling.kept import MAX_KEPT

ROW_MULTIPLE = 16
PAGE_MULTIPLE = 16
_KEPT_WORDS = 1 + MAX_KEPT


def _rounded(count: int, multiple: int) -> int:
    return -(-max(count, 1) // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The two ends of one copy. Shapes: equal, contiguous."""

    source: torch.Tensor
    target: torch.Tensor

    def run(self) -> None:
        """Put the copy on the stream."""
        self.target.copy_(self.source, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Views of the staging memory for up to R rows with P pages each.

    `rows` and `logit_rows` are filled on the host and read on the device through `memory` and `device_logit_rows`; `words` int32
    [6, R], `kept_ids` [R, 64] and `kept_count` [R] hold what came back. `send` takes everything, `send_plain` all but the page
    table, `fetch` the records, `fetch_kept` those and the kept sets.
    """

    rows: RowState[np.ndarray]
    logit_rows: np.ndarray
    device_logit_rows: torch.Tensor
    memory: StepMemory
    words: np.ndarray
    kept_ids: np.ndarray | None
    kept_count: np.ndarray | None
    send: Transfer
    send_plain: Transfer
    fetch: Transfer
    fetch_kept: Transfer | None


class Staging:
    """The buffers of one decode path of `num_rows` rows. `waited_s` adds up the time that `receive` blocked."""

    def __init__(self, *, num_rows: int, pages_per_row: int, kept: bool, device: torch.device) -> None:
        on_card = device.type == "cuda"
        rows, self._kept = _rounded(num_rows, ROW_MULTIPLE), kept
        words = rows * (RECORD_WORDS + (_KEPT_WORDS if kept else 0))
        num_bytes = self._fields(rows, _rounded(pages_per_row, PAGE_MULTIPLE))[-1]
        self._outgoing = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_card)
        self._sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._records = torch.zeros(words, dtype=torch.int32, device=device)
        self._incoming = torch.zeros(words, dtype=torch.int32, pin_memory=on_card)
        self._passed = torch.cuda.Event() if on_card else None
        self._layouts: dict[tuple[int, int], Layout] = {}
        self.lane_numbers = torch.arange(rows, dtype=torch.int32, device=device)
        self.waited_s = 0.0

    def layout(self, num_rows: int, num_pages: int) -> Layout:
        """Return the layout for this many rows with at most this many pages each, made once."""
        key = _rounded(num_rows, ROW_MULTIPLE), _rounded(num_pages, PAGE_MULTIPLE)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = self._lay_out(*key)
        return found

    def receive(self, transfer: Transfer | None) -> None:
        """Copy back, if something is to come back, and wait until all work of the launch has passed. Blocks: for the launch."""
        if transfer is not None:
            transfer.run()
        if self._passed is not None:
            self._passed.record()
            started = time.perf_counter()
            self._passed.synchronize()
            self.waited_s += time.perf_counter() - started

    @staticmethod
    def _fields(rows: int, pages: int) -> list[int]:
        """Return where the fields start, in bytes, and where the last one ends."""
        four, eight = 4 * rows, 8 * rows
        sizes = [len(INT_FIELDS) * four, len(FLOAT_FIELDS) * four, eight, rows, MAX_STOP_IDS * four, four, pages * four]
        return [0, *np.cumsum(sizes).tolist()]

    def _lay_out(self, rows: int, pages: int) -> Layout:
        places = self._fields(rows, pages)
        assert places[-1] <= self._sent.numel(), f"{rows} rows of {pages} pages are more than the staging memory was made for"
        host, host_logit_rows = _row_views(self._outgoing, places, rows)
        device, device_logit_rows = _row_views(self._sent, places, rows)
        words, counts = rows * RECORD_WORDS, rows * (RECORD_WORDS + 1)
        used = rows * (RECORD_WORDS + _KEPT_WORDS)
        ring = self._records[:words].view(1, RECORD_WORDS, rows)
        kept, fetch_kept = None, None
        if self._kept:
            ids = self._records[counts:used].view(1, rows, MAX_KEPT)
            kept = KeptRing(ids=ids, counts=self._records[words:counts].view(1, rows))
            fetch_kept = Transfer(source=self._records[:used], target=self._incoming[:used])
        arrived = self._incoming.numpy()
        return Layout(
            rows=RowState(
                ints=host.ints.numpy(),
                floats=host.floats.numpy(),
                alive=host.alive.numpy(),
                seed=host.seed.numpy(),
                stop_ids=host.stop_ids.numpy(),
                page_table=host.page_table.numpy(),
            ),
            logit_rows=host_logit_rows.numpy(),
            device_logit_rows=device_logit_rows,
            memory=StepMemory(state=device, ring=ring, kept=kept),
            words=arrived[:words].reshape(RECORD_WORDS, rows),
            kept_ids=arrived[counts:used].reshape(rows, MAX_KEPT) if self._kept else None,
            kept_count=arrived[words:counts] if self._kept else None,
            send=Transfer(source=self._outgoing[: places[-1]], target=self._sent[: places[-1]]),
            send_plain=Transfer(source=self._outgoing[: places[-2]], target=self._sent[: places[-2]]),
            fetch=Transfer(source=self._records[:words], target=self._incoming[:words]),
            fetch_kept=fetch_kept,
        )


def _row_views(buffer: torch.Tensor, places: list[int], rows: int) -> tuple[RowState[torch.Tensor], torch.Tensor]:
    """Return the row state in a buffer and the logits rows behind it."""
    dtypes = (torch.int32, torch.float32, torch.int64, torch.bool, torch.int32, torch.int32, torch.int32)
    shapes = ((-1, rows), (-1, rows), (rows,), (rows,), (rows, -1), (rows,), (rows, -1))
    ints, floats, seed, alive, stop_ids, logit_rows, page_table = (
        buffer[start:end].view(dtype).view(shape) for start, end, dtype, shape in zip(places, places[1:], dtypes, shapes)
    )
    state: RowState[torch.Tensor] = RowState(ints=ints, floats=floats, alive=alive, seed=seed, stop_ids=stop_ids, page_table=page_table)
    return state, logit_rows
