"""Kept responses: bounded in number and bytes, apart by client, and continued in their order."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import BadField, NotFound
from serving.http.responses_store import OVERHEAD, ResponseStore, owner_of


def response(name: str, previous: str | None = None, text: str = "") -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": text or name}
    return {"id": name, "previous_response_id": previous, "output": [message]}


def test_a_history_is_all_turns_in_order() -> None:
    store = ResponseStore()
    store.put("me", response("r1"), [{"role": "user", "content": "1"}], 9)
    store.put("me", response("r2", "r1"), [{"role": "user", "content": "2"}], 9)
    assert [item["content"] for item in store.history("me", "r2")] == ["1", "r1", "2", "r2"]
    assert store.history("me", None) == []
    store.delete("me", "r1")
    with pytest.raises(BadField, match="previous_response_id='r1'"):
        store.history("me", "r2")


def test_nobody_sees_anothers_responses() -> None:
    store = ResponseStore()
    keys = [{"authorization": "Bearer a"}, {"authorization": "Bearer b"}, {"x-api-key": "a"}, {}]
    mine, *others = [owner_of(headers) for headers in keys]
    store.put(mine, response("r"), [], 0)
    assert store.get(mine, "r").response["id"] == "r"
    for other in others:
        with pytest.raises(NotFound):
            store.get(other, "r")
        with pytest.raises(NotFound):
            store.delete(other, "r")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("pgd"), st.integers(0, 9), st.integers(0, 9000)), max_size=40
    )
)
def test_the_store_stays_within_its_bounds(steps: list[tuple[str, int, int]]) -> None:
    store = ResponseStore(max_responses=4, max_bytes=20000)
    for action, number, size in steps:
        name = f"r{number}"
        if action == "p":
            kept = store.put("me", response(name, text="x" * size), [], size)
            assert not kept or store.get("me", name).response["id"] == name
        else:
            with contextlib.suppress(NotFound):
                (store.get if action == "g" else store.delete)("me", name)
        assert len(store) <= 4 and 0 <= store.size <= 20000
    for number in range(10):
        with contextlib.suppress(NotFound):
            store.delete("me", f"r{number}")
    assert store.size == 0 and len(store) == 0


def test_what_is_too_large_is_not_kept() -> None:
    store = ResponseStore(max_bytes=OVERHEAD + 100)
    assert not store.put("me", response("r", text="x" * 100), [], 0)
    assert len(store) == 0
