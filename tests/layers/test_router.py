"""Routers and experts against numpy in float64, written from the formulas, at published sizes too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.configs.common import check_router
from jaxinfer.configs.ffn import Activation, RouterConfig
from jaxinfer.errors import ConfigError
from jaxinfer.layers.experts import mix_experts
from jaxinfer.layers.router import choose, route

RNG = np.random.default_rng(11)
ROWS = 1000
V3 = RouterConfig(
    experts=256,
    chosen=8,
    score="sigmoid",
    exact=True,
    correction=True,
    groups=8,
    kept_groups=4,
    renormalize=True,
    epsilon=1e-20,
    scale=2.5,
)
V2 = RouterConfig(160, 6, "softmax", groups=8, kept_groups=3, group_pairs=False, scale=16.0)
ROUTERS = {
    "mixtral": RouterConfig(8, 2, "softmax", renormalize=True),
    "qwen2_moe": RouterConfig(60, 4, "softmax"),
    "qwen3_moe": RouterConfig(128, 8, "softmax", renormalize=True),
    "gpt_oss": RouterConfig(128, 4, "chosen", bias=True),
    "deepseek_v2": V2,
    "deepseek_v2_greedy": replace(V2, experts=64, groups=1, kept_groups=1, scale=1.0),
    "deepseek_v3": V3,
    "kimi_k2": replace(V3, experts=384, groups=1, kept_groups=1, scale=2.827),
    "unweighed": replace(V3, experts=32, groups=4, kept_groups=2, renormalize=False),
    "minimax_m2": RouterConfig(256, 8, "sigmoid", correction=True, renormalize=True),
}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def best(values: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-values, kind="stable")[:k]


def routed(
    logits: np.ndarray, correction: np.ndarray | None, c: RouterConfig
) -> tuple[np.ndarray, np.ndarray, float]:
    """(experts, weights, how little worse the best expert or group was that was left out) of one token."""
    if c.score == "chosen":
        order = best(logits, c.chosen + 1)
        gap = float(logits[order[-2]] - logits[order[-1]])
        return order[:-1], softmax(logits[order[:-1]]), gap
    scores = softmax(logits) if c.score == "softmax" else 1 / (1 + np.exp(-logits))
    ranked = scores if correction is None else scores + correction
    gap = float("inf")
    if c.kept_groups < c.groups:
        groups = np.sort(ranked.reshape(c.groups, -1), axis=1)
        worth = groups[:, -2:].sum(1) if c.group_pairs else groups[:, -1]
        order = best(worth, c.kept_groups + 1)
        gap = float(worth[order[-2]] - worth[order[-1]])
        inside = np.isin(np.arange(c.experts) // (c.experts // c.groups), order[:-1])
        ranked = np.where(inside, ranked, -np.inf)
    order = best(ranked, c.chosen + 1)
    gap = min(gap, float(ranked[order[-2]] - ranked[order[-1]]))
    experts = order[:-1]
    weights = scores[experts]
    if c.renormalize:
        weights = weights / (weights.sum() + c.epsilon)
    return experts, weights * c.scale, gap


@pytest.mark.parametrize("name", ROUTERS)
def test_router(name: str) -> None:
    """R-WLD-06: corrections that lie 1e-4 apart around 5.0 decide as they do in float64."""
    config = check_router(ROUTERS[name])
    logits = RNG.standard_normal((ROWS, config.experts)).astype(np.float32)
    correction = None
    if config.correction:
        logits *= 0.01  # so that the corrections decide
        steps = RNG.permutation(config.experts) - config.experts // 2
        correction = np.float32(5.0) + steps.astype(np.float32) * np.float32(1e-4)
    run = jax.jit(partial(choose, config=config))
    given = None if correction is None else jnp.asarray(correction)
    experts, weights = map(np.asarray, run(jnp.asarray(logits), given))
    assert experts.shape == weights.shape == (ROWS, config.chosen)
    truth = None if correction is None else correction.astype(np.float64)
    clear = 0
    for i in range(ROWS):
        expected, weighed, gap = routed(logits[i].astype(np.float64), truth, config)
        if gap < 2e-6:  # float32 may see it the other way round
            continue
        clear += 1
        order, wanted = np.argsort(experts[i]), np.argsort(expected)
        np.testing.assert_array_equal(experts[i][order], expected[wanted])
        np.testing.assert_allclose(weights[i][order], weighed[wanted], rtol=3e-6)
    assert clear > 0.9 * ROWS


def test_bfloat16_corrections_would_choose_otherwise() -> None:
    """What R-WLD-06 is about: this test's data tells a rounded correction from a whole one."""
    config = ROUTERS["kimi_k2"]
    logits = jnp.asarray(0.01 * RNG.standard_normal((100, 384)), jnp.float32)
    correction = 5.0 + 1e-4 * jnp.arange(384, dtype=jnp.float32)[::-1]
    right, _ = choose(logits, correction, config)
    rounded, _ = choose(logits, correction.astype(jnp.bfloat16).astype(jnp.float32), config)
    assert (np.sort(right) != np.sort(rounded)).any(axis=1).all()


def test_equal_scores_take_the_lower_expert() -> None:
    for config in (ROUTERS["mixtral"], ROUTERS["gpt_oss"], replace(V3, correction=False)):
        experts, _ = choose(jnp.zeros((3, config.experts)), None, config)
        np.testing.assert_array_equal(experts, [range(config.chosen)] * 3)


def test_dropped_groups_score_nothing_in_v2_and_stay_out_in_v3() -> None:
    """All but one expert of the kept group score 0 in V2, so one of a dropped group comes in, at weight 0."""
    logits = jnp.asarray([[0.0, 0.0, 300.0, 0.0]])
    v2 = RouterConfig(4, 2, "softmax", groups=2, kept_groups=1, group_pairs=False)
    experts, weights = choose(logits, None, v2)
    np.testing.assert_array_equal(experts, [[2, 0]])
    np.testing.assert_array_equal(weights, [[1.0, 0.0]])
    correction = jnp.asarray([-1.0, -9.0, -1.0, -1.0])  # every corrected score is negative
    v3 = RouterConfig(4, 2, "sigmoid", correction=True, groups=2, kept_groups=1)
    assert sorted(choose(logits, correction, v3)[0][0].tolist()) == [2, 3]


def test_exact_logits_of_rounded_activations() -> None:
    """The router of V3 multiplies float32 whatever the activations are."""
    x = jnp.asarray(RNG.standard_normal((16, 64)), jnp.bfloat16)
    w = (0.05 * RNG.standard_normal((64, 256))).astype(np.float32)
    config = replace(V3, correction=False)
    experts, weights = map(np.asarray, route(x, jnp.asarray(w), None, None, config))
    logits = np.asarray(x, np.float64) @ w.astype(np.float64)
    for i, row in enumerate(logits):
        expected, weighed, _ = routed(row, None, config)
        np.testing.assert_array_equal(experts[i], expected)
        np.testing.assert_allclose(weights[i], weighed, rtol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [{"groups": 7}, {"kept_groups": 9}, {"chosen": 129}, {"experts": 8, "chosen": 4}],
    ids=str,
)
def test_numbers_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="experts"):
        check_router(replace(V3, **wrong))


# Experts.

ACTIVATIONS = {
    "gated": Activation("silu"),
    "clamped": Activation("silu", limit=0.5),
    "gpt_oss": Activation("silu", limit=7.0, alpha=1.702),
    "plain": Activation("relu2", gated=False),
}
EXPERTS, D, F, CHOSEN = 6, 32, 24, 3


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def acted(kind: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if kind == "plain":
        return np.maximum(up, 0) ** 2
    if kind == "gpt_oss":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return (up + 1) * gate * sigmoid(1.702 * gate)
    if kind == "clamped":
        gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
    return gate * sigmoid(gate) * up


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_experts(kind: str, interleaved: bool) -> None:
    """Some experts get no row, one gets many; a row alone yields the very same bits."""
    activation, tokens = ACTIVATIONS[kind], 83
    inner = F * (1 + activation.gated)
    x, up, down = (
        RNG.standard_normal(s) for s in ((tokens, D), (EXPERTS, D, inner), (EXPERTS, F, D))
    )
    biases = {"up_bias": (EXPERTS, inner), "down_bias": (EXPERTS, D)}
    params = {"up": up, "down": down} | {k: RNG.standard_normal(s) for k, s in biases.items()}
    if kind == "gpt_oss":
        x = x * 3  # so that the limit binds
    # Expert 4 is never taken, expert 1 always.
    others = np.asarray([[0, 2], [2, 0], [3, 5], [5, 0]])[RNG.integers(0, 4, tokens)]
    experts = np.concatenate([np.ones((tokens, 1), int), others], axis=1)[:, [1, 0, 2]]
    weights = RNG.random((tokens, CHOSEN))
    expected = np.zeros((tokens, D))
    for t in range(tokens):
        for e, weight in zip(experts[t], weights[t], strict=True):
            h = x[t] @ params["up"][e] + params["up_bias"][e]
            gate, rest = (h[::2], h[1::2]) if interleaved else np.split(h, 2)
            out = acted(kind, gate, rest if activation.gated else h)
            expected[t] += weight * (out @ params["down"][e] + params["down_bias"][e])
    arrays = {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}
    run = jax.jit(partial(mix_experts, activation=activation, interleaved=interleaved))
    inputs = (jnp.asarray(x, jnp.float32), jnp.asarray(experts), jnp.asarray(weights, jnp.float32))
    got = np.asarray(run(*inputs, arrays))
    assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max()
    for size in (1, 2, 5, 16):
        part = run(*(a[3 : 3 + size] for a in inputs), arrays)
        np.testing.assert_array_equal(np.asarray(part), got[3 : 3 + size])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "deepseek_v2"])
def test_a_choice_is_bitwise_its_own(name: str) -> None:
    config = ROUTERS[name]
    x = jnp.asarray(RNG.standard_normal((83, 64)), jnp.float32)
    w = jnp.asarray(RNG.standard_normal((64, config.experts)), jnp.float32)
    b = jnp.asarray(RNG.standard_normal(config.experts), jnp.float32)
    bias, correction = (b if on else None for on in (config.bias, config.correction))
    run = jax.jit(partial(route, config=config))
    whole = run(x, w, bias, correction)
    for size in (1, 2, 3, 16, 33):
        part = run(x[7 : 7 + size], w, bias, correction)
        for a, b in zip(part, whole, strict=True):
            np.testing.assert_array_equal(a, b[7 : 7 + size])


def test_qwen3_experts_at_full_width() -> None:
    """Qwen3-30B-A3B: hidden 2048, 128 experts of 768, 8 a token; 4 tokens."""
    config, d, f, tokens = ROUTERS["qwen3_moe"], 2048, 768, 4
    draw = partial(np.random.default_rng(12).random, dtype=np.float32)
    x, gate = (draw(s) * 2 - 1 for s in ((tokens, d), (d, config.experts)))
    experts, weights = route(jnp.asarray(x), jnp.asarray(gate), None, None, config)
    # Experts that nobody takes are left out, and the others are one matrix with scaled columns.
    taken, places = np.unique(np.asarray(experts), return_inverse=True)
    up, down = ((draw((n, m)) * 2 - 1) * np.float32(n**-0.5) for n, m in ((d, 2 * f), (f, d)))
    up_scale, down_scale = (draw((len(taken), m)) + np.float32(0.5) for m in (2 * f, d))
    params = {"up": jnp.asarray(up * up_scale[:, None])}
    params["down"] = jnp.asarray(down * down_scale[:, None])
    places = jnp.asarray(places.reshape(experts.shape), jnp.int32)
    act = Activation("silu")
    got = mix_experts(jnp.asarray(x), places, weights, params, act, interleaved=False)
    experts, got = np.asarray(experts), np.asarray(got)
    up, down, gate, x = (a.astype(float) for a in (up, down, gate, x))
    for t, token in enumerate(x):
        chosen, weighed, _ = routed(token @ gate, None, config)
        np.testing.assert_array_equal(experts[t], chosen)
        expected = np.zeros(d)
        for e, weight in zip(np.searchsorted(taken, chosen), weighed, strict=True):
            h = (token @ up) * up_scale[e]
            expected += weight * (acted("gated", h[:f], h[f:]) @ down) * down_scale[e]
        assert np.abs(got[t] - expected).max() < 1e-5 * np.abs(expected).max()
