"""What the tree shows of itself: depth, kinds and locks, at most as much as was asked for."""

from __future__ import annotations

from tests.cache.oracle import make
from tests.cache.test_states import NS, leave


def test_inspect_shows_depth_kinds_and_locks_but_no_tokens():
    tree = make("t w6 s")
    leave(tree, [901, 902, 903, 904] * 2 + [905], 8)
    tree.evict(1, 1)  # the last page of a released sequence is its longest unused
    root, first, second = tree.inspect(10)
    assert (root.parent, root.depth, root.pages, root.states) == (-1, 0, (), ())
    assert (first.parent, first.depth, first.pages, first.states) == (0, 4, ("t", "w6"), ())
    assert (second.parent, second.depth, second.pages, second.states) == (1, 8, ("t",), ("s",))
    assert not first.in_use and first.locks == second.locks == 0
    assert "90" not in repr(tree.inspect(10))
    leave(tree, [901, 902, 903, 904] * 2 + [905], 8)
    held = [tree.lock(tree.match(NS, [901, 902, 903, 904] * 2)) for _ in range(2)]
    _, first, second = tree.inspect(10)
    assert (first.locks, second.locks) == (4, 6) and first.in_use and second.in_use
    tree.check(held)


def test_inspect_visits_no_more_than_the_limit():
    tree = make("s")
    for first in range(5):
        leave(tree, [first] * 9, 4, 8)
    for limit in range(13):
        views = tree.inspect(limit)
        assert len(views) == min(limit, 11)
        assert all(view.parent < place for place, view in enumerate(views))
    assert [view.depth for view in tree.inspect(20)] == [0] + [4] * 5 + [8] * 5
