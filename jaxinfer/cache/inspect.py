"""A prefix tree as seen from outside: what people may see of its nodes, and whether all of it is sound.

Views never show tokens. The checks visit everything, so they are for tests and `Scheduler.check`.
Changes nothing. Called by the prefix tree only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from jaxinfer.cache.node import Held, Node, descend
from jaxinfer.cache.pool import Pool
from jaxinfer.cache.spec import CacheSpec, Scope


class NodeView(NamedTuple):
    """One node as shown to people: no tokens.

    Attributes:
        parent: its place in the list, -1 for a namespace. children: how many nodes hang below it.
        in_use: a sequence holds a page of it. depth: tokens from the start to its end.
        states: names of the STATE kinds with a checkpoint at its end.
        pages: names of the paged kinds that have its entries.
        locks: references that sequences hold to all of these.
    """

    parent: int
    children: int
    in_use: bool
    depth: int = 0
    states: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    locks: int = 0


def views(
    roots: Iterable[Node], specs: Sequence[CacheSpec], pools: Sequence[Pool], size: int, limit: int
) -> list[NodeView]:
    """At most `limit` nodes, those near the roots first; visits no more than these."""
    queue = deque((root, -1, 0) for root in islice(roots, limit))
    out: list[NodeView] = []
    while queue:
        node, parent, depth = queue.popleft()
        there = [
            (s, pool.refs[p]) for s, pool, p in zip(specs, pools, node.pages, strict=True) if p
        ]
        locks = sum(refs - 1 for _, refs in there)
        states = tuple(spec.name for spec, _ in there if not spec.paged)
        pages = tuple(spec.name for spec, _ in there if spec.paged)
        room = max(0, limit - len(out) - 1 - len(queue))
        below = islice(node.children.values(), room)
        queue.extend((child, len(out), depth + size) for child in below)
        out.append(NodeView(parent, len(node.children), locks > 0, depth, states, pages, locks))
    return out


def check_nodes(
    roots: Iterable[Node], specs: Sequence[CacheSpec], owner: Sequence[Mapping[int, Node]]
) -> None:
    """Assert that nodes hang together, hold what their kinds promise, and are owned as recorded."""
    seen: list[dict[int, Node]] = [{} for _ in specs]
    for root in roots:
        assert root.children and not any(root.pages), "an empty namespace was kept"
        for node in descend(root):
            assert node.attached and (node is root or node.children or any(node.pages))
            assert all(child.parent is node for child in node.children.values())
            for kind, page in enumerate(node.pages):
                if page:
                    assert page not in seen[kind], f"page {page} stands in two nodes"
                    seen[kind][page] = node
                else:
                    whole = specs[kind].scope is Scope.TOKEN and node is not root
                    assert not whole, "a TOKEN page is missing"
    assert seen == list(owner), "the tree owns other pages than stand in its nodes"


def check_holders(holders: Iterable[Held], specs: Sequence[CacheSpec], size: int) -> None:
    """Assert that what sequences hold of STATE kinds has the form that the ledger keeps."""
    for held in holders:
        positions = [position for position, _ in held.pending]
        assert positions == sorted(set(positions)) and not any(p % size for p in positions)
        for kind, spec in enumerate(specs):
            slots = [pending[kind] for _, pending in held.pending]
            if spec.paged:
                assert not any(slots) and not held.source[kind], f"{spec.name} has no slots"
            else:
                assert all(slots) and len(set(slots)) == len(slots)
                assert len(held.pages[kind]) <= 1 and not held.base[kind]
                assert not set(slots) & set(held.pages[kind]), "a pending checkpoint is written"
