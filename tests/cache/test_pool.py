"""PagePool: counts never go below zero, and a page is free or referenced, never both."""

from __future__ import annotations

import random

import pytest

from jaxinfer.cache import PagePool, SlotPool
from jaxinfer.errors import CapacityError


def test_page_zero_is_never_handed_out():
    pool = PagePool(5)
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]
    assert pool.free == 0 and pool.usable == 4


def test_too_many_pages_change_nothing():
    pool = PagePool(4)
    pool.alloc(1)
    with pytest.raises(CapacityError, match="3 pages wanted, 2 of 3 are free"):
        pool.alloc(3)
    assert pool.free == 2
    pool.check()


def test_a_pool_without_usable_pages_is_refused():
    with pytest.raises(CapacityError, match="num_pages=1"):
        PagePool(1)


def test_releasing_twice_and_sharing_a_free_page_are_caught():
    pool = PagePool(3)
    (page,) = pool.alloc(1)
    assert pool.release(page) == 0
    with pytest.raises(AssertionError, match="more often"):
        pool.release(page)
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(1)


def test_slots_are_counted_like_pages_and_errors_say_slots():
    pool = SlotPool(4)
    assert pool.size == 4
    assert sorted(pool.alloc(3)) == [1, 2, 3]
    with pytest.raises(CapacityError, match="1 slots wanted, 0 of 3 are free"):
        pool.alloc(1)
    with pytest.raises(CapacityError, match="num_slots=1 is below 2: slot 0 is reserved"):
        SlotPool(1)
    pool.release(2)
    for act in (pool.release, pool.share):
        with pytest.raises(AssertionError, match="slot 2 "):
            act(2)
    pool.check([1, 3])


def test_check_finds_a_lost_reference():
    pool = PagePool(4)
    pages = pool.alloc(2)
    pool.check(pages)
    with pytest.raises(AssertionError):
        pool.check(pages[:1])


@pytest.mark.parametrize("pool", [PagePool(24), SlotPool(24)])
def test_ten_thousand_random_operations(pool: PagePool | SlotPool):
    """R-PFX-04."""
    rng, owners = random.Random(0), []
    for step in range(10_000):
        action = rng.randrange(3)
        if action == 0:
            count = rng.randrange(4)
            if count <= pool.free:
                owners += pool.alloc(count)
        elif action == 1 and owners:
            page = rng.choice(owners)
            assert pool.share(page) == owners.count(page) + 1
            owners.append(page)
        elif owners:
            page = owners.pop(rng.randrange(len(owners)))
            assert pool.release(page) == owners.count(page)
        if step % 10 == 0:
            pool.check(owners)
    for page in owners:
        pool.release(page)
    pool.check([])
    assert pool.free == pool.usable
