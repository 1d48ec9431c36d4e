"""STATE kinds in the prefix tree, rule by rule: checkpoints, working slots, sources, limits.

Positions are tokens, the page is 4 tokens; kind 0 is TOKEN and kind 1 STATE unless a test says otherwise.
"""

from __future__ import annotations

import pytest

from jaxinfer.cache import Held, KindCounters, Match, PrefixTree
from jaxinfer.cache.events import Event
from tests.cache.oracle import make
from tests.cache.traffic import Index, stored_in

NS: tuple[object, ...] = ("weights", 1)
TOKENS = list(range(40))


def start(tree: PrefixTree, tokens: list[int], hit: int | None = None) -> Held:
    """A sequence at its hit, with working slots and pages for all its tokens."""
    match = tree.match(NS, tokens, limit=len(tokens) - 1)
    assert hit is None or match.length == hit
    held = tree.lock(match)
    assert tree.open_states(held)
    for kind, spec in enumerate(tree.specs):
        if spec.paged:
            pages = tree.allocate(kind, -(-len(tokens) // tree.page_size) - held.end(kind))
            assert pages is not None
            held.pages[kind] += pages
    return held


def compute(
    tree: PrefixTree, tokens: list[int], *checkpoints: int, spared: tuple[int, ...] = ()
) -> Held:
    """One prefill step over all tokens that keeps these checkpoints, committed."""
    held = start(tree, tokens)
    for position in checkpoints:
        assert tree.reserve_checkpoint(held, position) is not None
    tree.settle_source(held)
    tree.insert(NS, tokens, len(tokens), held, spared)
    return held


def leave(tree: PrefixTree, tokens: list[int], *checkpoints: int) -> None:
    tree.release(compute(tree, tokens, *checkpoints))


def marks(tree: PrefixTree) -> list[int]:
    """Depths of the checkpoints in the tree, by the public view."""
    return sorted(view.depth for view in tree.inspect(1000) if view.states)


def test_a_hit_ends_at_a_checkpoint_or_nowhere():
    """R-HYB-01: for each cut point the deepest checkpoint below it, and nothing once it is gone."""
    tree = make("t s")
    leave(tree, TOKENS[:26], 8, 20)
    for cut in range(41):
        match = tree.match(NS, TOKENS[:cut])
        assert match.length == (20 if cut >= 20 else 8 if cut >= 8 else 0)
        assert match.known == min(24, cut // 4 * 4)
        assert len(match.pages[0]) == match.length // 4
        assert len(match.pages[1]) == (match.length > 0)
    for tokens in (TOKENS[:21], TOKENS[:24], [*TOKENS[:20], 0, 0, 0, 0], TOKENS[4:24], []):
        assert not tree.drop_checkpoint(NS, tokens, 1)
    assert tree.drop_checkpoint(NS, TOKENS[:20], 1)
    assert tree.match(NS, TOKENS).length == 8 and tree.match(NS, TOKENS).known == 24
    assert tree.drop_checkpoint(NS, TOKENS[:8], 1)
    assert tree.match(NS, TOKENS).length == 0 and tree.cached(0) == 6
    assert not tree.drop_checkpoint(NS, TOKENS[:8], 1)
    with pytest.raises(AssertionError, match="kind 0 has no checkpoints"):
        tree.drop_checkpoint(NS, TOKENS[:8], 0)
    tree.check()


def test_both_state_kinds_need_a_checkpoint_at_one_position():
    tree = make("t s s")
    leave(tree, TOKENS[:17], 8, 16)
    tree.drop_checkpoint(NS, TOKENS[:16], 1)
    tree.drop_checkpoint(NS, TOKENS[:8], 2)
    match = tree.match(NS, TOKENS)
    tree.count(match)
    assert (match.length, match.known) == (0, 16)
    assert [tree.counters(k).shortened for k in range(3)] == [0, 16, 8]
    tree.match(NS, TOKENS)  # a peek
    assert [tree.counters(k).shortened for k in range(3)] == [0, 16, 8]


def test_nobody_can_lock_what_cannot_be_resumed():
    """Made up, out of date or past a checkpoint: nothing is lent, and nothing changes."""
    tree = make("t w6 s")
    held = compute(tree, TOKENS[:18], 8)
    good = tree.match(NS, TOKENS)
    assert good.length == 8 and held.node is not None and held.depth == 4
    for forged in (
        Match(16, good.pages, good.base, held.node),
        good._replace(node=held.node),
        good._replace(node=good.node.parent if good.node else None),
    ):
        with pytest.raises(RuntimeError, match="'s' cannot resume"):
            tree.lock(forged)
    longer = tree.lock(good._replace(length=16, base=(0, 9, 9), pages=([], [], [5])))
    assert longer.depth == 2 and longer.source == tree.lock(good).source  # only the node counts
    tree.clear()
    with pytest.raises(RuntimeError, match="match again"):
        tree.lock(good)


@pytest.mark.parametrize(("kind", "name"), [(0, "t"), (1, "w6"), (2, "s")])
def test_a_match_is_good_until_what_it_found_is_evicted(kind: int, name: str):
    tree = make("t w6 s")
    leave(tree, TOKENS[:9], 8)
    match = tree.match(NS, TOKENS)
    tree.evict(kind, 1)
    with pytest.raises(RuntimeError, match=f"'{name}' cannot resume after 2 pages"):
        tree.lock(match)
    assert match.length == 8 and not any(tree.counters(k).duplicates for k in range(3))
    assert [pool.refs.count(2) for pool in tree.pools] == [0, 0, 0]
    tree.check()


def test_a_hit_reads_the_checkpoint_and_writes_elsewhere():
    tree = make("t s")
    leave(tree, TOKENS[:9], 8)
    (slot,) = tree.match(NS, TOKENS).pages[1]
    held = tree.lock(tree.match(NS, TOKENS))
    assert held.source == [0, slot] and held.pages[1] == [] and tree.evictable(1) == 0
    assert tree.open_states(held)
    (working,) = held.pages[1]
    assert working != slot and held.source == [0, slot] and tree.pools[1].refs[slot] == 2
    assert tree.open_states(held) and held.pages[1] == [working]  # it has one already
    tree.check([held])
    tree.settle_source(held)
    assert held.source == [0, working] and tree.evictable(1) == 1
    tree.settle_source(held)
    tree.check([held])
    tree.release(held)
    assert tree.pools[1].free == 31
    tree.check()


def test_a_chunk_that_ends_at_a_checkpoint_goes_on_from_it():
    tree = make("t s")
    held = start(tree, TOKENS[:17], 0)
    assert held.source == [0, 0]
    slots = tree.reserve_checkpoint(held, 8)
    tree.settle_source(held)
    tree.read_from_pending(held)
    assert slots is not None and held.source[1] == slots[0] != held.pages[1][0]
    assert held.pending == [(8, [0, slots[0]])] and tree.pools[1].refs[slots[0]] == 2
    tree.check([held])
    assert tree.match(NS, TOKENS).known == 0  # R-PFX-01: it is not computed yet
    tree.insert(NS, TOKENS, 8, held)
    assert held.pending == [] and tree.match(NS, TOKENS).pages[1] == [slots[0]]
    assert tree.evictable(1) == 0  # the next step still reads it
    tree.settle_source(held)
    assert tree.evictable(1) == 1
    tree.check([held])


def test_decode_turns_its_working_slot_into_a_checkpoint():
    tree = make("t s s")
    held = start(tree, TOKENS[:17], 0)
    with pytest.raises(AssertionError, match="do not hold the state at 8"):
        tree.turn_checkpoint(held, 8)
    tree.settle_source(held)
    old = [held.pages[1][0], held.pages[2][0]]
    assert tree.turn_checkpoint(held, 8)
    assert held.source[1:] == old and held.pending == [(8, [0, *old])]
    assert [held.pages[1][0], held.pages[2][0]] != old
    assert tree.pools[1].refs[old[0]] == 2
    tree.check([held])
    tree.settle_source(held)
    assert tree.turn_checkpoint(held, 12)
    tree.insert(NS, TOKENS, 11, held)
    assert [position for position, _ in held.pending] == [12] and marks(tree) == [8]
    tree.insert(NS, TOKENS, 12, held)
    assert held.pending == [] and marks(tree) == [8, 12]
    tree.check([held])
    tree.release(held)
    assert tree.evictable(1) == tree.evictable(2) == 2


def test_checkpoints_that_come_after_their_pages_are_published_too():
    """The page at 8 was committed before the decode round turned its slots."""
    tree = make("t s")
    held = start(tree, TOKENS[:17], 0)
    tree.settle_source(held)
    tree.insert(NS, TOKENS, 16, held)
    assert held.depth == 4
    assert tree.turn_checkpoint(held, 8)
    tree.insert(NS, TOKENS, 16, held)
    assert marks(tree) == [8] and held.pending == []
    tree.check([held])


def test_the_second_of_two_equal_checkpoints_is_given_up():
    tree = make("t s")
    first, second = start(tree, TOKENS[:9], 0), start(tree, TOKENS[:9], 0)
    for held in (first, second):
        tree.reserve_checkpoint(held, 8)
        tree.settle_source(held)
        tree.read_from_pending(held)
        tree.insert(NS, TOKENS, 9, held)
    assert tree.match(NS, TOKENS).pages[1] == [first.source[1]] != [second.source[1]]
    assert tree.counters(1) == KindCounters(published=1, duplicates=1)
    assert tree.counters(0) == KindCounters(published=2, duplicates=2)
    tree.check([first, second])
    tree.settle_source(second)  # the last reference to its own checkpoint
    assert tree.pools[1].free == 32 - 3
    tree.check([first, second])


def test_an_evicted_checkpoint_is_a_tombstone_that_is_filled_again():
    tree = make("t s")
    leave(tree, TOKENS[:9], 8)
    tree.evict(1, 1)
    match = tree.match(NS, TOKENS)
    assert (match.length, match.known, tree.cached(0)) == (0, 8, 2)
    leave(tree, TOKENS[:9], 8)
    assert tree.match(NS, TOKENS).length == 8
    assert tree.counters(1) == KindCounters(published=2, evicted=1)
    tree.check()


def test_the_longest_unused_checkpoint_goes_first_and_its_pages_stay():
    tree = make("t s", slots=3)
    old, new = TOKENS[:9], TOKENS[20:29]
    leave(tree, old, 8)
    leave(tree, new, 8)
    tree.release(tree.lock(tree.match(NS, old)))  # used again: now `new` is the older one
    held = start(tree, TOKENS[10:20])
    assert tree.reserve_checkpoint(held, 4) is not None
    assert tree.match(NS, old).length == 8 and tree.match(NS, new).length == 0
    assert tree.cached(0) == 4 and tree.available(1) == 1
    assert tree.reserve_checkpoint(held, 8) is not None and tree.available(1) == 0
    tree.check([held])


def test_evicting_a_token_page_takes_the_checkpoint_at_its_end():
    tree = make("t s")
    leave(tree, TOKENS[:9], 4, 8)
    tree.evict(0, 1)
    assert marks(tree) == [4] and tree.cached(1) == 1 and tree.match(NS, TOKENS).length == 4
    assert tree.counters(1).evicted == tree.counters(0).evicted == 1
    tree.check()


def test_slots_are_had_in_every_kind_or_in_none():
    """R-HYB-02: a thousand failing allocations of each sort lose nothing."""
    tree = make("t s s")
    keep = tree.allocate(2, 32)
    assert keep is not None
    running = tree.lock(tree.match(NS, TOKENS))
    for _ in range(1000):
        assert not tree.open_states(running)
        assert running.pages == [[], [], []]
    tree.give_back(2, keep.pop())
    assert tree.open_states(running)
    tree.settle_source(running)
    before = (list(running.source), [list(pages) for pages in running.pages])
    for _ in range(1000):
        assert tree.reserve_checkpoint(running, 4) is None
        assert not tree.turn_checkpoint(running, 4)
        assert (running.source, running.pages) == before and running.pending == []
    assert tree.pools[1].free == 31 and tree.pools[2].free == 0
    tree.release(running)
    assert tree.pools[1].free == 32 and tree.pools[2].free == 1


def test_pages_that_fail_after_the_slots_were_given_lose_none():
    """R-HYB-02: free + cached + running == total after each of 1,000 admissions that fail."""
    tree = make("t s", pages=6, slots=4)
    leave(tree, TOKENS[:9], 8)
    other = compute(tree, TOKENS[20:36])  # holds all other pages
    for _ in range(1000):
        held = tree.lock(tree.match(NS, TOKENS))
        assert tree.open_states(held)
        assert tree.reserve_checkpoint(held, 12) is not None
        assert tree.allocate(0, 1) is None
        tree.release(held)
        assert tree.pools[1].free + tree.cached(1) + 1 == 4
    tree.check([other])


def test_a_path_keeps_at_most_max_states():
    """The shallowest go, but none that is to be spared; the deepest stays whatever the limit."""
    tree = make("t s", max_states=2)
    tree.release(compute(tree, TOKENS[:25], 4, 8, 16, 24, spared=(0, 3, 4, 20, 99)))
    assert marks(tree) == [4, 24]
    leave(tree, TOKENS[:33], 28, 32)
    assert marks(tree) == [4, 32]  # another one's states don't drive out what one has declared
    tree = make("t s", max_states=2)
    leave(tree, TOKENS[:29], 4, 8, 16, 24, 28)
    assert marks(tree) == [24, 28] and tree.counters(1).thinned == 3
    tree.check()
    tree = make("t s", max_states=1)
    held = compute(tree, TOKENS[:9], 4)
    for position in (8, 12, 16):
        tree.turn_checkpoint(held, position)
        tree.settle_source(held)
        held.pages[0] += tree.allocate(0, position // 4 + 1 - held.end(0)) or []
        tree.insert(NS, TOKENS, position, held)
        assert marks(tree) == [position]
    tree.check([held])


def test_the_limit_spares_branch_points_and_what_is_in_use():
    tree = make("t s", max_states=1)
    leave(tree, TOKENS[:9], 4)
    leave(tree, [*TOKENS[:4], *TOKENS[20:29]], 4)  # two ways go on at 4
    leave(tree, TOKENS[:17], 8)
    assert marks(tree) == [4, 8]
    reader = tree.lock(tree.match(NS, TOKENS[:9]))
    assert reader.depth == 2
    leave(tree, TOKENS[:17], 12)
    assert marks(tree) == [4, 8, 12]
    tree.release(reader)
    leave(tree, TOKENS[:17], 16)
    assert marks(tree) == [4, 16]
    tree.check()


def test_release_with_checkpoints_that_nobody_committed_publishes_nothing():
    """An abort in mid-prefill, after a chunk that ended at a checkpoint."""
    tree = make("t s")
    held = start(tree, TOKENS[:33], 0)
    for position in (8, 16, 24):
        tree.reserve_checkpoint(held, position)
    tree.settle_source(held)
    tree.read_from_pending(held)
    tree.insert(NS, TOKENS, 15, held)
    tree.release(held)
    assert (held.pages, held.source, held.pending) == ([[], []], [0, 0], [])
    assert marks(tree) == [8] and tree.match(NS, TOKENS).known == 12
    assert tree.pools[1].free == 31 and tree.pools[0].free == 64 - 3
    tree.check()


def test_pending_positions_are_page_ends_in_order():
    tree = make("t s")
    held = start(tree, TOKENS[:33], 0)
    tree.settle_source(held)
    for act in (tree.reserve_checkpoint, tree.turn_checkpoint):
        with pytest.raises(AssertionError, match="no page ends at 0"):
            act(held, 0)
    tree.reserve_checkpoint(held, 8)
    for position in (6, 8, 4, 10):
        with pytest.raises(AssertionError):
            tree.reserve_checkpoint(held, position)
        with pytest.raises(AssertionError):
            tree.turn_checkpoint(held, position)
    tree.check([held])
    assert tree.pools[1].free == 30


def test_clear_takes_the_checkpoints_but_not_from_those_who_read_them():
    tree = make("t s")
    leave(tree, TOKENS[:9], 4, 8)
    held = start(tree, TOKENS[:13], 8)
    tree.reserve_checkpoint(held, 12)
    tree.clear()
    assert tree.cached(1) == 0 and tree.pools[1].free == 32 - 3
    tree.check([held])
    tree.settle_source(held)
    assert tree.pools[1].free == 32 - 2
    tree.insert(NS, TOKENS, 13, held)
    assert tree.match(NS, TOKENS).length == 12
    tree.check([held])


def test_without_paged_kinds_nodes_live_by_their_checkpoints_and_events_say_so():
    tree, index = make("s"), Index()
    tree.set_listener(index.apply)
    held = start(tree, TOKENS[:33])
    tree.settle_source(held)
    tree.insert(NS, TOKENS, 32, held)
    assert index.stored() == set()  # nothing could be resumed there
    for position in (8, 20):
        tree.reserve_checkpoint(held, position)
    tree.insert(NS, TOKENS, 32, held)
    assert len(index.stored()) == 5 and tree.match(NS, TOKENS).known == 20
    tree.drop_checkpoint(NS, TOKENS[:8], 0)
    assert len(index.stored()) == 5 and tree.match(NS, TOKENS).length == 20
    tree.reserve_checkpoint(held, 24)
    tree.evict(0, 1)
    assert index.stored() == stored_in(tree) == set()
    tree.insert(NS, TOKENS, 32, held)  # its place in the tree was pruned meanwhile
    assert len(index.stored()) == 6 and marks(tree) == [24]
    tree.check([held])


def test_a_window_that_was_left_behind_leaves_no_empty_nodes():
    tree, told = make("w1"), list[Event]()
    held = start(tree, TOKENS[:12])
    tree.trim(held, 12)
    tree.set_listener(told.append)
    tree.insert(NS, TOKENS, 12, held)
    assert len(told) == 1 and stored_in(tree) == set()
    tree.check([held])
