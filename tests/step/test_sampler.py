"""The sampler against float64 numpy (R-SMP-01, 02, 03, 05, 08; R-LPB-01, 02)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.layout import RowField, RowFlag
from jaxinfer.step.pack import Rows
from jaxinfer.step.sampler import (
    Sampled,
    filter_logits,
    inverse_cdf,
    sample,
    token_logprobs,
    uniforms,
)
from jaxinfer.step.state import BAN_BIT, PROMPT_BIT, DeviceState
from jaxinfer.types import GREEDY_TEMPERATURE, MAX_LOGPROBS, SamplingParams
from tests.step.rows import make_rows, make_state, record

V = 40
RANDOM = int(RowFlag.SAMPLE | RowFlag.RANDOM)
FILTERED = RANDOM | RowFlag.FILTER
_sample = jax.jit(lambda logits, state, ints, flags: sample(logits, state, Rows(ints, flags)))
_filter = jax.jit(lambda scaled, ints, flags: filter_logits(scaled, Rows(ints, flags)))


def sample_jit(logits: jax.Array, state: DeviceState, rows: Rows) -> Sampled:
    return _sample(logits, state, rows.ints, rows.any_flags)


def filter_jit(scaled: jax.Array, rows: Rows) -> jax.Array:
    return _filter(scaled, rows.ints, rows.any_flags)


def kept_set(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[set, set]:
    """(ids that must survive, ids that may): they differ where float32 rounding may decide."""
    x = scaled.astype(np.float64)
    order = np.sort(x)[::-1]
    cut = order[min(top_k, len(x)) - 1] if top_k > 0 else -np.inf
    alive = x >= cut
    mass = np.where(alive, np.exp(x), 0.0)
    must, may = alive.copy(), alive.copy()
    if top_p < 1.0:
        above = np.array([mass[x > v].sum() for v in x])  # mass of all that is more likely
        wanted = top_p * mass.sum()
        must &= above < wanted * (1 - 1e-5)
        may &= above < wanted * (1 + 1e-5)
    if min_p > 0.0:
        must &= mass >= min_p * (1 + 1e-5)
        may &= mass >= min_p * (1 - 1e-5)
    best = x == x.max()
    return set(np.flatnonzero((must | best) & (mass > 0))), set(np.flatnonzero(may | best))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_filters_keep_exactly_what_they_say(data: st.DataObject):
    vocab = data.draw(st.sampled_from([V, 200]))  # 200: more than the candidates of a search
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    levels = rng.standard_normal(data.draw(st.sampled_from([3, 8, vocab]))) * 3
    logits = rng.choice(levels, vocab)  # few levels: many ties
    if data.draw(st.booleans()):
        logits[rng.permutation(vocab)[: vocab // 2]] = -np.inf
    scaled = (logits - logits.max()).astype(np.float32)
    top_k = data.draw(st.sampled_from([0, 1, 2, 5, 100, vocab - 1, vocab, vocab + 1, 2**31 - 1]))
    top_p = data.draw(st.one_of(st.sampled_from([0.0, 1e-9, 0.5, 0.9, 1.0]), st.floats(0, 1)))
    min_p = data.draw(st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 1)))
    rows = make_rows(record(top_k=top_k, top_p=top_p, min_p=min_p))
    got = np.asarray(filter_jit(jnp.asarray(scaled)[None], rows))[0]
    kept = set(np.flatnonzero(np.isfinite(got)))
    must, may = kept_set(scaled, top_k, float(np.float32(top_p)), float(np.float32(min_p)))
    assert must <= kept <= may
    assert np.array_equal(got[sorted(kept)], scaled[sorted(kept)]), "what stays is not changed"


def test_filters_that_are_off_change_no_bit():
    rng = np.random.default_rng(0)
    scaled = (rng.standard_normal((3, 300)) * 50).astype(np.float32)
    scaled -= scaled.max(-1, keepdims=True)
    scaled[1, ::2] = -np.inf
    rows = make_rows(*[record(top_k=k, top_p=1.0, min_p=0.0) for k in (0, 300, 2**31 - 1)])
    got = np.asarray(filter_jit(jnp.asarray(scaled), rows))
    assert np.array_equal(got.view(np.int32), scaled.view(np.int32))


@pytest.mark.parametrize(
    "filters",
    [
        {"min_p": 1.0},
        {"top_p": 1e-9},
        {"top_p": 0.0},
        {"top_k": 1, "min_p": 0.9},
        {"top_k": 1, "top_p": 1e-9, "min_p": 1.0},
    ],
    ids=str,
)
def test_a_token_of_maximum_probability_survives(filters):
    logits = np.full(V, -np.inf, np.float32)
    logits[V // 2 :] = 1.0
    logits[[V - 3, V - 7, V - 9]] = 4.0
    rows = make_rows(*[record(position=i, seed=9, **filters) for i in range(500)])
    drawn = sample_jit(jnp.broadcast_to(logits, (500, V)), make_state(V), rows).tokens
    assert set(np.asarray(drawn).tolist()) == {V - 3, V - 7, V - 9}


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-8, 1e-5, 9.9e-5])
def test_tiny_temperatures_are_greedy_by_definition(temperature):
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=GREEDY_TEMPERATURE).greedy


@pytest.mark.parametrize("temperature", [1e-30, 1e-8, 1e-5, 1e-4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_tiny_temperatures_on_the_device_give_the_best_token(temperature, dtype):
    """Even past the host's rule nothing overflows, and the neighbour draws as it does alone."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((2, V)) * 30, dtype).astype(jnp.float32)
    rows = make_rows(
        record(temperature=temperature, flags=RANDOM), record(seed=5, temperature=0.8, flags=RANDOM)
    )
    both = np.asarray(sample_jit(logits, make_state(V), rows).tokens)
    alone = make_rows(record(seed=5, temperature=0.8, flags=RANDOM))
    assert both[0] == np.argmax(np.asarray(logits[0]))
    assert both[1] == np.asarray(sample_jit(logits[1:], make_state(V), alone).tokens)[0]


def test_draws_follow_the_distribution():
    """Chi-square over 20,000 draws that differ in their position only."""
    n, vocab = 20_000, 150
    logits = np.linspace(0.0, 2.5, vocab).astype(np.float32)
    rows = [record(seed=3, temperature=0.9, top_k=100, flags=FILTERED)] * n
    table = np.stack(rows)
    table[:, RowField.OUT_POS] = np.arange(n)
    drawn = np.asarray(
        sample_jit(
            jnp.broadcast_to(logits, (n, vocab)), make_state(vocab), make_rows(*table)
        ).tokens
    )
    p = np.exp(logits.astype(np.float64) / 0.9)
    p[: vocab - 100] = 0.0
    p /= p.sum()
    found = np.bincount(drawn, minlength=vocab)
    assert not found[: vocab - 100].any()
    expected = n * p[vocab - 100 :]
    chi2 = ((found[vocab - 100 :] - expected) ** 2 / expected).sum()
    assert chi2 < 99 + 5 * np.sqrt(2 * 99), "far outside the distribution of 99 degrees of freedom"


def test_mixed_batch_of_greedy_and_top_k():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((2, 512)).astype(np.float32)
    best = set(np.argsort(logits[1])[-5:].tolist())
    greedy = record(temperature=0.0, flags=int(RowFlag.SAMPLE))
    seen = set()
    for start in range(0, 1000, 250):
        rows = make_rows(
            *[r for i in range(250) for r in (greedy, record(top_k=5, position=start + i))]
        )
        tokens = np.asarray(
            sample_jit(jnp.tile(jnp.asarray(logits), (250, 1)), make_state(512), rows).tokens
        )
        assert (tokens[::2] == logits[0].argmax()).all()
        seen |= set(tokens[1::2].tolist())
    assert seen == best


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=2, unique=True))
def test_seeds_use_all_their_bits(seeds: list[int]):
    rows = make_rows(*[record(seed=s, position=p) for s in seeds for p in range(4)])
    u = np.asarray(uniforms(rows)).reshape(2, 4)
    assert ((u >= 0) & (u < 1)).all()
    assert not np.array_equal(u[0], u[1])
    assert len(set(u[0].tolist())) > 1


def test_extreme_seeds_differ():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 2, 2**63 - 1]
    u = np.asarray(uniforms(make_rows(*[record(seed=s) for s in seeds])))
    assert len(set(u.tolist())) == len(seeds)


def test_flat_logits_give_varied_tokens_along_a_row_and_between_rows():
    rows = make_rows(*[record(seed=s, position=p) for s in range(16) for p in range(64)])
    tokens = np.asarray(sample_jit(jnp.zeros((16 * 64, 64)), make_state(64), rows).tokens)
    table = tokens.reshape(16, 64)
    assert all(len(set(row)) > 30 for row in table.tolist())
    assert len({tuple(row) for row in table.tolist()}) == 16


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject):
    """Same token and log-probabilities alone, in any order and in a batch of any size."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vocab = 300
    logits = (rng.standard_normal((4, vocab)) * 4).astype(np.float32)
    records = [
        record(seed=11, position=2, temperature=0.7, slot=1, flags=FILTERED, top_p=0.95),
        record(seed=5, position=3, temperature=1.3, slot=2, flags=RANDOM),
        record(temperature=0.0, slot=3, flags=int(RowFlag.SAMPLE | RowFlag.LOGPROBS)),
        record(seed=8, slot=4, top_k=3, min_p=0.1, flags=FILTERED | RowFlag.BIAS),
    ]
    bias = rng.standard_normal((5, vocab))
    state = make_state(vocab, bias=bias)

    def tokens(order: list[int]) -> list[int]:
        rows = make_rows(*[records[i] for i in order])
        return np.asarray(sample_jit(jnp.asarray(logits[order]), state, rows).tokens).tolist()

    alone = [tokens([i])[0] for i in range(4)]
    order = data.draw(st.permutations(range(4)))
    assert tokens(list(order)) == [alone[i] for i in order]
    many = [i % 4 for i in range(13)]
    assert tokens(many) == [alone[i] for i in many]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["one", "all"])
def test_rows_that_are_not_finite_yield_minus_one_and_touch_nobody(bad, where):
    rng = np.random.default_rng(4)
    good = rng.standard_normal((3, V)).astype(np.float32)
    flags = FILTERED | RowFlag.LOGPROBS
    records = [record(seed=i, top_p=0.9, flags=flags) for i in range(3)]
    wanted = sample_jit(jnp.asarray(good), make_state(V), make_rows(*records))
    broken = good.copy()
    broken[1, 5 if where == "one" else slice(None)] = bad
    got = sample_jit(jnp.asarray(broken), make_state(V), make_rows(*records))
    lost = where == "all" or bad != -np.inf
    assert (int(got.tokens[1]) == -1) == lost
    for name, array in got._asdict().items():
        assert np.array_equal(np.asarray(array)[[0, 2]], np.asarray(getattr(wanted, name))[[0, 2]])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_inverse_cdf_against_float64(data: st.DataObject):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vocab = data.draw(st.sampled_from([1, 7, 127, 128, 129, 400]))
    weights = rng.random(vocab).astype(np.float32) ** 8
    weights[rng.random(vocab) < 0.5] = 0.0
    if not weights.any():
        weights[rng.integers(vocab)] = 1.0
    ends = st.sampled_from([0.0, 0.5, float(np.float32(1 - 2**-24))])
    u = np.float32(data.draw(st.one_of(ends, st.floats(0, float(np.float32(0.999999))))))
    index = int(inverse_cdf(jnp.asarray(weights)[None], jnp.asarray([u]))[0])
    assert weights[index] > 0.0, "an index without weight was drawn"
    running = np.cumsum(weights.astype(np.float64)) / weights.sum(dtype=np.float64)
    assert running[index] - weights[index] / weights.sum() <= u + 1e-5
    assert u - 1e-5 <= running[index]


@pytest.mark.parametrize("vocab", [5, 19, 20, 21, 300])
def test_logprobs_against_float64(vocab):
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((4, vocab)) * 5).astype(np.float32)
    logits[1, ::2] = -np.inf
    logits[2, :] = np.round(logits[2, :])  # ties
    tokens = np.array([0, 1, 2, 4], np.int32)
    logprobs, ranks, ids, top = map(
        np.asarray, token_logprobs(jnp.asarray(logits), jnp.asarray(tokens))
    )
    x = logits.astype(np.float64)
    wanted = (
        x
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - x.max(-1, keepdims=True)
    )
    np.testing.assert_allclose(logprobs, wanted[range(4), tokens], rtol=1e-5, atol=1e-5)
    assert ranks.tolist() == [
        1 + int((row > row[t]).sum()) for row, t in zip(x, tokens, strict=True)
    ]
    count = min(vocab, MAX_LOGPROBS)
    assert ids.shape == top.shape == (4, MAX_LOGPROBS)
    assert (ids[:, count:] == -1).all() and np.isneginf(top[:, count:]).all()
    for row in range(4):
        best = np.sort(wanted[row])[::-1][:count]
        np.testing.assert_allclose(top[row, :count], best, rtol=1e-5, atol=1e-5)
        assert len(set(ids[row, :count].tolist())) == count
        np.testing.assert_allclose(
            top[row, :count], wanted[row, ids[row, :count]], rtol=1e-5, atol=1e-5
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_adjustments_against_float64(data: st.DataObject):
    """Penalties, then bias, then bans: read back through the log-probabilities of the step."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vocab = 16
    logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
    prompt, output = rng.random(vocab) < 0.4, rng.poisson(0.7, vocab)
    banned = rng.random(vocab) < 0.3
    banned[0] = False
    bias = rng.standard_normal(vocab).astype(np.float32)
    repetition = data.draw(st.sampled_from([1.0, 1.5, 0.5]))
    presence = data.draw(st.sampled_from([0.0, 1.0, -0.5]))
    frequency = data.draw(st.sampled_from([0.0, 1.0, -1.5]))
    uses = [data.draw(st.booleans()) for _ in range(3)]
    flags = RowFlag.LOGPROBS | RowFlag.COUNTS * uses[0] | RowFlag.MIN_TOKENS * uses[1]
    flags |= RowFlag.BIAS * uses[2]
    counts = np.where(prompt, PROMPT_BIT, 0) + np.where(banned, BAN_BIT, 0) + output
    state = make_state(vocab, 1, np.stack([counts * 0 - 1, counts]), np.stack([bias * 9, bias]))
    values = {"repetition": repetition, "presence": presence, "frequency": frequency}
    rows = make_rows(record(slot=1, temperature=0.0, flags=int(flags), **values))
    got = sample_jit(jnp.asarray(logits)[None], state, rows)

    x = logits.astype(np.float64)
    if uses[0]:
        seen = prompt | (output > 0)
        x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * output - presence * (output > 0)
        if uses[1]:
            x[banned] = -np.inf
    if uses[2]:
        x = x + bias
    wanted = x - x.max() - np.log(np.exp(x - x.max()).sum())
    found = np.full(vocab, -np.inf)
    ids = np.asarray(got.top_ids[0])
    found[ids[ids >= 0]] = np.asarray(got.top_logprobs[0])[ids >= 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-5)
    assert int(got.tokens[0]) == int(x.argmax()) or x[int(got.tokens[0])] > x.max() - 1e-5


def test_no_key_is_used_twice():
    rows = make_rows(*[record(seed=i, position=i) for i in range(4)])
    with jax.debug_key_reuse(True):
        sample(jnp.zeros((4, V)), make_state(V), rows)
