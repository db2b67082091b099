"""The prefix index: which pages hold which tokens, so that a prompt can reuse what was computed before.

Two kinds of entries hold references. *Nodes* form a trie under (weight epoch, salt), keyed by the page's ids compared in
full; a node may have *tails*, pages of which only the first ids are valid, copied on a hit. Everybody may hit them, and a
weight commit drops them all, so a stale hit cannot happen. *Open tails* hold nothing: they name the page that a running row writes on, of
which the prompt's last ids are copied likewise, until the row gives it back. *Chains* belong to one lineage (an episode): the pages of its
newest finished request, reusable by that lineage alone across epochs, at most `max_kv_lag` versions old. Eviction takes
the least recently used entry that no row uses and no hint holds; when these are gone, hints end one by one, the latest expected
return first, and what they held goes. Where rows use what stands behind an unused page (they have pages of their own for the same ids
before it), that page goes together with the entries behind it, so that whatever only the index refers to can go. Host only, no torch.

Invariants: a page's references = rows that list it + nodes, tails and chain places that name it; an entry is either in the order
of eviction or held by a hint.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from areno.kv.hints import ReturnHint, ReturnHints, Waiter
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
class Node:
    """One entry of the trie; `hints` counts the hints that hold it, `ends_at` names the waiters whose newest request ended here."""

    page: int
    ids: bytes
    parent: Node | None
    is_tail: bool = False
    tick: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)
    tails: dict[bytes, Node] = field(default_factory=dict)
    open_tails: dict[bytes, int] = field(default_factory=dict)
    hints: int = 0
    ends_at: set[Waiter] = field(default_factory=set)

    @property
    def is_bare(self) -> bool:
        """Whether nothing stands below it."""
        return not (self.children or self.tails or self.open_tails)


@dataclass(frozen=True, slots=True)
class OpenTail:
    """Where the open tail of a row stands: below which node, under which ids."""

    salt: str | None
    parent: Node
    text: bytes


@dataclass(slots=True)
class _Chain:
    ids: np.ndarray
    pages: list[int]
    versions: np.ndarray
    tick: int = 0


class PrefixIndex:
    """Entries over the pages of one pool; `enabled=False` never hits and never holds. Hints hold at most `hint_share` of the pool."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        *,
        epoch: int,
        enabled: bool = True,
        hint_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._page_size, self._epoch, self._enabled = pool, page_size, epoch, enabled
        self._roots: dict[str | None, Node] = {}
        # In the order of eviction; what hints hold is apart.
        self._nodes: OrderedDict[int, Node] = OrderedDict()
        self._chains: OrderedDict[Waiter, _Chain] = OrderedDict()
        self._held_nodes: dict[int, Node] = {}
        self._held_chains: dict[Waiter, _Chain] = {}
        self._leaves: dict[Waiter, Node] = {}
        self._hints = ReturnHints(int(hint_share * pool.num_pages), clock)
        self._tick = 0

    @property
    def num_evictable(self) -> int:
        """Number of pages that only the index refers to."""
        return self._pool.num_index_only

    @property
    def hint_counters(self) -> dict[str, int]:
        """What became of hints since the start, and how many there are and how many pages they hold."""
        counted = {name: self._hints.counters[name] for name in ("hints", "hints_kept", "hints_decayed", "hints_dropped", "hints_ended")}
        return {**counted, "hints_open": len(self._hints), "hinted_pages": self._hints.num_pages}

    def expect(self, lineage: str, *, salt: str | None, owner: str, seconds: float) -> bool:
        """Hold what a lineage's newest finished request left until it is back, about `seconds` from now.

        Return whether there was anything to hold and the hints' share has room for it. `owner` may end it.
        """
        waiter = (salt, lineage)
        self._end(self._hints.pop(waiter, "hints_ended"))
        nodes: list[Node] = []
        node = self._leaves.get(waiter)
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        chain = self._chains.get(waiter)
        pages = {one.page for one in nodes} | set(chain.pages if chain is not None else ())
        if not pages or not self._hints.has_room(pages, seconds):
            return False
        self._hints.add(waiter, owner, seconds, nodes, pages)
        for one in nodes:
            one.hints += 1
            if one.hints == 1:
                self._held_nodes[id(one)] = self._nodes.pop(id(one))
        if chain is not None:
            self._held_chains[waiter] = self._chains.pop(waiter)
        while self._hints.over_share:
            self._end(self._hints.pop_decayed() or self._hints.pop_latest())
        return waiter in self._hints

    def arrived(self, lineage: str, *, salt: str | None) -> None:
        """End the hint of a lineage that is back; its next request holds the pages itself."""
        self._end(self._hints.pop_arrived((salt, lineage)))

    def end_hints(self, owner: str) -> None:
        """End an owner's hints; what they held is the first to go."""
        for waiter in self._hints.of_owner(owner):
            self._end(self._hints.pop(waiter, "hints_ended"), oldest=True)

    def _end(self, hint: ReturnHint | None, *, oldest: bool = False) -> None:
        """Put what a hint held back into the order of eviction: as just used, or in front of all others."""
        if hint is None:
            return
        free = []
        # From the root on: in front of a node comes its child, which thus is older.
        for node in reversed(hint.nodes):
            node.hints -= 1
            if not node.hints:
                self._nodes[id(node)] = self._held_nodes.pop(id(node))
                free.append(node)
                if oldest:
                    node.tick = 0
                    self._nodes.move_to_end(id(node), last=False)
        chain = self._held_chains.pop(hint.waiter, None)
        if chain is not None:
            self._chains[hint.waiter] = chain
            if oldest:
                chain.tick = 0
                self._chains.move_to_end(hint.waiter, last=False)
        if not oldest:
            self._touch(free)
            if chain is not None:
                self._touch_chain(hint.waiter, chain)

    def _end_decayed(self) -> None:
        """Let entries of hints that count no more stand where their last use puts them."""
        found = False
        while (hint := self._hints.pop_decayed()) is not None:
            ticks = [node.tick for node in hint.nodes]
            chain = self._held_chains.get(hint.waiter)
            chain_tick = chain.tick if chain is not None else 0
            self._end(hint)
            for node, tick in zip(hint.nodes, ticks):
                node.tick = tick
            if chain is not None:
                chain.tick = chain_tick
            found = True
        if found:
            self._nodes = OrderedDict(sorted(self._nodes.items(), key=lambda item: item[1].tick))
            self._chains = OrderedDict(sorted(self._chains.items(), key=lambda item: item[1].tick))

    def _end_latest(self, pages: int) -> bool:
        """End hints, the latest expected return first, until they held so many pages; return whether there was one."""
        ended: list[ReturnHint] = []
        while pages > 0 and (hint := self._hints.pop_latest()) is not None:
            ended.append(hint)
            pages -= len(hint.pages)
        for hint in reversed(ended):
            self._end(hint, oldest=True)
        return bool(ended)

    def match(self, ids: np.ndarray, *, salt: str | None, lineage: str | None, oldest_version: int, at_most: int) -> PrefixMatch:
        """Find the longest reusable prefix of a prompt and hold its pages.

        At most `at_most` tokens match, and at least one token is always left to compute. A chain counts only if no version
        in the matched part is below `oldest_version`.
        """
        limit = min(ids.size - 1, at_most) if self._enabled else 0
        ids = ids.astype(np.int32)
        path, tail, copy_from, tail_tokens = self._walk(ids, salt, limit)
        pages = [node.page for node in path]
        copied = tail_tokens
        spans: Spans = ((0, self._epoch),) if pages or tail_tokens else ()
        key = (salt, lineage or "")
        chain = self._chain(key) if lineage is not None else None
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

    def publish(
        self,
        ids: np.ndarray,
        pages: list[int],
        *,
        salt: str | None,
        tail_page: int | None = None,
        tail_tokens: int = 0,
        lineage: str | None = None,
    ) -> None:
        """Enter full pages computed wholly under the current epoch, and the valid head of a partial one after them.

        Keys that exist keep their page. `lineage` names whose newest finished request they are, for `expect`.
        """
        if not self._enabled or not (pages or tail_page is not None):
            return
        ids = ids.astype(np.int32)
        parent = self._roots.setdefault(salt, Node(_NO_PAGE, b"", None))
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
        if lineage is not None and path:
            self._leave((salt, lineage))
            path[-1].ends_at.add((salt, lineage))
            self._leaves[salt, lineage] = path[-1]

    def open_tail(self, ids: np.ndarray, page: int, *, salt: str | None) -> OpenTail | None:
        """Name the page with a prompt's last ids, on which its row goes on writing behind them; None where another row's has the same.

        The prompt's whole pages have been published before. Whoever hits it copies it before anything that comes later in the log.
        """
        if not self._enabled:
            return None
        full = ids.size // self._page_size
        parent = self._roots.get(salt) if full else self._roots.setdefault(salt, Node(_NO_PAGE, b"", None))
        for index in range(full):
            parent = parent.children.get(self._text(ids, index)) if parent is not None else None
        if parent is None:
            return None
        text = ids[full * self._page_size :].tobytes()
        if text in parent.open_tails:
            return None
        parent.open_tails[text] = page
        return OpenTail(salt, parent, text)

    def close_tail(self, tail: OpenTail) -> None:
        """Forget an open tail; its row gives the page back, or may hold what is no number."""
        del tail.parent.open_tails[tail.text]
        if self._roots.get(tail.salt) is tail.parent and tail.parent.is_bare:
            del self._roots[tail.salt]

    def _leave(self, waiter: Waiter) -> None:
        leaf = self._leaves.pop(waiter, None)
        if leaf is not None:
            leaf.ends_at.discard(waiter)

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
        for node in (*self._nodes.values(), *self._held_nodes.values()):
            self._pool.release_from_index(node.page)
        self._nodes.clear()
        self._held_nodes.clear()
        self._leaves.clear()
        self._roots.clear()
        self._hints.forget_nodes()
        for waiter, chain in self._held_chains.items():
            self._hints.rehold(waiter, chain.pages)

    def evict(self, count: int) -> int:
        """Free `count` pages, or all that only the index refers to, by dropping entries; return how many became free.

        The least recently used go first, then what hints hold, the latest expected return first, then what stands in front of entries
        in use, together with these.
        """
        freed = 0
        self._end_decayed()
        while freed < count:
            node = self._oldest_node()
            chain_key = self._oldest_chain()
            if node is None and chain_key is None:
                if self._end_latest(count - freed):
                    continue
                unlocked = self._drop_with_what_is_used()
                if unlocked is None:
                    break
                freed += unlocked
                continue
            if chain_key is None or (node is not None and node.tick <= self._chains[chain_key].tick):
                assert node is not None
                freed += self._drop_node(node)
            else:
                freed += self._shorten_chain(chain_key)
        return freed

    def clear(self) -> None:
        """Drop everything."""
        for waiter in self._hints.waiters():
            self._end(self._hints.pop(waiter, "hints_ended"))
        self.start_epoch(self._epoch)
        for key in list(self._chains):
            self._drop_chain(key)

    def check_integrity(self) -> None:
        """Check the index's own counts."""
        self._hints.check_integrity()
        every = {**self._nodes, **self._held_nodes}
        assert len(every) == len(self._nodes) + len(self._held_nodes), "a node is held and in the order of eviction"
        assert all((node.hints > 0) == (key in self._held_nodes) for key, node in every.items()), "a node's hints are miscounted"
        assert all(leaf.ends_at and id(leaf) in every for leaf in self._leaves.values()), "a lineage ends at a node that was dropped"
        named: Counter[int] = Counter(node.page for node in every.values())
        chains = [*self._chains.values(), *self._held_chains.values()]
        named.update(itertools.chain.from_iterable(chain.pages for chain in chains))
        whole = all(len(chain.pages) == -(-chain.versions.size // self._page_size) for chain in chains)
        assert whole, "a chain names other pages than its tokens fill"
        held = self._pool.indexed_pages
        assert named == held, f"index references differ: entries {named}, counted {held}"
        reached: set[int] = set()
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            below = [*node.children.values(), *node.tails.values()]
            assert all(self._pool.in_use(page) for page in node.open_tails.values()), "an open tail outlived its row"
            assert all(child.parent is node for child in below), "a node has another parent than the one that lists it"
            reached.update(id(child) for child in below)
            stack.extend(below)
        assert reached == set(every), "a node cannot be reached from its root, or was dropped but is still listed"

    def _text(self, ids: np.ndarray, index: int) -> bytes:
        return ids[index * self._page_size : (index + 1) * self._page_size].tobytes()

    def _walk(self, ids: np.ndarray, salt: str | None, limit: int) -> tuple[list[Node], Node | None, int | None, int]:
        """Return the nodes of whole pages, the tail behind them, the page of that or of an open one, and how many of its ids match."""
        path: list[Node] = []
        node = self._roots.get(salt)
        if node is None:
            return path, None, None, 0
        for index in range(limit // self._page_size):
            child = node.children.get(self._text(ids, index))
            if child is None:
                break
            path.append(child)
            node = child
        start = len(path) * self._page_size
        rest = ids[start : min(limit, start + self._page_size - 1)]
        best, page, best_tokens = None, None, 0
        for text, tail in node.tails.items():
            shared = _common_prefix(np.frombuffer(text, dtype=np.int32), rest)
            if shared > best_tokens:
                best, page, best_tokens = tail, tail.page, shared
        for text, open_page in node.open_tails.items():
            shared = _common_prefix(np.frombuffer(text, dtype=np.int32), rest)
            if shared > best_tokens:
                best, page, best_tokens = None, open_page, shared
        return path, best, page, best_tokens

    def _common(self, chain: _Chain, ids: np.ndarray, limit: int) -> int:
        return _common_prefix(chain.ids, ids[:limit])

    def _enter(self, page: int, text: bytes, parent: Node, *, is_tail: bool = False) -> Node:
        node = Node(page, text, parent, is_tail)
        self._nodes[id(node)] = node
        self._pool.hold_for_index(page)
        return node

    def _touch(self, path: list[Node]) -> None:
        # Deepest first: a parent is always younger than its children, so the oldest entry is a leaf.
        for node in reversed(path):
            self._tick += 1
            node.tick = self._tick
            if not node.hints:
                self._nodes.move_to_end(id(node))

    def _chain(self, key: Waiter) -> _Chain | None:
        return self._chains.get(key) or self._held_chains.get(key)

    def _touch_chain(self, key: Waiter, chain: _Chain) -> None:
        self._tick += 1
        chain.tick = self._tick
        if key in self._chains:
            self._chains.move_to_end(key)

    def _oldest_node(self) -> Node | None:
        """Return the oldest entry that can go. What is in use is passed over by making it young, so that nobody passes it again soon."""
        for _ in range(len(self._nodes)):
            node = next(iter(self._nodes.values()))
            if not (node.children or node.tails or self._pool.in_use(node.page)):
                return node
            self._touch([node])
        return None

    def _oldest_chain(self) -> Waiter | None:
        for _ in range(len(self._chains)):
            key, chain = next(iter(self._chains.items()))
            if not self._pool.in_use(chain.pages[-1]):
                return key
            self._touch_chain(key, chain)
        return None

    def _drop_with_what_is_used(self) -> int | None:
        """Drop the oldest entry whose page no row uses and all that stands behind it; return how many pages became free, None without one.

        No hint holds any. Rows keep the pages that they use: these are found no more.
        """
        if not self._pool.num_index_only:
            return None
        node = next((node for node in self._nodes.values() if not self._pool.in_use(node.page)), None)
        if node is not None:
            below = [node]
            for one in below:
                below += [*one.children.values(), *one.tails.values()]
            return sum(self._drop_node(one) for one in reversed(below))
        key = next((key for key, chain in self._chains.items() if not all(map(self._pool.in_use, chain.pages))), None)
        if key is None:
            return None
        return sum(self._shorten_chain(key) for _ in range(len(self._chains[key].pages)))

    def _drop_node(self, node: Node) -> int:
        del self._nodes[id(node)]
        for waiter in tuple(node.ends_at):
            self._leave(waiter)
        parent = node.parent
        assert parent is not None
        del (parent.tails if node.is_tail else parent.children)[node.ids]
        if parent.page == _NO_PAGE and parent.is_bare:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}
        return int(self._pool.release_from_index(node.page))

    def _shorten_chain(self, key: Waiter) -> int:
        chain = self._chains[key]
        freed = int(self._pool.release_from_index(chain.pages.pop()))
        chain.versions = chain.versions[: len(chain.pages) * self._page_size]
        chain.ids = chain.ids[: chain.versions.size]
        if not chain.pages:
            del self._chains[key]
        return freed

    def _drop_chain(self, key: Waiter) -> None:
        if key in self._held_chains:
            self._end(self._hints.pop(key, "hints_ended"))
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
