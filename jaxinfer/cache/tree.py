"""PrefixTree: computed pages by the tokens they hold, so that equal prefixes are computed once.

A trie with one page a node: an edge is the page's tokens themselves, compared in full, so no hash can
be forged, nothing is ever split, and a partial match pins exactly what it matched. A checkpoint of a
STATE kind stands in the node at whose end it was taken, and a hit ends at one or nowhere. Rule for
duplicates: the tree's page wins, the caller's table is rewritten to it. Never knows requests or arrays.
Called by the scheduler.

A listener hears of nodes (cache/events.py), not of pages: a node is stored while it is in the tree, that
is while its TOKEN pages are (without TOKEN kinds: while it or one below it has a page or checkpoint).
The WINDOW page of its tokens may be gone, and so may the checkpoint: a hit may be shorter than told,
never longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxinfer.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Listener,
    Namespace,
    page_hash,
    root_hash,
)
from jaxinfer.cache.inspect import NodeView, check_holders, check_nodes, views
from jaxinfer.cache.ledger import Ledger
from jaxinfer.cache.node import Held, Match, Node, descend, path_to
from jaxinfer.cache.pool import Pool
from jaxinfer.cache.resume import depths, needed
from jaxinfer.cache.spec import CacheSpec, Scope
from jaxinfer.errors import ConfigError

__all__ = ["Held", "Match", "Node", "NodeView", "PrefixTree"]


class PrefixTree(Ledger):
    """What can be computed once, by namespace and tokens: matching, publishing, eviction.

    max_states: checkpoints of each STATE kind that a publication leaves on its path from the root, as
        far as the others are not protected (see `insert`); 0: no limit.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        page_size: int,
        pools: Sequence[Pool],
        max_states: int = 0,
    ) -> None:
        super().__init__(specs, page_size, pools)
        if max_states < 0:
            raise ConfigError(f"max_states={max_states} is negative; 0 means no limit")
        self.max_states = max_states
        self._roots: dict[Namespace, Node] = {}
        self._listener: Listener | None = None
        self._token_kinds = tuple(k for k, s in enumerate(specs) if s.scope is Scope.TOKEN)

    # -- prefixes ------------------------------------------------------------------------------

    def match(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        limit: int | None = None,
    ) -> Match:
        """The longest prefix (of at most `limit` tokens) that every kind can resume from.

        TOKEN kinds need all its pages, WINDOW kinds the last window, STATE kinds a checkpoint exactly at
        its end. Enters nothing in the counters, see `count`.
        """
        size = self.page_size
        path = self._walk(namespace, tokens, len(tokens) if limit is None else limit)
        best, known, others = depths(self.specs, path, size)
        del path[best:]
        nodes = [needed(spec, path, size) for spec in self.specs]
        pages = tuple([node.pages[k] for node in mine] for k, mine in enumerate(nodes))
        starts = (best - len(mine) for mine in nodes)
        base = tuple(n if s.paged else 0 for n, s in zip(starts, self.specs, strict=True))
        shortened = tuple([max(0, depth - best) * size for depth in others])
        last = path[-1] if path else None
        return Match(best * size, pages, base, last, known * size, shortened)

    def count(self, match: Match) -> None:
        """Enter in the counters what cut short a match that is used."""
        for kind, tokens in enumerate(match.shortened):
            self._counters[kind].shortened += tokens

    def _walk(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> list[Node]:
        node = self._roots.get(namespace)
        path: list[Node] = []
        if node is None:
            return path
        size = self.page_size
        tokens = tuple(tokens[: max(0, limit)])
        for start in range(0, len(tokens) // size * size, size):
            node = node.children.get(tokens[start : start + size])
            if node is None:
                break
            path.append(node)
        return path

    def lock(self, match: Match) -> Held:
        """References to everything in a match: it cannot be evicted until the Held is released.

        Of STATE kinds they are the source's; `open_states` gives the working slots. Only the match's node
        counts: RuntimeError (and no change) if not all kinds can resume there, for example because
        something was evicted since.
        """
        held = Held(len(self.specs))
        if match.node is None:
            return held
        path = path_to(match.node)
        nodes = [needed(spec, path, self.page_size) for spec in self.specs]
        for kind, mine in enumerate(nodes):
            owner = self._owner[kind]
            if not all(owner.get(node.pages[kind]) is node for node in mine):
                raise RuntimeError(
                    f"kind {self.specs[kind].name!r} cannot resume after {len(path)} pages: the tree has "
                    "changed since it was matched; match again"
                )
        for kind, mine in enumerate(nodes):
            pages = [node.pages[kind] for node in mine]
            for page in pages:
                self.take(kind, page)
            if self.specs[kind].paged:
                held.pages[kind], held.base[kind] = pages, len(path) - len(pages)
            else:
                held.source[kind] = pages[0]
        held.node, held.depth = match.node, len(path)
        return held

    def insert(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        length: int,
        held: Held,
        spared: Iterable[int] = (),
    ) -> list[tuple[int, int]]:
        """Publish what the first `length` tokens left, whose entries have been computed.

        These are their full pages and the pending checkpoints up to there. Where the tree has a page
        already, `held` is rewritten to it; where it has a checkpoint, ours is given up. Returns the
        (kind, sequence page) pairs that were rewritten. Beyond max_states the shallowest checkpoints
        above a new one go, but none in use, at a branch point or at a position that this or an earlier
        publication gave as `spared`.
        """
        if held.node is None or not held.node.attached:  # never inserted, or the tree was cleared
            held.node, held.depth = None, 0
        rewritten: list[tuple[int, int]] = []
        count = length // self.page_size
        ready = [p for p in held.pending if p[0] <= length]
        if held.depth < count:
            count = self._worthwhile(count, held, ready)
            if held.depth < count:
                self._grow(namespace, tokens, count, held, rewritten)
        if ready:
            assert held.node is not None
            path = path_to(held.node)
            for position in spared:
                if self.page_size <= position <= held.depth * self.page_size:
                    path[position // self.page_size - 1].spared = True
            for position, slots in ready:
                self._publish(path[: position // self.page_size], slots)
            del held.pending[: len(ready)]
        return rewritten

    def _worthwhile(self, count: int, held: Held, ready: list[tuple[int, list[int]]]) -> int:
        """How many of the first `count` pages have something to publish in them or below them."""
        windows = (w and base < count for w, base in zip(self.windows, held.base, strict=True))
        if self._token_kinds or any(windows):
            return count
        return ready[-1][0] // self.page_size if ready else 0

    def _grow(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        count: int,
        held: Held,
        rewritten: list[tuple[int, int]],
    ) -> None:
        """Publish the pages from held.depth to `count`."""
        size, first = self.page_size, held.depth
        node = held.node or self._root(namespace)
        fresh: list[Node] = []  # what a listener hears of; nothing else hangs below a new node
        fed = tuple(tokens[first * size : count * size])
        for index in range(first, count):
            key = fed[(index - first) * size : (index - first + 1) * size]
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

    def _root(self, namespace: Namespace) -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, namespace, [0] * len(self.specs))
        return self._roots[namespace]

    def _merge(self, node: Node, held: Held, index: int, rewritten: list[tuple[int, int]]) -> None:
        """Let `node` and the sequence share one page of each paged kind."""
        for kind, theirs in enumerate(node.pages):
            if kind in self.state_kinds:
                continue
            place = index - held.base[kind]
            if place < 0:  # behind the window: the sequence has let go of it
                continue
            mine = held.pages[kind][place]
            if not theirs:
                node.pages[kind] = mine
                self._owner[kind][mine] = node
                self.pools[kind].share(mine)
                self._counters[kind].published += 1
            elif theirs != mine:
                self.take(kind, theirs)
                self.give_back(kind, mine)
                held.pages[kind][place] = theirs
                rewritten.append((kind, index))
                self._counters[kind].duplicates += 1

    def _publish(self, path: list[Node], slots: list[int]) -> None:
        """Give the sequence's reference to checkpoints at the end of `path` to the tree, or give it up."""
        node = path[-1]
        for kind in self.state_kinds:
            slot, counters = slots[kind], self._counters[kind]
            if node.pages[kind]:
                self.give_back(kind, slot)
                counters.duplicates += 1
                continue
            node.pages[kind] = slot
            self._owner[kind][slot] = node
            if self.pools[kind].refs[slot] == 1:
                self._idle[kind][slot] = node
            counters.published += 1
            if self.max_states:
                self._thin(path, kind)

    def _thin(self, path: list[Node], kind: int) -> None:
        """Drop the shallowest checkpoints above the end of `path` until max_states are left on it."""
        marked = [node for node in path if node.pages[kind]]
        excess = len(marked) - self.max_states
        for node in marked[:-1]:
            if excess <= 0:
                break
            inner = len(node.children) < 2 and not node.spared
            if inner and node.pages[kind] in self._idle[kind]:
                self._drop_page(node, kind)
                self._counters[kind].thinned += 1
                excess -= 1

    def inspect(self, limit: int) -> list[NodeView]:
        """At most `limit` nodes, those near the roots first; visits no more than these."""
        return views(self._roots.values(), self.specs, self.pools, self.page_size, limit)

    # -- eviction ------------------------------------------------------------------------------

    def evict(self, kind: int, count: int) -> None:
        """Free the `count` longest unused pages of a kind (at most `evictable(kind)`)."""
        assert count <= len(self._idle[kind]), (
            f"{count} evictions, {len(self._idle[kind])} possible"
        )
        for _ in range(count):
            node = next(iter(self._idle[kind].values()))
            if kind in self._token_kinds:
                self._remove(node)
            else:  # the rest of the node stays
                self._drop_page(node, kind)
                self._counters[kind].evicted += 1
                self._prune(node)

    def drop_checkpoint(self, namespace: Namespace, tokens: Sequence[int], kind: int) -> bool:
        """Forget the checkpoint at the end of `tokens`; False if there is none. The pages stay.

        A sequence that reads it goes on doing so: the slot is then its own.
        """
        assert kind in self.state_kinds, f"kind {kind} has no checkpoints"
        path = self._walk(namespace, tokens, len(tokens))
        if not path or len(path) * self.page_size != len(tokens) or not path[-1].pages[kind]:
            return False
        self._drop_page(path[-1], kind)
        self._prune(path[-1])
        return True

    def clear(self) -> None:
        """Forget every prefix; pages that sequences still hold become their private ones."""
        for kind, owner in enumerate(self._owner):
            for page in owner:
                self.pools[kind].release(page)
            owner.clear()
            self._idle[kind].clear()
        for root in self._roots.values():
            for node in descend(root):
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
                self._counters[kind].evicted += 1
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
            for node in descend(root):
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
        holders = list(holders)
        check_nodes(self._roots.values(), self.specs, self._owner)
        check_holders(holders, self.specs, self.page_size)
        for kind, pool in enumerate(self.pools):
            owned = self._owner[kind]
            idle = {page: node for page, node in owned.items() if pool.refs[page] == 1}
            assert idle == dict(self._idle[kind]), "evictable pages are miscounted"
            pool.check([*(page for h in holders for page in h.references(kind)), *owned])
