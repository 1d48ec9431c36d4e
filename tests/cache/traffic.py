"""Random work for a PrefixTree, and a naive index of what its events say; shared by tests of events."""

from __future__ import annotations

from hypothesis import strategies as st

from jaxinfer.cache import Held, PrefixTree
from jaxinfer.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from jaxinfer.cache.node import Node, descend
from tests.cache.test_tree import compute

Prefix = tuple[tuple[object, ...], tuple[int, ...]]

namespaces = st.sampled_from([("",), ("salt",), ("", "long")])
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("run"), namespaces, prompts),
        st.tuples(st.sampled_from(["release", "trim"]), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 1), st.integers(1, 4)),
        st.just(("clear",)),
    ),
    max_size=25,
)


class Traffic:
    """Does operations on a tree, as sequences would."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.live: list[tuple[Held, int]] = []

    def do(self, operation: tuple) -> None:
        tree = self.tree
        match operation:
            case ("run", namespace, tokens):
                pages = len(tokens) // tree.page_size + 1
                if all(tree.available(kind) >= pages for kind in range(len(tree.specs))):
                    self.live.append((compute(tree, tokens, namespace), len(tokens)))
            case ("release", index) if self.live:
                tree.release(self.live.pop(index % len(self.live))[0])
            case ("trim", index) if self.live:
                tree.trim(*self.live[index % len(self.live)])
            case ("evict", kind, count):
                kind %= len(tree.specs)
                tree.evict(kind, min(count, tree.evictable(kind)))
            case ("clear",):
                tree.clear()


def stored_in(tree: PrefixTree) -> set[Prefix]:
    """Namespace and tokens from the start, for every node of the tree."""
    nodes = [n for root in tree._roots.values() for n in descend(root) if n is not root]
    return {_prefix(node) for node in nodes}


def _prefix(node: Node) -> Prefix:
    tokens: tuple[int, ...] = ()
    while node.parent is not None:
        tokens, node = node.key + tokens, node.parent
    return node.key, tokens


class Index:
    """What a router knows: id -> (id of its parent, namespace, tokens from the start)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, Prefix]] = {}

    def apply(self, event: Event) -> None:
        match event:
            case BlockStored():
                parent = event.parent
                _, (_, tokens) = self.blocks[parent] if parent else (None, ((), ()))
                assert parent is None or self.blocks[parent][1][0] == event.namespace
                assert len(event.hashes) == len(event.pages) > 0
                for name, page in zip(event.hashes, event.pages, strict=True):
                    assert name and -(2**63) <= name < 2**63 and name not in self.blocks
                    assert len(page) == event.block_size
                    tokens += page
                    self.blocks[name] = (parent, (event.namespace, tokens))
                    parent = name
            case BlockRemoved():
                for name in event.hashes:
                    del self.blocks[name]
                    assert all(parent != name for parent, _ in self.blocks.values())
            case AllBlocksCleared():
                self.blocks.clear()

    def stored(self) -> set[Prefix]:
        return {prefix for _, prefix in self.blocks.values()}
