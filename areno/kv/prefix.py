"""The prefix index: which pages hold which tokens, so that a prompt can reuse what was computed before.

Two kinds of entries hold references. *Nodes* form a trie keyed by (weight epoch, salt, parent, the page's ids compared
in full); everybody may hit them, and a weight commit drops them, so a stale hit cannot happen. *Chains* belong to one
lineage (an episode): the full pages of its newest finished request, reusable by that lineage alone across epochs, at
most `max_kv_lag` versions old. Eviction takes the least recently used entry that no row uses. Host only, no torch.
Invariant: a page's references = rows that list it + nodes and chain places that name it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from areno.kv.pool import PagePool

Spans = tuple[tuple[int, int], ...]
"""Run-length versions: (first position, version) pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """Pages of a prompt's prefix, held for the caller, and the versions that built them."""

    pages: list[int]
    spans: Spans


@dataclass(slots=True, eq=False)
class _Node:
    page: int
    key: tuple[object, ...]
    parent: _Node | None
    children: int = 0
    tick: int = 0


@dataclass(slots=True)
class _Chain:
    ids: np.ndarray
    pages: list[int]
    versions: np.ndarray
    tick: int = 0


class PrefixIndex:
    """Entries over the pages of one pool; `enabled=False` never hits and never holds."""

    def __init__(self, pool: PagePool, page_size: int, *, epoch: int, enabled: bool = True) -> None:
        self._pool, self._page_size, self._epoch, self._enabled = pool, page_size, epoch, enabled
        self._nodes: OrderedDict[tuple[object, ...], _Node] = OrderedDict()
        self._chains: OrderedDict[tuple[str | None, str], _Chain] = OrderedDict()
        self._held: Counter[int] = Counter()
        self._tick = 0

    @property
    def held_pages(self) -> Counter[int]:
        """References the index holds, by page."""
        return self._held

    def match(self, ids: np.ndarray, *, salt: str | None, lineage: str | None, oldest_version: int) -> PrefixMatch:
        """Find the longest reusable prefix of a prompt and hold its pages.

        At least one token is always left to compute. A chain counts only if no version in it is below `oldest_version`.
        """
        limit = (ids.size - 1) // self._page_size if self._enabled else 0
        nodes = self._walk(ids, salt, limit)
        pages = [node.page for node in nodes]
        spans: Spans = ((0, self._epoch),) if pages else ()
        chain_key = (salt, lineage or "")
        chain = self._chains.get(chain_key) if lineage is not None else None
        if chain is not None:
            shared = self._shared_pages(chain, ids, limit)
            if shared > len(pages):
                versions = chain.versions[: shared * self._page_size]
                if versions.min() >= oldest_version:
                    pages, nodes, spans = chain.pages[:shared], [], run_lengths(versions)
                    self._touch_chain(chain_key, chain)
        self._touch(nodes)
        for page in pages:
            self._pool.hold(page)
        return PrefixMatch(pages=list(pages), spans=spans)

    def publish(self, ids: np.ndarray, pages: list[int], *, salt: str | None) -> None:
        """Enter full pages computed wholly under the current epoch; keys that exist keep their page."""
        if not self._enabled:
            return
        parent: _Node | None = None
        path = []
        for index, page in enumerate(pages):
            key = self._key(parent, salt, ids, index)
            node = self._nodes.get(key)
            if node is None:
                node = _Node(page, key, parent)
                self._nodes[key] = node
                self._hold(page)
                if parent is not None:
                    parent.children += 1
            path.append(node)
            parent = node
        self._touch(path)

    def remember(self, lineage: str, *, salt: str | None, ids: np.ndarray, pages: list[int], versions: np.ndarray) -> None:
        """Keep a finished request's full pages for its lineage; they replace what it had. Shapes: versions [len(pages) * G]."""
        if not self._enabled:
            return
        for page in pages:
            self._hold(page)
        key = (salt, lineage)
        self._drop_chain(key)
        if pages:
            chain = _Chain(ids[: len(pages) * self._page_size].copy(), list(pages), versions.copy())
            self._chains[key] = chain
            self._touch_chain(key, chain)

    def start_epoch(self, epoch: int) -> None:
        """Drop every shared entry; lineages keep theirs."""
        self._epoch = epoch
        for node in self._nodes.values():
            self._let_go(node.page)
        self._nodes.clear()

    def evict(self, count: int) -> int:
        """Free up to `count` pages by dropping least recently used entries that no row uses; return how many became free."""
        freed = 0
        while freed < count:
            node = self._oldest_node()
            chain_key = self._oldest_chain()
            if node is None and chain_key is None:
                break
            if chain_key is None or (node is not None and node.tick <= self._chains[chain_key].tick):
                assert node is not None
                freed += self._drop_node(node)
            else:
                chain = self._chains[chain_key]
                freed += self._let_go(chain.pages.pop())
                if not chain.pages:
                    del self._chains[chain_key]
        return freed

    def clear(self) -> None:
        """Drop everything."""
        self.start_epoch(self._epoch)
        for key in list(self._chains):
            self._drop_chain(key)

    def check_integrity(self) -> None:
        """Check the index's own counts."""
        named: Counter[int] = Counter(node.page for node in self._nodes.values())
        for chain in self._chains.values():
            named.update(chain.pages)
        assert named == self._held, f"index references differ: entries {named}, counted {self._held}"
        children: Counter[int] = Counter(id(node.parent) for node in self._nodes.values() if node.parent is not None)
        for node in self._nodes.values():
            assert node.children == children[id(node)], "a node miscounts its children"
            assert node.parent is None or self._nodes.get(node.parent.key) is node.parent, "a node outlived its parent"

    def _key(self, parent: _Node | None, salt: str | None, ids: np.ndarray, index: int) -> tuple[object, ...]:
        text = ids[index * self._page_size : (index + 1) * self._page_size].astype(np.int32).tobytes()
        return (self._epoch, salt, text) if parent is None else (id(parent), text)

    def _walk(self, ids: np.ndarray, salt: str | None, limit: int) -> list[_Node]:
        path: list[_Node] = []
        for index in range(limit):
            node = self._nodes.get(self._key(path[-1] if path else None, salt, ids, index))
            if node is None:
                break
            path.append(node)
        return path

    def _shared_pages(self, chain: _Chain, ids: np.ndarray, limit: int) -> int:
        common = min(len(chain.pages), limit) * self._page_size
        different = np.flatnonzero(chain.ids[:common] != ids[:common])
        return (int(different[0]) if different.size else common) // self._page_size

    def _touch(self, path: list[_Node]) -> None:
        # Deepest first: a parent is always younger than its children, so the oldest entry is a leaf.
        for node in reversed(path):
            self._tick += 1
            node.tick = self._tick
            self._nodes.move_to_end(node.key)

    def _touch_chain(self, key: tuple[str | None, str], chain: _Chain) -> None:
        self._tick += 1
        chain.tick = self._tick
        self._chains.move_to_end(key)

    def _in_use(self, page: int) -> bool:
        return self._pool.references(page) > self._held[page]

    def _oldest_node(self) -> _Node | None:
        return next((node for node in self._nodes.values() if not node.children and not self._in_use(node.page)), None)

    def _oldest_chain(self) -> tuple[str | None, str] | None:
        return next((key for key, chain in self._chains.items() if not self._in_use(chain.pages[-1])), None)

    def _drop_node(self, node: _Node) -> int:
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.children -= 1
        return self._let_go(node.page)

    def _drop_chain(self, key: tuple[str | None, str]) -> None:
        chain = self._chains.pop(key, None)
        for page in chain.pages if chain is not None else ():
            self._let_go(page)

    def _hold(self, page: int) -> None:
        self._pool.hold(page)
        self._held[page] += 1

    def _let_go(self, page: int) -> int:
        self._held[page] -= 1
        if not self._held[page]:
            del self._held[page]
        return int(self._pool.release(page))


def run_lengths(versions: np.ndarray, start: int = 0) -> Spans:
    """Return the runs of `versions`, whose first element is position `start`."""
    if not versions.size:
        return ()
    changes = np.flatnonzero(np.diff(versions)) + 1
    return tuple((start + int(at), int(versions[at])) for at in (0, *changes.tolist()))


def expand_spans(spans: Spans, length: int) -> np.ndarray:
    """Return one version per position for `length` positions covered by `spans`."""
    versions = np.zeros(length, dtype=np.int64)
    for start, version in spans:
        versions[start:] = version
    return versions
