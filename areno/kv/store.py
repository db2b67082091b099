"""The K/V tensors: pages of G tokens for every layer, and the two pages that no request owns.

The zero page is never written: dead lanes read it, so their attention output is exactly zero. The sink page is never
read: dead lanes and padding write there. The executor is the only caller; addresses never change.
"""

from __future__ import annotations

import numpy as np
import torch

from areno.config import SINK_PAGE, ZERO_PAGE
from areno.uploads import upload
from areno.whole_segments import full_segment, take_again


def independent_copies(sources: np.ndarray, targets: np.ndarray) -> list[slice]:
    """Cut a list of page copies into parts in which no page is both read and written, to be run one after the other.

    A page may be read first and written later in the list (it was evicted in between), never the other way round. Shapes: [n] each.
    """
    parts, start = [], 0
    read: set[int] = set()
    written: set[int] = set()
    for place, (source, target) in enumerate(zip(sources.tolist(), targets.tolist())):
        assert source not in written and source != target, f"page {source} is copied after it was written"
        assert target not in written, f"page {target} is written twice"
        if target in read:
            parts.append(slice(start, place))
            start, read = place, set()
        read.add(source)
        written.add(target)
    return [*parts, slice(start, sources.size)] if sources.size else []


class KVStore:
    """Paged keys and values. Shapes: `keys`, `values` [L, N, G, K, D]; slots number tokens as page * G + offset."""

    __slots__ = ("_flat_keys", "_flat_values", "_page_keys", "_page_values", "_scratch", "keys", "page_size", "values")

    def __init__(
        self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        self.page_size = page_size
        if device.type == "cuda":
            # What is left of a larger block that nobody uses would be others' too.
            torch.cuda.empty_cache()
        self.keys = full_segment(shape, 0.0, dtype=dtype, device=device)
        self.values = full_segment(shape, 0.0, dtype=dtype, device=device)
        flat = (num_layers, num_pages * page_size, num_kv_heads, head_dim)
        self._flat_keys = self.keys.view(flat)
        self._flat_values = self.values.view(flat)
        self._page_keys = self.keys.view(num_layers, num_pages, -1)
        self._page_values = self.values.view(num_layers, num_pages, -1)
        self._scratch = self._page_keys.new_empty((2, 0, self._page_keys.shape[2]))
        if device.type == "cuda":
            # Compiles the kernel now and not in the first fork; the sink is never read.
            self.copy(np.array([ZERO_PAGE]), np.array([SINK_PAGE]))

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, there or not."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def release(self) -> None:
        """Give the memory of keys and values back; nothing may run until `restore`. Mutates: everything is lost."""
        with torch.inference_mode(False):
            for tensor in (self.keys, self.values):
                tensor.untyped_storage().resize_(0)
            self._scratch = self._scratch.new_empty((2, 0, self._scratch.shape[2]))

    def restore(self) -> None:
        """Take memory for keys and values again, all zero; its addresses may be others, which captures do not follow."""
        if self.keys.is_cuda:
            torch.cuda.empty_cache()
        with torch.inference_mode(False):
            for tensor in (self.keys, self.values):
                take_again(tensor)
                tensor.zero_()

    @property
    def sink_slot(self) -> int:
        """Slot where writes without an owner go."""
        return SINK_PAGE * self.page_size

    def write(self, layer: int, slots_T: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Store keys and values of T tokens. Mutates: the pages named by `slots_T`."""
        self._flat_keys[layer].index_copy_(0, slots_T, k_TKD)
        self._flat_values[layer].index_copy_(0, slots_T, v_TKD)

    def clear(self, pages: np.ndarray) -> None:
        """Zero whole pages in every layer. Mutates: these pages."""
        (places,) = upload(self.keys.device, pages)
        self.keys.index_fill_(1, places, 0.0)
        self.values.index_fill_(1, places, 0.0)

    def copy(self, sources: np.ndarray, targets: np.ndarray, tokens: np.ndarray | None = None) -> None:
        """Copy pages in every layer, as if all sources were read first. Shapes: [n] each. Mutates: the target pages.

        `tokens` says how many tokens of each page count. On a CPU, where attention reads whole pages, the others become zero: what their
        owner computes meanwhile may be no number, and would reach whoever multiplies it by a weight of zero.
        """
        if self.keys.device.type == "cpu":
            given, taken = upload(self.keys.device, sources, targets)
            self.keys[:, taken] = self.keys[:, given]
            self.values[:, taken] = self.values[:, given]
            for target, count in zip(targets.tolist(), () if tokens is None else tokens.tolist()):
                self.keys[:, target, count:] = 0.0
                self.values[:, target, count:] = 0.0
            return
        from areno.kernels.pages import copy_pages

        for part in independent_copies(sources, targets):
            given, taken = upload(self.keys.device, sources[part], targets[part])
            copy_pages(self.keys, self.values, given, taken)

    def gather(self, layer: int, tables_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of B page lists, valid until the next call. Shapes: [B, K, P * G, D], strided."""
        num_rows, num_pages = tables_BP.shape
        flat = tables_BP.reshape(-1)
        if flat.numel() > self._scratch.shape[1]:
            # Fresh memory for every gather would cost more in page faults than the copy itself.
            self._scratch = self._scratch.new_empty((2, flat.numel() + flat.numel() // 2, self._scratch.shape[2]))
        shape = (num_rows, num_pages * self.page_size, *self.keys.shape[3:])
        gathered = []
        for source, scratch in zip((self._page_keys, self._page_values), self._scratch):
            out = scratch[: flat.numel()]
            torch.index_select(source[layer], 0, flat, out=out)
            gathered.append(out.view(shape).transpose(1, 2))
        return gathered[0], gathered[1]
