"""The cache of a recurrent model from outside: what inspect tells, the unit of reuse, breakpoints."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.errors import InvalidRequest, Unavailable
from jaxinfer.inputs import Prompt
from tests.recurrent import SMALL, write_recurrent

ONE = SamplingParams(max_tokens=1, temperature=0.0)
PAGE = 16
fresh = count(1)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(write_recurrent(tmp_path_factory.mktemp("recurrent"))), **SMALL)


def prompt(length: int) -> list[int]:
    """Tokens that no prompt before begins with."""
    rng = np.random.default_rng(next(fresh))
    return rng.integers(5, 250, length).tolist()


def cached(llm: LLM, tokens: Any) -> int:
    (output,) = llm.generate(tokens, ONE, use_tqdm=False)
    return output.num_cached_tokens


@pytest.mark.parametrize(("units", "more"), [(1, -1), (1, 0), (1, 1), (2, 0)])
def test_hits_follow_the_published_unit(recurrent: LLM, units: int, more: int) -> None:
    """R-HYB-04: what prompts share is found in whole units."""
    unit = recurrent.inspect().unit_tokens
    assert unit == 64
    common = prompt(units * unit + more)
    assert cached(recurrent, common + prompt(70)) == 0
    assert cached(recurrent, common + prompt(5)) == len(common) // unit * unit


def test_inspect_tells_kinds_states_and_hits(recurrent: LLM) -> None:
    recurrent.core.scheduler.clear_prefix_cache()
    before = recurrent.inspect()
    assert before.tree == () and before.complete
    tokens = prompt(130)
    assert cached(recurrent, tokens) == 0 and cached(recurrent, tokens) == 128
    view = recurrent.inspect()
    kinds = {kind.name: kind for kind in view.kinds}
    assert [kind.scope for kind in view.kinds].count("state") == len(kinds) - 1 == 1
    full, state = kinds["full"], next(k for k in view.kinds if k.scope == "state")
    assert (full.layers, state.layers, full.unit, full.window) == (1, 3, 1, 0)
    assert full.bytes_each == PAGE * 2 * 2 * 16 * 4  # K and V of 2 heads of 16 in float32
    # Of each layer: a float32 state [4, 16, 16], and 3 columns of 2 * 32 + 64 channels.
    assert state.bytes_each == 3 * 4 * (4 * 16 * 16 + 3 * 128)
    for kind in view.kinds:
        assert kind.free + kind.evictable + kind.protected == kind.total
        assert kind.protected == 0 and kind.cached == kind.evictable
    assert (full.cached, state.cached) == (8, 2)
    root, *nodes = view.tree
    assert (root.parent, root.depth, root.children) == (-1, 0, 1)
    assert [n.depth for n in nodes] == [PAGE * (i + 1) for i in range(8)]
    assert [n.depth for n in nodes if n.states == (state.name,)] == [64, 128]
    assert all(n.pages == ("full",) and n.locks == 0 and not n.in_use for n in nodes)
    assert view.queries - before.queries == 260 and view.hits - before.hits == 128
    assert view.hit_rate == view.hits / view.queries
    assert (view.page_size, view.checkpoint_policy, view.replay) == (PAGE, "align", "tolerant")
    assert (view.working_states, view.pending_checkpoints) == (0, 0)
    told = view.as_dict()
    assert told["tree"][3]["depth"] == 48 and told["kinds"][0]["name"] == view.kinds[0].name
    assert len(recurrent.inspect(3).tree) == 3 and not recurrent.inspect(3).complete


def test_what_a_kind_cuts_off_is_told(recurrent: LLM) -> None:
    def shortened() -> dict[str, int]:
        return {kind.scope: kind.shortened for kind in recurrent.inspect().kinds}

    tokens, before = prompt(120), shortened()
    cached(recurrent, tokens)
    assert cached(recurrent, [*tokens[:112], *prompt(8)]) == 64
    after = shortened()
    assert after["state"] - before["state"] == 112 - 64 and after["token"] == before["token"] == 0


def test_breakpoints_keep_states_where_prompts_will_part(recurrent: LLM) -> None:
    for form in ("prompt_token_ids", "prompt"):
        head = prompt(40)
        given: Any = head
        if form == "prompt":
            given = "".join(chr(97 + token % 26) for token in head)
            head = list(recurrent.prompt(given).token_ids)
        marked = {form: given, "breakpoints": [len(head) - 3, 20, 20]}
        (output,) = recurrent.generate([marked], ONE, use_tqdm=False)
        assert output.prompt_token_ids == list(head)
        depth = (len(head) - 3) // PAGE * PAGE
        assert cached(recurrent, [*head[:depth], *prompt(9)]) == depth
        assert cached(recurrent, [*head[:20], *prompt(9)]) == 16
    plain = prompt(40)
    assert cached(recurrent, plain) == 0 and cached(recurrent, [*plain[:32], *prompt(9)]) == 0


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0], r"breakpoints\[0\]=0 must be an integer in \[1, 10\]"),
        ([4, 11], r"breakpoints\[1\]=11 must be an integer in \[1, 10\]"),
        ([-1], r"breakpoints\[0\]=-1"),
        ([2.0], r"breakpoints\[0\]=2.0"),
        ([True], r"breakpoints\[0\]=True"),
        ("12", "breakpoints='12' must be a list"),
        (7, "breakpoints=7 must be a list"),
        ([1] * 65, "breakpoints has 65 positions; at most 64"),
    ],
    ids=str,
)
def test_wrong_breakpoints_are_named(recurrent: LLM, positions: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        recurrent.prompt({"prompt_token_ids": list(range(5, 15)), "breakpoints": positions})


def test_breakpoints_are_positions_once_each() -> None:
    marked = Prompt(None, tuple(range(9))).with_breakpoints(np.array([9, 1, 9]))
    assert marked.breakpoints == (1, 9) and marked.token_ids == tuple(range(9))


@pytest.mark.parametrize("limit", [0, -1, 10_001])
def test_a_wrong_limit_is_named(recurrent: LLM, limit: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"limit={limit} is out of range \[1, 10000\]"):
        recurrent.inspect(limit)


def test_the_engine_is_looked_into_while_it_runs(recurrent: LLM) -> None:
    """From another event loop than that of the request, between two rounds."""
    engine = Engine(recurrent.model, **SMALL)
    assert engine.cache_unit == 64 and engine.heeds_breakpoints

    async def watched() -> list[Any]:
        params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
        views = []
        async for _ in engine.generate(prompt(70), params):
            if len(views) < 3:
                views.append(await asyncio.to_thread(asyncio.run, engine.inspect(50)))
        views.append(await engine.inspect())
        return views

    try:
        *during, after = asyncio.run(asyncio.wait_for(watched(), 120))
    finally:
        engine.close()
    assert any(view.working_states == 1 for view in during)
    for view in during:
        held = {kind.scope: kind.protected for kind in view.kinds}
        assert view.working_states == 0 or (held["state"] >= 1 and held["token"] >= 5)
        assert any(node.locks for node in view.tree) == (view.working_states == 1)
    assert after.working_states == 0 and not any(node.locks for node in after.tree)
    with pytest.raises(Unavailable, match="closed"):
        asyncio.run(engine.inspect())


def test_plain_models_have_pages_only_and_heed_no_breakpoints(llm: LLM) -> None:
    view = llm.inspect()
    assert [(kind.name, kind.scope) for kind in view.kinds] == [("full", "token")]
    assert view.unit_tokens == view.page_size == PAGE
    (output,) = llm.generate(
        {"prompt_token_ids": [5, 6, 7], "breakpoints": [2]}, ONE, use_tqdm=False
    )
    (same,) = llm.generate([[5, 6, 7]], ONE, use_tqdm=False)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
