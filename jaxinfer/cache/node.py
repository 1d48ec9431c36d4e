"""Node, Match and Held: a page of tokens in the prefix tree, a prefix found there, a sequence's holdings.

Plain records without rules of their own: only the tree and its ledger change them, and a Match is
worth nothing by itself, because the tree checks it against its nodes before it lends anything out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Node:
    """One page of tokens.

    pages[k] is the page of kind k that holds its entries (0: evicted, WINDOW kinds only); of a STATE
    kind the checkpoint slot with the state at the position where the node ends (0: none).
    `hash` names it in events; 0 until a listener has heard of it. `spared`: someone declared a breakpoint at
    its end.
    """

    __slots__ = ("attached", "children", "hash", "key", "pages", "parent", "spared")

    def __init__(self, parent: Node | None, key: tuple, pages: list[int]) -> None:
        self.parent = parent
        self.key = key  # the page's tokens; a root's namespace
        self.pages = pages
        self.children: dict[tuple[int, ...], Node] = {}
        self.attached = True
        self.hash = 0
        self.spared = False


def path_to(node: Node) -> list[Node]:
    """The nodes from below the root down to `node`: the one of sequence page i is item i."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def descend(root: Node) -> Iterator[Node]:
    """`root` and all nodes below it, parents before their children."""
    stack = [root]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


class Match(NamedTuple):
    """A prefix of `length` tokens that every kind can resume from.

    pages[k] are the pages that kind k needs, of which the first is page base[k] of the sequence; of a
    STATE kind the one checkpoint at `length`. `known` tokens (at least `length`) are as far as the
    paged kinds alone could resume: a checkpoint there would have made the hit longer. `shortened`: tokens
    by which each kind alone cut it.
    """

    length: int
    pages: tuple[list[int], ...]
    base: tuple[int, ...]
    node: Node | None
    known: int = 0
    shortened: tuple[int, ...] = ()


class Held:
    """What one sequence holds: for each kind live pages, the first of them page `base` of the sequence.

    Attributes:
        pages: of a STATE kind the working slot, which the sequence's steps write, or nothing.
        source: the slot of each STATE kind that the next step reads; 0: none, it starts from zeros.
            It holds a reference of its own unless it is the working slot.
        pending: (position, slot of each kind or 0) of checkpoints that steps in flight write, not in
            the tree yet; one reference a slot.
        node, depth: how far (in pages) the sequence's own prefix stands in the tree.
    """

    __slots__ = ("base", "depth", "node", "pages", "pending", "source")

    def __init__(self, kinds: int) -> None:
        self.pages: list[list[int]] = [[] for _ in range(kinds)]
        self.base = [0] * kinds
        self.source = [0] * kinds
        self.pending: list[tuple[int, list[int]]] = []
        self.node: Node | None = None
        self.depth = 0

    def end(self, kind: int) -> int:
        """Index of the sequence page after the last one held (paged kinds)."""
        return self.base[kind] + len(self.pages[kind])

    def references(self, kind: int) -> list[int]:
        """Every reference of kind `kind` that this stands for, one by one."""
        source, working = self.source[kind], self.pages[kind]
        pending = [slots[kind] for _, slots in self.pending if slots[kind]]
        return [*working, *pending, *([source] if source and source not in working else [])]
