"""LoadPlans on the device against a dictionary that does what their entries say."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.layout import LoadOp
from jaxinfer.scheduler.plan import LOAD_ENTRIES, LOAD_RESETS, LoadPlan
from jaxinfer.step.forward import load
from jaxinfer.step.pack import LOAD_SIZE, pack_load
from jaxinfer.step.state import BAN_BIT, OUTPUT_MASK, PROMPT_BIT, DeviceState
from tests.step.rows import make_state

V, SLOTS = 12, 40
load_jit = jax.jit(load)

slots = st.integers(1, SLOTS)
entry = st.tuples(
    slots, st.integers(0, V - 1), st.sampled_from([LoadOp.PROMPT, LoadOp.OUTPUT]), st.just(0.0)
)
fills = st.sampled_from([0.0, float("-inf")])


def apply(plans: list[LoadPlan]) -> DeviceState:
    rng = np.random.default_rng(0)
    shape = (SLOTS + 1, V)
    state = make_state(V, SLOTS, rng.integers(0, 9, shape), rng.standard_normal(shape))
    for plan in plans:
        buffer = pack_load(plan)
        assert buffer.dtype == np.int32 and len(buffer) == LOAD_SIZE
        state = load_jit(state, buffer)
    return state


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(slots, fills, max_size=LOAD_RESETS),
    st.lists(entry, max_size=60),
    st.sets(st.tuples(slots, st.integers(0, V - 1)), max_size=20),
    st.dictionaries(
        st.tuples(slots, st.integers(0, V - 1)), st.floats(-100, 100, width=32), max_size=20
    ),
)
def test_entries_do_what_they_say(resets, entries, bans, biases):
    """Tokens may stand in prompt and output any number of times; other slots stay as they were."""
    before = apply([])
    counts, bias = np.array(before.counts), np.array(before.bias)
    for slot, fill in resets.items():
        counts[slot], bias[slot] = 0, fill
    for slot, token, op, _ in entries:
        counts[slot, token] = (
            counts[slot, token] | PROMPT_BIT if op is LoadOp.PROMPT else counts[slot, token] + 1
        )
    for slot, token in bans:
        counts[slot, token] += BAN_BIT
    for (slot, token), value in biases.items():
        bias[slot, token] = value
    rows = [*entries, *((s, t, LoadOp.BAN, 0.0) for s, t in bans)]
    rows += [(s, t, LoadOp.BIAS, v) for (s, t), v in biases.items()]
    after = apply([LoadPlan(list(resets.items()), rows)])
    assert np.array_equal(np.asarray(after.counts)[1:], counts[1:])
    assert np.array_equal(np.asarray(after.bias)[1:], bias[1:])


def test_a_long_load_comes_in_portions():
    """2,500 entries of one slot: the bits do not disturb the counts."""
    rows = [(3, i % V, LoadOp.OUTPUT if i % 2 else LoadOp.PROMPT, 0.0) for i in range(2500)]
    rows += [(3, 5, LoadOp.BAN, 0.0)]
    cuts = range(0, len(rows), LOAD_ENTRIES)
    plans = [LoadPlan([(3, 0.0)] if i == 0 else [], rows[i : i + LOAD_ENTRIES]) for i in cuts]
    counts = np.asarray(apply(plans).counts)[3]
    for token in range(V):
        mine = [op for _, t, op, _ in rows if t == token]
        assert counts[token] & OUTPUT_MASK == mine.count(LoadOp.OUTPUT)
        assert bool(counts[token] & PROMPT_BIT) == (LoadOp.PROMPT in mine)
        assert bool(counts[token] & BAN_BIT) == (token == 5)


def test_an_empty_plan_changes_nothing():
    before, after = apply([]), apply([LoadPlan([], [])])
    assert np.array_equal(before.counts[1:], after.counts[1:])
    assert np.array_equal(before.bias[1:], after.bias[1:])
