"""score: the log-probabilities of service, and derivatives that finite differences in float64 confirm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import InvalidRequest
from jaxinfer.llm import LLM
from jaxinfer.loading import LoadedModel
from jaxinfer.research import prefill, score, score_batch
from tests.research import hand
from tests.research.hand import assert_close, some_tokens


@pytest.mark.parametrize("which", ["served", "served_windowed", "served_dynamic"])
def test_scores_equal_prefill_and_service(request: pytest.FixtureRequest, which: str) -> None:
    llm: LLM = request.getfixturevalue(which)
    model = llm.model
    for count in (2, 16, 130):
        tokens = some_tokens(count, seed=count)
        got = np.asarray(score(model.params, model, tokens))
        _, out = prefill(model, tokens)
        picked = np.asarray(out.logprobs)[np.arange(count - 1), tokens[1:]]
        assert_close(got, picked)
        served = llm.score([tokens])[0].logprobs[1:]
        assert_close(got, np.array(served, np.float64))


def test_a_batch_scores_as_its_rows(windowed: LoadedModel) -> None:
    rows = [some_tokens(n, seed=n) for n in (2, 70, 33, 16)]
    got = np.asarray(score_batch(windowed.params, windowed, rows))
    assert got.shape == (4, 69)
    for row, tokens in zip(got, rows, strict=True):
        alone = score(windowed.params, windowed, tokens)
        assert_close(row[: len(alone)], alone)
        assert not row[len(alone) :].any()


def test_gradients_against_float64_differences(model: LoadedModel) -> None:
    """Along a random direction in each leaf, over more tokens than one chunk of keys."""
    truth, config, tokens = hand.to_numpy(model.params), model.config, some_tokens(150)
    grads = hand.to_numpy(jax.grad(lambda p: score(p, model, tokens).sum())(model.params))
    leaves, tree = jax.tree.flatten(truth)
    rng, step = np.random.default_rng(0), 1e-4
    for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        direction = rng.standard_normal(leaf.shape) / np.sqrt(leaf.size)
        ends = []
        for sign in (1, -1):
            moved = [*leaves[:i], leaf + sign * step * direction, *leaves[i + 1 :]]
            ends.append(hand.score(jax.tree.unflatten(tree, moved), config, tokens))
        expected = (ends[0] - ends[1]) / (2 * step)
        typical = np.linalg.norm(grad) / np.sqrt(leaf.size)
        assert typical > 0
        assert abs((grad * direction).sum() - expected) < 2e-3 * typical, f"leaf {i}"


def test_gradient_of_an_activation(model: LoadedModel) -> None:
    """With respect to a value put in, and through a function that closes over a traced value."""
    tokens = some_tokens(24, seed=1)
    name = "layers.0.out"
    _, out = prefill(model, tokens, taps=[name])
    direction = np.random.default_rng(1).standard_normal(out.taps[name].shape) / 30

    def put(x: jax.Array) -> jax.Array:
        return score(model.params, model, tokens, interventions={name: x}).sum()

    def steer(amount: jax.Array) -> jax.Array:
        hook = {name: lambda x: x + amount * direction}
        return score(model.params, model, tokens, interventions=hook).sum()

    def by_hand(amount: float) -> float:
        return hand.score(
            hand.to_numpy(model.params),
            model.config,
            tokens,
            lambda n, x: x + amount * direction if n == name else x,
        )

    expected = (by_hand(1e-4) - by_hand(-1e-4)) / 2e-4
    assert float((jax.grad(put)(out.taps[name]) * direction).sum()) == pytest.approx(
        expected, rel=1e-3
    )
    assert float(jax.grad(steer)(0.0)) == pytest.approx(expected, rel=1e-3)


def test_a_gradient_step_raises_the_score(model: LoadedModel) -> None:
    tokens = some_tokens(30, seed=2)

    def loss(p):
        return -score(p, model, tokens).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(model.params)
    moved = jax.tree.map(lambda w, g: w - 1e-3 * g, model.params, grads)
    assert loss(moved) < value
    assert jnp.isfinite(value)


@pytest.mark.parametrize("tokens", [[5], [], [1, 999]])
def test_tokens_that_cannot_be_scored(model: LoadedModel, tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="tokens"):
        score(model.params, model, tokens)
    with pytest.raises(InvalidRequest, match="sequences is empty"):
        score_batch(model.params, model, [])
