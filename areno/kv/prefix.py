"""The prefix index: which pages hold which tokens, so that a prompt can reuse what was computed before.

Two kinds of entries hold references. *Nodes* form a trie under (weight epoch, salt), keyed by the page's ids compared in
full; a node may have *tails*, pages of which only the first ids are valid, copied on a hit. Everybody may hit them, and a
weight commit drops them all, so a stale hit cannot happen. *Chains* belong to one lineage (an episode): the pages of its
newest finished request, reusable by that lineage alone across epochs, at most `max_kv_lag` versions old. Eviction takes
the least recently used entry that no row uses. Host only, no torch.

Invariant: a page's references = rows that list it + nodes, tails and chain places that name it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import numpy as np

from areno.kv.pool import PagePool

Spans = tuple[tuple[int, int], ...]
"""Run-length versions: (first position, version) pairs."""

_NO_PAGE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """A prompt's reusable prefix: whole pages, held for the caller, then `copied` tokens at the head of `copy_from`.

    `copy_from` is held too, until the caller has put the copy into the log. `spans` say which versions built the tokens.
    """

    pages: list[int]
    copy_from: int | None
    copied: int
    spans: Spans


@dataclass(slots=True, eq=False)
class _Node:
    page: int
    ids: bytes
    parent: _Node | None
    is_tail: bool = False
    tick: int = 0
    children: dict[bytes, _Node] = field(default_factory=dict)
    tails: dict[bytes, _Node] = field(default_factory=dict)


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
        self._roots: dict[str | None, _Node] = {}
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        self._chains: OrderedDict[tuple[str | None, str], _Chain] = OrderedDict()
        self._tick = 0

    @property
    def num_evictable(self) -> int:
        """Number of pages that only the index refers to."""
        return self._pool.num_index_only

    def match(self, ids: np.ndarray, *, salt: str | None, lineage: str | None, oldest_version: int, at_most: int) -> PrefixMatch:
        """Find the longest reusable prefix of a prompt and hold its pages.

        At most `at_most` tokens match, and at least one token is always left to compute. A chain counts only if no version
        in the matched part is below `oldest_version`.
        """
        limit = min(ids.size - 1, at_most) if self._enabled else 0
        ids = ids.astype(np.int32)
        path, tail, tail_tokens = self._walk(ids, salt, limit)
        pages = [node.page for node in path]
        copy_from = tail.page if tail is not None else None
        copied = tail_tokens
        spans: Spans = ((0, self._epoch),) if pages or tail_tokens else ()
        key = (salt, lineage or "")
        chain = self._chains.get(key) if lineage is not None else None
        common = self._common(chain, ids, limit) if chain is not None else 0
        if chain is not None and common > len(pages) * self._page_size + copied and chain.versions[:common].min() >= oldest_version:
            full = common // self._page_size
            pages, copied = chain.pages[:full], common % self._page_size
            copy_from = chain.pages[full] if copied else None
            spans = run_lengths(chain.versions[:common])
            self._touch_chain(key, chain)
        else:
            self._touch([*path, *([tail] if tail is not None else [])])
        for page in pages:
            self._pool.hold(page)
        if copy_from is not None:
            self._pool.hold(copy_from)
        return PrefixMatch(pages=list(pages), copy_from=copy_from, copied=copied, spans=spans)

    def publish(self, ids: np.ndarray, pages: list[int], *, salt: str | None, tail_page: int | None = None, tail_tokens: int = 0) -> None:
        """Enter full pages computed wholly under the current epoch, and the valid head of a partial one after them.

        Keys that exist keep their page.
        """
        if not self._enabled or not (pages or tail_page is not None):
            return
        ids = ids.astype(np.int32)
        parent = self._roots.setdefault(salt, _Node(_NO_PAGE, b"", None))
        path = []
        for index, page in enumerate(pages):
            text = self._text(ids, index)
            node = parent.children.get(text)
            if node is None:
                node = parent.children[text] = self._enter(page, text, parent)
            path.append(node)
            parent = node
        if tail_page is not None and tail_tokens:
            start = len(pages) * self._page_size
            text = ids[start : start + tail_tokens].tobytes()
            if text not in parent.tails:
                parent.tails[text] = self._enter(tail_page, text, parent, is_tail=True)
            path.append(parent.tails[text])
        self._touch(path)

    def remember(self, lineage: str, *, salt: str | None, ids: np.ndarray, pages: list[int], versions: np.ndarray) -> None:
        """Keep a finished request's pages for its lineage; they replace what it had. Shapes: versions [tokens with KV]."""
        if not self._enabled:
            return
        for page in pages:
            self._pool.hold_for_index(page)
        key = (salt, lineage)
        self._drop_chain(key)
        if pages:
            chain = _Chain(ids[: versions.size].astype(np.int32), list(pages), versions.copy())
            self._chains[key] = chain
            self._touch_chain(key, chain)

    def start_epoch(self, epoch: int) -> None:
        """Drop every shared entry; lineages keep theirs."""
        self._epoch = epoch
        for node in self._nodes.values():
            self._pool.release_from_index(node.page)
        self._nodes.clear()
        self._roots.clear()

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
                freed += self._shorten_chain(chain_key)
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
            assert len(chain.pages) == -(-chain.versions.size // self._page_size), "a chain names other pages than its tokens fill"
        held = self._pool.indexed_pages
        assert named == held, f"index references differ: entries {named}, counted {held}"
        reached: set[int] = set()
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            below = [*node.children.values(), *node.tails.values()]
            assert all(child.parent is node for child in below), "a node has another parent than the one that lists it"
            reached.update(id(child) for child in below)
            stack.extend(below)
        assert reached == set(self._nodes), "a node cannot be reached from its root, or was dropped but is still listed"

    def _text(self, ids: np.ndarray, index: int) -> bytes:
        return ids[index * self._page_size : (index + 1) * self._page_size].tobytes()

    def _walk(self, ids: np.ndarray, salt: str | None, limit: int) -> tuple[list[_Node], _Node | None, int]:
        path: list[_Node] = []
        node = self._roots.get(salt)
        if node is None:
            return path, None, 0
        for index in range(limit // self._page_size):
            child = node.children.get(self._text(ids, index))
            if child is None:
                break
            path.append(child)
            node = child
        start = len(path) * self._page_size
        rest = ids[start : min(limit, start + self._page_size - 1)]
        best, best_tokens = None, 0
        for tail in node.tails.values():
            shared = _common_prefix(np.frombuffer(tail.ids, dtype=np.int32), rest)
            if shared > best_tokens:
                best, best_tokens = tail, shared
        return path, best, best_tokens

    def _common(self, chain: _Chain, ids: np.ndarray, limit: int) -> int:
        return _common_prefix(chain.ids, ids[:limit])

    def _enter(self, page: int, text: bytes, parent: _Node, *, is_tail: bool = False) -> _Node:
        node = _Node(page, text, parent, is_tail)
        self._nodes[id(node)] = node
        self._pool.hold_for_index(page)
        return node

    def _touch(self, path: list[_Node]) -> None:
        # Deepest first: a parent is always younger than its children, so the oldest entry is a leaf.
        for node in reversed(path):
            self._tick += 1
            node.tick = self._tick
            self._nodes.move_to_end(id(node))

    def _touch_chain(self, key: tuple[str | None, str], chain: _Chain) -> None:
        self._tick += 1
        chain.tick = self._tick
        self._chains.move_to_end(key)

    def _oldest_node(self) -> _Node | None:
        """Return the oldest entry that can go. What is in use is passed over by making it young, so that nobody passes it again soon."""
        for _ in range(len(self._nodes)):
            node = next(iter(self._nodes.values()))
            if not (node.children or node.tails or self._pool.in_use(node.page)):
                return node
            self._touch([node])
        return None

    def _oldest_chain(self) -> tuple[str | None, str] | None:
        for _ in range(len(self._chains)):
            key, chain = next(iter(self._chains.items()))
            if not self._pool.in_use(chain.pages[-1]):
                return key
            self._touch_chain(key, chain)
        return None

    def _drop_node(self, node: _Node) -> int:
        del self._nodes[id(node)]
        parent = node.parent
        assert parent is not None
        del (parent.tails if node.is_tail else parent.children)[node.ids]
        if parent.page == _NO_PAGE and not (parent.children or parent.tails):
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}
        return int(self._pool.release_from_index(node.page))

    def _shorten_chain(self, key: tuple[str | None, str]) -> int:
        chain = self._chains[key]
        freed = int(self._pool.release_from_index(chain.pages.pop()))
        chain.versions = chain.versions[: len(chain.pages) * self._page_size]
        chain.ids = chain.ids[: chain.versions.size]
        if not chain.pages:
            del self._chains[key]
        return freed

    def _drop_chain(self, key: tuple[str | None, str]) -> None:
        chain = self._chains.pop(key, None)
        for page in chain.pages if chain is not None else ():
            self._pool.release_from_index(page)


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    size = min(left.size, right.size)
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if different.size else size


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
