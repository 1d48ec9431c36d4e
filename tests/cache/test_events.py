"""KV events: they always add up to what the tree holds, and their ids are what they should be."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings

from jaxinfer.cache import events as module
from jaxinfer.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBuffer,
    page_hash,
    root_hash,
)
from tests.cache.test_tree import compute, make
from tests.cache.traffic import Index, Traffic, operations, stored_in


@pytest.mark.parametrize("windows", [(0,), (0, 4), (5,)])
@settings(max_examples=60, deadline=None)
@given(operations=operations)
def test_events_add_up_to_the_tree(windows: tuple[int, ...], operations: list[tuple]) -> None:
    tree, index = make(windows, pages=20), Index()
    tree.set_listener(index.apply)
    traffic = Traffic(tree)
    for operation in operations:
        traffic.do(operation)
        assert index.stored() == stored_in(tree)
    tree.check(held for held, _ in traffic.live)


@settings(max_examples=30, deadline=None)
@given(before=operations, after=operations)
def test_a_listener_that_comes_late_hears_everything(
    before: list[tuple], after: list[tuple]
) -> None:
    tree, index = make((0, 4), pages=20), Index()
    traffic = Traffic(tree)
    for operation in before:
        traffic.do(operation)
    tree.set_listener(index.apply)
    assert index.stored() == stored_in(tree)
    for operation in after:
        traffic.do(operation)
    assert index.stored() == stored_in(tree)


def test_one_insert_is_one_event_that_names_its_parent() -> None:
    tree, told = make(), list[Event]()
    tree.set_listener(told.append)
    held = compute(tree, list(range(9)), ("salt",))
    tree.release(held)
    tree.release(compute(tree, [*range(8), 20, 21, 22, 23, 24, 25, 26, 27], ("salt",)))
    assert told[0] == AllBlocksCleared()
    first, second = told[1:]
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert first.parent is None and first.pages == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert second.parent == first.hashes[-1]
    assert second.tokens == [20, 21, 22, 23, 24, 25, 26, 27] and second.block_size == 4
    assert first.cache_salt == second.cache_salt == "salt"
    tree.evict(0, 1)
    assert told[3] == BlockRemoved(second.hashes[-1:])
    tree.clear()
    assert told[4:] == [AllBlocksCleared()]


def test_ids_are_chained_sha256_and_never_change() -> None:
    """Two servers, and a server before and after a restart, name equal blocks alike."""
    parent = root_hash(("", 4096))
    digest = hashlib.sha256(b"('', 4096)").digest()
    assert parent == struct.unpack(">q", digest[:8])[0]
    name = page_hash(parent, [5, 6, 2**31])
    digest = hashlib.sha256(struct.pack("<4q", parent, 5, 6, 2**31)).digest()
    assert name == struct.unpack(">q", digest[:8])[0]
    assert page_hash(root_hash(("",)), range(16)) == -2174807942135562905


def test_ids_differ_by_salt_rope_length_and_prefix() -> None:
    tree, index = make(pages=200), Index()
    tree.set_listener(index.apply)
    spaces = [("",), ("a",), ("b",), ("", 1), ("a", 1), ()]
    for space in spaces:
        tree.release(compute(tree, [1] * 13, space))  # three pages of equal tokens
    assert len(index.blocks) == 3 * len(spaces)


def test_nothing_is_hashed_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: bytes) -> int:
        raise AssertionError("hashed for nobody")

    monkeypatch.setattr(module, "_int64", refuse)
    tree = make()
    tree.release(compute(tree, list(range(9))))
    tree.evict(0, 1)
    tree.clear()
    monkeypatch.undo()
    told: list[Event] = []
    tree.set_listener(told.append)
    tree.set_listener(None)
    tree.release(compute(tree, list(range(9))))
    assert told == [AllBlocksCleared()]


def test_a_round_is_one_list_and_a_clear_ends_it() -> None:
    buffer, rounds = EventBuffer(), list[list[Event]]()
    buffer.listener = rounds.append
    stored = BlockStored((1,), None, ((5,),))
    for event in (BlockRemoved((7,)), BlockRemoved((8, 9)), stored, BlockRemoved((1,))):
        buffer.add(event)
    assert rounds == []
    buffer.flush()
    buffer.flush()
    assert rounds == [[BlockRemoved((7, 8, 9)), stored, BlockRemoved((1,))]]
    buffer.add(stored)
    buffer.add(AllBlocksCleared())
    assert rounds[1:] == [[stored, AllBlocksCleared()]]
