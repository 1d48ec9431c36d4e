"""Scheduler.inspect in the middle of a step: what sequences hold is counted, and no token is told."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.scheduler.stats import KindStats, pool_load
from tests.scheduler.null_model import FULL, Runner, request, state, window

SECRET = 991


def test_states_in_use_and_pending_ones_are_counted():
    runner = Runner((FULL, window(8), state()), (50, 50, 20), 512, checkpoint_interval=8)
    scheduler, prompt = runner.scheduler, [SECRET] * 20
    runner.add(request("warm", prompt, 1))
    runner.drain()
    runner.add(request("first", [*prompt[:18], 5, 6], 4))
    runner.add(request("second", [7] * 20, 4))
    scheduler.plan()  # in flight
    view = scheduler.inspect(100)
    assert (view.working_states, view.pending_checkpoints) == (2, 1)
    assert (view.unit_tokens, view.checkpoint_interval, view.page_size) == (8, 8, 4)
    scopes = {kind.name: (kind.scope, kind.window) for kind in view.kinds}
    assert scopes == {"full": ("token", 0), "window8": ("window", 8), "state": ("state", 0)}
    full, _, slots = view.kinds
    assert full.bytes_each == 4 * 4 * 4 and slots.bytes_each == 4 * 4
    # Working slots and the pending one; the checkpoint that "first" reads may go once its step is planned.
    assert (slots.protected, slots.evictable) == (3, 1)
    assert full.free + full.evictable + full.protected == full.total
    locked = [node for node in view.tree if node.locks]
    assert max(node.depth for node in locked) == 16 and view.tree[locked[-1].parent].depth == 12
    assert str(SECRET) not in repr(view) and str(SECRET) not in repr(view.as_dict())
    assert (view.hits, view.queries) == (16, 60)


def test_one_look_visits_no_more_nodes_than_asked_for():
    runner = Runner((FULL,), (300,), 512)
    for i in range(6):
        runner.add(request(f"r{i}", [i] * 20, 1))
    runner.drain()
    whole = runner.scheduler.inspect(1000)
    assert whole.complete and len(whole.tree) == 6 * 5 + 1
    assert runner.scheduler.inspect(31) == whole
    part = runner.scheduler.inspect(9)
    assert not part.complete and len(part.tree) == 9
    assert part.kinds == whole.kinds


@pytest.mark.parametrize(
    ("most", "depths"), [(0, [8, 16, 24, 32, 40]), (3, [24, 32, 40]), (1, [40])]
)
def test_a_path_keeps_the_deepest_states(most: int, depths: list[int]):
    options: dict[str, Any] = {"checkpoint_interval": 8, "max_states_per_path": most}
    runner = Runner((FULL, state()), (50, 20), 512, max_num_batched_tokens=8, **options)
    runner.add(request("r", list(range(42)), 1))
    runner.drain()
    view = runner.scheduler.inspect(100)
    assert [node.depth for node in view.tree if node.states] == depths
    assert view.kinds[1].thinned == 5 - len(depths) and view.max_states_per_path == most


def test_one_number_for_all_pools():
    """Tokens are those of the fullest pages; the share may be that of slots."""

    def kind(scope: str, protected: int, total: int) -> KindStats:
        return KindStats(scope, scope, total, total - protected, 0, protected, 0, 0, 0, 0, 0, 0)

    slots, full, windowed = kind("state", 3, 4), kind("token", 6, 40), kind("window", 6, 10)
    assert pool_load((slots, full, windowed), 4) == (24, 40, 0.75)
    assert pool_load((full, slots), 4) == (24, 160, 0.75)
    assert pool_load((full,), 4) == (24, 160, 0.15)
    assert pool_load((slots,), 4) == (0, 0, 0.75) and pool_load((), 4) == (0, 0, 0.0)
