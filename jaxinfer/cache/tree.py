"""PrefixTree: computed pages by the tokens they hold, so that equal prefixes are computed once.

A trie with one page a node: an edge is the page's tokens themselves, compared in full, so no hash can
be forged, nothing is ever split, and a partial match pins exactly what it matched. The tree owns one
reference to each of its pages, every sequence one more to each page of its table: a page that only
the tree references can be evicted. Rule for duplicates: the tree's page wins, the caller's table is
rewritten to it. Never knows requests or arrays. Called by the scheduler.

A listener hears of nodes (cache/events.py), not of pages: a node is stored while it is in the tree, that
is while its TOKEN pages are (without TOKEN kinds: while it or one below it has a page). The WINDOW page of
its tokens may be gone, so a hit may be shorter than told, never longer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from jaxinfer.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Listener,
    Namespace,
    page_hash,
    root_hash,
)
from jaxinfer.cache.pool import PagePool
from jaxinfer.cache.spec import CacheSpec, Scope
from jaxinfer.errors import ConfigError


class Node:
    """One page of tokens; `pages` holds a page id for each kind (0: evicted, WINDOW kinds only).

    `hash` names it in events; 0 until a listener has heard of it.
    """

    __slots__ = ("attached", "children", "hash", "key", "pages", "parent")

    def __init__(self, parent: Node | None, key: tuple, pages: list[int]) -> None:
        self.parent = parent
        self.key = key  # the page's tokens; a root's namespace
        self.pages = pages
        self.children: dict[tuple[int, ...], Node] = {}
        self.attached = True
        self.hash = 0


class Match(NamedTuple):
    """A prefix of `length` tokens that every kind can resume from.

    pages[k] are the pages that kind k needs, of which the first is page base[k] of the sequence.
    """

    length: int
    pages: tuple[list[int], ...]
    base: tuple[int, ...]
    node: Node | None


class NodeView(NamedTuple):
    """One node as shown to people: no tokens. `parent` is its place in the list, -1 for a namespace."""

    parent: int
    children: int
    in_use: bool  # a sequence holds a page of it


class Held:
    """What one sequence holds: for each kind live pages, the first of them page `base` of the sequence.

    `node` and `depth` say how far (in pages) the sequence's own prefix stands in the tree.
    """

    __slots__ = ("base", "depth", "node", "pages")

    def __init__(self, kinds: int) -> None:
        self.pages: list[list[int]] = [[] for _ in range(kinds)]
        self.base = [0] * kinds
        self.node: Node | None = None
        self.depth = 0

    def end(self, kind: int) -> int:
        """Index of the sequence page after the last one held."""
        return self.base[kind] + len(self.pages[kind])


class PrefixTree:
    """Pages of all kinds behind one door: allocation, sharing, matching, eviction."""

    def __init__(
        self, specs: Sequence[CacheSpec], page_size: int, pools: Sequence[PagePool]
    ) -> None:
        if len(specs) != len(pools):
            raise ConfigError(f"{len(specs)} cache kinds need as many pools, not {len(pools)}")
        for spec in specs:
            if spec.scope is Scope.STATE:
                raise ConfigError(f"cache kind {spec.name!r} has scope STATE: it is not paged")
            if page_size % spec.unit:
                raise ConfigError(
                    f"page_size={page_size} is no multiple of unit={spec.unit} of kind {spec.name!r}"
                )
            if spec.scope is Scope.WINDOW and spec.window < 1:
                raise ConfigError(f"cache kind {spec.name!r} has window={spec.window}; at least 1")
        self.specs = tuple(specs)
        self.page_size = page_size
        self.pools = tuple(pools)
        # Visible tokens of each kind; 0 for TOKEN kinds, which keep everything.
        self.windows = tuple(s.window if s.scope is Scope.WINDOW else 0 for s in specs)
        self._roots: dict[Namespace, Node] = {}
        self._owner: list[dict[int, Node]] = [{} for _ in specs]
        # Pages that only the tree references, longest unused first. The order is the clock. A sequence
        # releases its last page first, so that no TOKEN page ever stands before one of its children.
        self._idle: list[OrderedDict[int, Node]] = [OrderedDict() for _ in specs]
        self._listener: Listener | None = None

    # -- pages ---------------------------------------------------------------------------------

    def evictable(self, kind: int) -> int:
        return len(self._idle[kind])

    def available(self, kind: int) -> int:
        """Pages that `allocate` can supply now."""
        return self.pools[kind].free + len(self._idle[kind])

    def cached(self, kind: int) -> int:
        """Pages in the tree, in use or not."""
        return len(self._owner[kind])

    def allocate(self, kind: int, count: int) -> list[int] | None:
        """`count` private pages, evicting exactly the shortfall; None (and no change) if impossible."""
        short = count - self.pools[kind].free
        if short > len(self._idle[kind]):
            return None
        if short > 0:
            self.evict(kind, short)
        return self.pools[kind].alloc(count)

    def take(self, kind: int, page: int) -> None:
        """Add a sequence's reference to a page."""
        if self.pools[kind].share(page) == 2:
            self._idle[kind].pop(page, None)

    def give_back(self, kind: int, page: int) -> None:
        """Drop a sequence's reference to a page."""
        if self.pools[kind].release(page) == 1 and page in self._owner[kind]:
            self._idle[kind][page] = self._owner[kind][page]

    def release(self, held: Held) -> None:
        """Drop everything that a sequence holds, last pages first, and leave `held` empty."""
        for kind, pages in enumerate(held.pages):
            for page in reversed(pages):
                self.give_back(kind, page)
        held.__init__(len(self.specs))

    def trim(self, held: Held, position: int) -> None:
        """Drop WINDOW pages that no token from `position` on can see."""
        for kind, window in enumerate(self.windows):
            if window:
                dead = self.first_page(kind, position) - held.base[kind]
                if dead > 0:
                    for page in held.pages[kind][:dead]:
                        self.give_back(kind, page)
                    del held.pages[kind][:dead]
                    held.base[kind] += dead

    def first_page(self, kind: int, position: int) -> int:
        """Index of the first page that the token at `position` (and all later ones) can see."""
        window = self.windows[kind]
        return max(0, position - window + 1) // self.page_size if window else 0

    # -- prefixes ------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Sequence[int], limit: int | None = None) -> Match:
        """The longest prefix (of at most `limit` tokens) that every kind can resume from."""
        path = self._walk(namespace, tokens, len(tokens) if limit is None else limit)
        size = self.page_size
        best = 0
        run_start = [0] * len(self.specs)  # first page of the live run that ends at the current one
        for depth, node in enumerate(path, start=1):
            good = True
            for kind, page in enumerate(node.pages):
                if not page:
                    run_start[kind] = depth
                good &= run_start[kind] <= self.first_page(kind, depth * size)
            best = depth if good else best
        kinds = range(len(self.specs))
        base = tuple(min(best, self.first_page(k, best * size)) for k in kinds)
        pages = tuple([node.pages[k] for node in path[base[k] : best]] for k in kinds)
        return Match(best * size, pages, base, path[best - 1] if best else None)

    def _walk(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> list[Node]:
        node = self._roots.get(namespace)
        path: list[Node] = []
        size = self.page_size
        for start in range(0, limit // size * size if node else 0, size):
            node = node.children.get(tuple(tokens[start : start + size]))  # type: ignore[union-attr]
            if node is None:
                break
            path.append(node)
        return path

    def lock(self, match: Match) -> Held:
        """References to everything in a match: it cannot be evicted until the Held is released."""
        held = Held(len(self.specs))
        for kind, pages in enumerate(match.pages):
            for page in pages:
                self.take(kind, page)
            held.pages[kind] = list(pages)
            held.base[kind] = match.base[kind]
        held.node = match.node
        held.depth = match.length // self.page_size
        return held

    def insert(
        self, namespace: Namespace, tokens: Sequence[int], length: int, held: Held
    ) -> list[tuple[int, int]]:
        """Publish the full pages of the first `length` tokens, whose entries have been computed.

        Where the tree has a page already, `held` is rewritten to it. Returns the (kind, sequence page)
        pairs that were rewritten.
        """
        size = self.page_size
        count = length // size
        if held.node is None or not held.node.attached:  # never inserted, or the tree was cleared
            held.node, held.depth = None, 0
        rewritten: list[tuple[int, int]] = []
        if held.depth >= count:
            return rewritten
        node = held.node or self._root(namespace)
        fresh: list[Node] = []  # what a listener hears of; nothing else hangs below a new node
        for index in range(held.depth, count):
            key = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, [0] * len(self.specs))
                if self._listener is not None:
                    fresh.append(child)
            self._merge(child, held, index, rewritten)
            node = child
        held.node, held.depth = node, count
        if fresh:
            self._tell_stored(namespace, fresh)
        return rewritten

    def _root(self, namespace: Namespace) -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, namespace, [0] * len(self.specs))
        return self._roots[namespace]

    def _merge(self, node: Node, held: Held, index: int, rewritten: list[tuple[int, int]]) -> None:
        """Let `node` and the sequence share one page of each kind."""
        for kind, theirs in enumerate(node.pages):
            place = index - held.base[kind]
            if place < 0:  # behind the window: the sequence has let go of it
                continue
            mine = held.pages[kind][place]
            if not theirs:
                node.pages[kind] = mine
                self._owner[kind][mine] = node
                self.pools[kind].share(mine)
            elif theirs != mine:
                self.take(kind, theirs)
                self.give_back(kind, mine)
                held.pages[kind][place] = theirs
                rewritten.append((kind, index))

    def top(self, limit: int) -> list[NodeView]:
        """At most `limit` nodes, those near the roots first; visits no more than these."""
        queue = deque((root, -1) for root in islice(self._roots.values(), limit))
        views: list[NodeView] = []
        while queue:
            node, parent = queue.popleft()
            used = any(
                p and pool.refs[p] > 1 for p, pool in zip(node.pages, self.pools, strict=True)
            )
            views.append(NodeView(parent, len(node.children), used))
            room = max(0, limit - len(views) - len(queue))
            place = len(views) - 1
            queue.extend((child, place) for child in islice(node.children.values(), room))
        return views

    # -- eviction ------------------------------------------------------------------------------

    def evict(self, kind: int, count: int) -> None:
        """Free the `count` longest unused pages of a kind (at most `evictable(kind)`)."""
        assert count <= len(self._idle[kind]), (
            f"{count} evictions, {len(self._idle[kind])} possible"
        )
        for _ in range(count):
            node = next(iter(self._idle[kind].values()))
            if self.windows[kind]:
                self._drop_page(node, kind)
                self._prune(node)
            else:
                self._remove(node)

    def clear(self) -> None:
        """Forget every prefix; pages that sequences still hold become their private ones."""
        for kind, owner in enumerate(self._owner):
            for page in owner:
                self.pools[kind].release(page)
            owner.clear()
            self._idle[kind].clear()
        for root in self._roots.values():
            for node in _descend(root):
                node.attached = False
        self._roots.clear()
        if self._listener is not None:
            self._listener(AllBlocksCleared())

    def _drop_page(self, node: Node, kind: int) -> None:
        page = node.pages[kind]
        node.pages[kind] = 0
        del self._owner[kind][page]
        self._idle[kind].pop(page, None)
        self.pools[kind].release(page)

    def _remove(self, node: Node) -> None:
        assert not node.children, "only leaves lose their TOKEN pages"
        for kind, page in enumerate(node.pages):
            if page:
                self._drop_page(node, kind)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Detach nodes that hold nothing and lead nowhere, upwards from `node`."""
        while not node.children and not any(node.pages):
            node.attached = False
            if node.parent is None:
                del self._roots[node.key]
                return
            if self._listener is not None:
                self._listener(BlockRemoved((node.hash,)))
            del node.parent.children[node.key]
            node = node.parent

    # -- events --------------------------------------------------------------------------------

    def set_listener(self, listener: Listener | None) -> None:
        """Tell every change from now on; first AllBlocksCleared and what is stored already."""
        self._listener = listener
        if listener is None:
            return
        listener(AllBlocksCleared())
        for namespace, root in self._roots.items():
            for node in _descend(root):
                if node is not root:
                    self._tell_stored(namespace, [node])

    def _tell_stored(self, namespace: Namespace, chain: list[Node]) -> None:
        """`chain`: nodes of which each is the parent of the next."""
        assert self._listener is not None and chain[0].parent is not None
        above = chain[0].parent
        if above.parent is None:  # a root may have come before the listener
            above.hash = root_hash(namespace)
        last = above.hash
        for node in chain:
            last = node.hash = page_hash(last, node.key)
        parent = None if above.parent is None else above.hash
        hashes, pages = tuple(n.hash for n in chain), tuple(n.key for n in chain)
        self._listener(BlockStored(hashes, parent, pages, namespace))

    # -- checks --------------------------------------------------------------------------------

    def check(self, holders: Iterable[Held] = ()) -> None:
        """Assert every invariant; `holders` are all the Held that exist outside."""
        seen: list[dict[int, Node]] = [{} for _ in self.specs]
        for root in self._roots.values():
            assert root.children, "an empty namespace was kept"
            for node in _descend(root):
                assert node.attached and (node is root or node.children or any(node.pages))
                for kind, page in enumerate(node.pages):
                    if page:
                        assert page not in seen[kind], f"page {page} stands in two nodes"
                        seen[kind][page] = node
                    else:
                        assert self.windows[kind] or node is root, "a TOKEN page is missing"
        holders = list(holders)
        for kind, pool in enumerate(self.pools):
            assert seen[kind] == self._owner[kind]
            idle = {page for page in seen[kind] if pool.refs[page] == 1}
            assert idle == set(self._idle[kind]), "evictable pages are miscounted"
            held = [page for h in holders for page in h.pages[kind]]
            pool.check([*held, *seen[kind]])


def _descend(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node
