"""A simulated device and a brute-force oracle for random work on a PrefixTree.

The device keeps for each page and slot what was computed into it, as the tokens that it depends on, so a
wrong hit shows as wrong content. The oracle keeps every prefix in the tree and tries all lengths.
"""

from __future__ import annotations

from random import Random

from jaxinfer.cache import CacheSpec, Held, Match, PagePool, PrefixTree, Scope, SlotPool

Prefix = tuple[tuple[object, ...], tuple[int, ...]]


def kind(text: str) -> CacheSpec:
    """ "t2": TOKEN of unit 2; "w5": WINDOW of 5; "s": STATE."""
    scope = {"t": Scope.TOKEN, "w": Scope.WINDOW, "s": Scope.STATE}[text[0]]
    number = int(text[1:] or 1)
    unit, window = (number, 0) if scope is Scope.TOKEN else (1, number)
    return CacheSpec(text, scope, (0,), (), unit, window if scope is Scope.WINDOW else 0)


def make(
    mix: str, size: int = 4, pages: int = 64, slots: int = 32, max_states: int = 0
) -> PrefixTree:
    """A tree of the kinds named in `mix`, with pools of that many usable pages and slots."""
    specs = [kind(text) for text in mix.split()]
    pools = [PagePool(pages + 1) if s.paged else SlotPool(slots + 1) for s in specs]
    return PrefixTree(specs, size, pools, max_states)


def contents(tree: PrefixTree) -> dict[Prefix, list[int]]:
    """The pages of every node, by namespace and tokens from the start."""
    out = {}
    for namespace, root in tree._roots.items():
        stack = [((), child) for child in root.children.values()]
        while stack:
            before, node = stack.pop()
            tokens = before + node.key
            out[namespace, tokens] = list(node.pages)
            stack += [(tokens, child) for child in node.children.values()]
    return out


class Oracle:
    """What can be resumed given `nodes`, found by trying every length."""

    def __init__(self, tree: PrefixTree, nodes: dict[Prefix, list[int]]) -> None:
        self.specs, self.size, self.nodes = tree.specs, tree.page_size, nodes

    def reach(self, ns: tuple[object, ...], tokens: list[int], kinds: list[int]) -> int:
        """The largest length known to the tree at which these kinds can resume."""
        for h in range(len(tokens) // self.size * self.size, 0, -self.size):
            known = (ns, tuple(tokens[:h])) in self.nodes
            if known and all(self._resumes(ns, tokens, h, k) for k in kinds):
                return h
        return 0

    def _resumes(self, ns: tuple[object, ...], tokens: list[int], h: int, kind: int) -> bool:
        spec = self.specs[kind]
        if spec.scope is Scope.STATE:
            return self.nodes[ns, tuple(tokens[:h])][kind] != 0
        first = max(0, h - (spec.window - 1)) if spec.window else 0
        ends = {(position // self.size + 1) * self.size for position in range(first, h)}
        return all(self.nodes[ns, tuple(tokens[:end])][kind] for end in ends)

    def check(self, match: Match, ns: tuple[object, ...], tokens: list[int]) -> list[int]:
        """Compare a match; by kind the tokens that this kind alone cut off."""
        every = list(range(len(self.specs)))
        hit = self.reach(ns, tokens, every)
        assert match.length == hit
        assert match.known == self.reach(ns, tokens, [k for k in every if self.specs[k].paged])
        others = [self.reach(ns, tokens, [o for o in every if o != k]) for k in every]
        return [other - hit for other in others]


class Device:
    """What each page and slot holds: (namespace, the tokens from the start that went into it)."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.memory: list[dict[int, Prefix]] = [{} for _ in tree.specs]

    def check(self, match: Match, ns: tuple[object, ...], tokens: list[int]) -> None:
        """What a match offers must be what these tokens compute."""
        size = self.tree.page_size
        for k, pages in enumerate(match.pages):
            if self.tree.specs[k].paged:
                assert match.base[k] + len(pages) == match.length // size
                ends = [(match.base[k] + i + 1) * size for i in range(len(pages))]
            else:
                ends = [match.length] if match.length else []
            held = [self.memory[k][page] for page in pages]
            assert held == [(ns, tuple(tokens[:end])) for end in ends]

    def write(self, k: int, page: int, content: Prefix) -> None:
        assert self.tree.pools[k].refs[page] == 1 and page not in self.tree._owner[k]
        self.memory[k][page] = content


class Work:
    """One sequence: `computed` tokens are planned (and, on this device, done), `committed` are known to be."""

    def __init__(self, device: Device, ns: tuple[object, ...], tokens: list[int]) -> None:
        self.device, self.tree, self.ns, self.tokens = device, device.tree, ns, tokens
        self.held = Held(len(self.tree.specs))
        self.computed = self.committed = 0

    def start(self, match: Match) -> bool:
        """Lock a match; False, with nothing held, if there is no slot to work in."""
        self.held = self.tree.lock(match)
        self.computed = self.committed = match.length
        opened = self.tree.open_states(self.held)
        if not opened:
            self.tree.release(self.held)
        return opened

    def step(self, rng: Random, length: int) -> bool:
        """Compute some tokens, keeping checkpoints at random pages; False if pages run out."""
        tree, held, size = self.tree, self.held, self.tree.page_size
        start, end = self.computed, min(self.computed + length, len(self.tokens))
        more = [-(-end // size) - held.end(k) if s.paged else 0 for k, s in enumerate(tree.specs)]
        if any(tree.available(k) < n for k, n in enumerate(more)):
            return False
        for k, n in enumerate(more):
            held.pages[k] += tree.allocate(k, max(0, n)) or []
        settled = [held.source[k] == held.pages[k][0] for k in tree.state_kinds]
        if (
            settled
            and all(settled)
            and start
            and start % size == 0
            and settled
            and rng.random() < 0.5
        ):
            tree.turn_checkpoint(held, start)
        ends = [p for p in range(start + 1, end + 1) if settled and p % size == 0]
        marks = [p for p in ends if rng.random() < 0.5]
        kept = {p: slots for p in marks if (slots := tree.reserve_checkpoint(held, p)) is not None}
        self._compute(start, end, kept)
        tree.settle_source(held)
        if end in kept:
            tree.read_from_pending(held)
        self.computed = end
        return True

    def _compute(self, start: int, end: int, kept: dict[int, tuple[int, ...]]) -> None:
        tree, held, device, size = self.tree, self.held, self.device, self.tree.page_size
        read = {k: device.memory[k].get(held.source[k], (self.ns, ())) for k in tree.state_kinds}
        for content in read.values():
            assert content == (self.ns, tuple(self.tokens[:start])), "a step reads a wrong state"
        for k, pages in enumerate(held.pages):
            if tree.specs[k].paged:
                for index in range(start // size, -(-end // size)):
                    content = tuple(self.tokens[: min(end, (index + 1) * size)])
                    device.write(k, pages[index - held.base[k]], (self.ns, content))
        for position, slots in kept.items():
            for k, slot in zip(tree.state_kinds, slots, strict=True):
                device.write(k, slot, (self.ns, tuple(self.tokens[:position])))
        if end not in kept:
            for k in tree.state_kinds:
                device.write(k, held.pages[k][0], (self.ns, tuple(self.tokens[:end])))

    def commit(self, position: int) -> None:
        self.committed = position
        self.tree.insert(self.ns, self.tokens, position, self.held)

    def check(self) -> None:
        """All that is held is still what this sequence computed or hit."""
        size, memory = self.tree.page_size, self.device.memory
        for k, pages in enumerate(self.held.pages):
            if self.tree.specs[k].paged:
                for i, page in enumerate(pages[: self.computed // size - self.held.base[k]]):
                    end = (self.held.base[k] + i + 1) * size
                    assert memory[k][page] == (self.ns, tuple(self.tokens[:end]))
        for position, slots in self.held.pending:
            for k in self.tree.state_kinds:
                assert memory[k][slots[k]] == (self.ns, tuple(self.tokens[:position]))
