"""PrefixTree: the rules of paged kinds one by one (test_oracle.py has them all at once)."""

from __future__ import annotations

import random

import pytest

from jaxinfer.cache import CacheSpec, Held, PagePool, PrefixTree, Scope, SlotPool
from jaxinfer.errors import ConfigError

NS: tuple[object, ...] = ("weights", 1)


def spec(window: int = 0, unit: int = 1) -> CacheSpec:
    scope = Scope.WINDOW if window else Scope.TOKEN
    return CacheSpec(f"kind{window}", scope, (0,), (), unit, window)


def make(windows: tuple[int, ...] = (0,), size: int = 4, pages: int = 64) -> PrefixTree:
    return PrefixTree([spec(w) for w in windows], size, [PagePool(pages) for _ in windows])


def compute(tree: PrefixTree, tokens: list[int], namespace: tuple[object, ...] = NS) -> Held:
    """Do what a sequence does: match, take pages for the rest, compute all, publish."""
    held = tree.lock(tree.match(namespace, tokens, limit=len(tokens) - 1))
    for kind in range(len(tree.specs)):
        more = tree.allocate(kind, -(-len(tokens) // tree.page_size) - held.end(kind))
        assert more is not None
        held.pages[kind] += more
    tree.insert(namespace, tokens, len(tokens), held)
    return held


def test_full_pages_are_found_again_and_the_cut_leaves_a_token_to_compute():
    tree = make()
    tokens = list(range(11))
    held = compute(tree, tokens)
    assert tree.match(NS, tokens).length == 8
    assert tree.match(NS, tokens[:8]).length == 8
    assert tree.match(NS, tokens[:8], limit=7).length == 4
    assert tree.match(NS, tokens, limit=0).length == tree.match(NS, tokens, limit=-1).length == 0
    assert tree.match(NS, tokens).pages == (held.pages[0][:2],)
    tree.check([held])
    tree.release(held)
    tree.check()
    assert tree.evictable(0) == tree.cached(0) == 2


def test_namespaces_never_meet():
    """R-PFX-02: adapter, weights version and salt are parts of the key."""
    tree = make()
    tokens = list(range(9))
    spaces = [("w1", None, None), ("w1", "a", None), ("w1", "b", None), ("w2", "a", None)]
    for space in [*spaces, ("w1", "a", "salt"), ("w1", ("a", "salt"))]:
        assert tree.match(space, tokens).length == 0
        tree.release(compute(tree, tokens, space))
        assert tree.match(space, tokens).length == 8
    tree.check()


def test_tokens_with_equal_python_hashes_do_not_hit():
    """R-PFX-03: hash(-1) == hash(-2) and hash(0) == hash(2**61 - 1); edges compare tokens in full."""
    tree = make()
    for mine, other in (([-1] * 4, [-2] * 4), ([0] * 4, [2**61 - 1] * 4)):
        assert hash(tuple(mine)) == hash(tuple(other))
        tree.release(compute(tree, [*mine, 1]))
        assert tree.match(NS, [*other, 1]).length == 0


def test_a_duplicate_is_given_up_for_the_page_in_the_tree():
    tree = make()
    tokens = list(range(8))
    first, second = Held(1), Held(1)
    for held in (first, second):
        held.pages[0] = tree.allocate(0, 2) or []
    old = list(second.pages[0])
    assert tree.insert(NS, tokens, 8, first) == []
    assert tree.insert(NS, tokens, 8, second) == [(0, 0), (0, 1)]
    assert second.pages == first.pages
    assert all(tree.pools[0].refs[page] == 0 for page in old)
    tree.check([first, second])


def test_only_what_matched_is_pinned():
    """R-PFX-05: a match that ends inside a known prefix leaves the rest evictable."""
    tree = make()
    tree.release(compute(tree, list(range(16))))
    match = tree.match(NS, [*range(8), 99, 99, 99, 99])
    held = tree.lock(match)
    assert match.length == 8 and tree.evictable(0) == 2
    tree.evict(0, 2)
    assert tree.match(NS, list(range(16))).length == 8
    with pytest.raises(AssertionError):
        tree.evict(0, 1)
    tree.check([held])


def test_eviction_takes_the_longest_unused_leaf_and_exactly_the_shortfall():
    tree = make(pages=9)
    old, new = list(range(8)), list(range(100, 108))
    tree.release(compute(tree, old))
    tree.release(compute(tree, new))
    tree.release(tree.lock(tree.match(NS, old)))  # used again: now `new` is the older one
    assert tree.pools[0].free == 4
    pages = tree.allocate(0, 5)
    assert pages is not None and tree.cached(0) == 3
    assert tree.match(NS, old).length == 8 and tree.match(NS, new).length == 4
    assert tree.allocate(0, 4) is None
    assert tree.cached(0) == 3


def test_window_pages_behind_the_window_may_be_gone():
    """R-PFX-06: a hit needs all TOKEN pages, but WINDOW pages only for the last W - 1 tokens."""
    tree = make((0, 6))
    tokens = list(range(16))
    held = compute(tree, tokens)
    tree.trim(held, 16)
    assert held.base == [0, 2] and tree.evictable(1) == 2
    tree.evict(1, 2)
    match = tree.match(NS, tokens)
    assert match.length == 16 and match.base == (0, 2) and len(match.pages[1]) == 2
    assert tree.match(NS, tokens, limit=12).length == 0  # tokens 7..11 need page 1
    tree.check([held])
    tree.release(held)
    tree.evict(1, 1)
    assert tree.match(NS, tokens).length == 0 and tree.cached(0) == 4
    tree.check()


def test_a_tombstone_is_filled_again():
    tree = make((0, 4))
    tokens = list(range(8))
    tree.release(compute(tree, tokens))
    tree.evict(1, 2)
    assert tree.match(NS, tokens).length == 0
    tree.release(compute(tree, tokens))
    assert tree.match(NS, tokens).length == 8
    tree.check()


def test_evicting_a_token_page_frees_the_window_page_of_the_same_tokens():
    tree = make((0, 4))
    tree.release(compute(tree, list(range(8))))
    tree.evict(0, 2)
    assert [pool.free for pool in tree.pools] == [63, 63]
    tree.check()


def test_clear_leaves_running_sequences_their_pages():
    tree = make()
    tokens = list(range(12))
    held = compute(tree, tokens)
    tree.clear()
    tree.check([held])
    assert tree.match(NS, tokens).length == 0 and tree.cached(0) == 0
    held.pages[0] += tree.allocate(0, 1) or []
    tree.insert(NS, [*tokens, 1, 2, 3, 4], 16, held)
    assert tree.match(NS, [*tokens, 1, 2, 3, 4]).length == 16
    tree.release(held)
    tree.check()


@pytest.mark.parametrize("size", [1, 16])
def test_flush_frees_everything_after_a_thousand_prompts(size):
    """R-PFX-05."""
    rng, tree = random.Random(size), make((0, 3 * size), size, 4000)
    for _ in range(1000):
        length = rng.randrange(1, 6) * size + rng.randrange(size)
        tree.release(compute(tree, [rng.randrange(2) for _ in range(length)]))
    tree.check()
    for kind in (1, 0):  # the TOKEN pages would take the WINDOW pages with them
        assert tree.cached(kind) == tree.evictable(kind) > 0
        tree.evict(kind, tree.evictable(kind))
    assert all(pool.free == pool.usable for pool in tree.pools)
    tree.check()


def test_what_cannot_work_is_refused():
    state = CacheSpec("recurrent", Scope.STATE, (0,), ())
    with pytest.raises(ConfigError, match="'recurrent' of scope state needs a SlotPool"):
        PrefixTree([state], 4, [PagePool(4)])
    with pytest.raises(ConfigError, match="'kind0' of scope token needs a PagePool"):
        PrefixTree([spec()], 4, [SlotPool(4)])
    with pytest.raises(ConfigError, match="max_states=-1"):
        PrefixTree([state], 4, [SlotPool(4)], max_states=-1)
    with pytest.raises(ConfigError, match="no multiple of unit=3"):
        PrefixTree([spec(unit=3)], 4, [PagePool(4)])
    with pytest.raises(ConfigError, match="2 cache kinds"):
        PrefixTree([spec(), spec(4)], 4, [PagePool(4)])
    no_window = CacheSpec("w", Scope.WINDOW, (0,), ())
    with pytest.raises(ConfigError, match="window=0"):
        PrefixTree([no_window], 4, [PagePool(4)])
