"""What latent attention is built of: products per head, the layer norm, the two forms on odd tables."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxinfer.layers.latent import Region, absorbed, expanded
from jaxinfer.layers.linear import head_linear
from jaxinfer.layers.norm import layer_norm
from pallas_kernels.dispatch import Impl

RNG = np.random.default_rng(5)
HEADS, NOPE, ROPE, VALUE, RANK, PAGE = 3, 16, 8, 12, 32, 4


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_products_per_head() -> None:
    x, w = draw(7, HEADS, NOPE), draw(HEADS, NOPE, RANK)
    expected = np.einsum("thk,hkn->thn", x.astype(np.float64), w.astype(np.float64))
    np.testing.assert_allclose(head_linear(jnp.asarray(x), jnp.asarray(w)), expected, atol=2e-5)


def test_layer_norm() -> None:
    x, weight, bias = draw(5, 128) * 3 + 2, draw(128), draw(128)
    wide = x.astype(np.float64)
    normed = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-6)
    found = layer_norm(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias), 1e-6)
    np.testing.assert_allclose(found, normed * weight + bias, atol=2e-5)
    half = layer_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight), jnp.asarray(bias), 1e-6)
    assert half.dtype == jnp.bfloat16


W, WEIGHT, BIAS = (jnp.asarray(draw(*shape)) for shape in ((16, 128, 512), (128,), (128,)))


@pytest.mark.parametrize(
    "of", [lambda x: head_linear(x, W), lambda x: layer_norm(x[:, 0], WEIGHT, BIAS, 1e-6)]
)
def test_a_token_does_not_depend_on_how_many_there_are(
    of: Callable[[jax.Array], jax.Array],
) -> None:
    """Bitwise, with the native ops."""
    x = jnp.asarray(draw(49, 16, 128))
    whole, run = np.asarray(jax.jit(of)(x)), jax.jit(of)
    for first, last in ((0, 1), (3, 5), (7, 10), (20, 36), (1, 49)):
        np.testing.assert_array_equal(run(x[first:last]), whole[first:last])


@pytest.mark.parametrize("impl", ["native", "reference"])
def test_both_forms_against_plain_attention(impl: Impl, request: pytest.FixtureRequest) -> None:
    """Blocks that are cut short, a table with its last pages missing, more pages than a chunk of keys."""
    request.addfinalizer(lambda: pallas_kernels.set_impl("auto"))
    pallas_kernels.set_impl(impl)
    w_uk, w_uv = draw(HEADS, NOPE, RANK), draw(HEADS, RANK, VALUE)
    pool = draw(120, 1, PAGE, RANK + ROPE)
    tables = RNG.permutation(np.arange(1, 120))[: 2 * 41].reshape(2, 41).astype(np.int32)
    tables[1, 3:] = 0
    start, length, block = np.array([150, 4]), np.array([5, 7]), 8
    q = draw(2 * block, HEADS, NOPE + ROPE)
    place = (jnp.asarray(a, jnp.int32) for a in (tables, np.zeros(2), start, length))
    part = Region("blocks", slice(0, None), block, *place)
    arrays = (jnp.asarray(q), jnp.asarray(w_uk), jnp.asarray(w_uv), jnp.asarray(pool))
    one = absorbed(*arrays, [part], None, scale=0.2)
    two = expanded(*arrays, part, scale=0.2)
    for n in range(2):
        entries = pool[tables[n], 0].reshape(-1, RANK + ROPE).astype(np.float64)
        latent, rope = entries[:, :RANK], entries[:, RANK:]
        for i in range(length[n]):
            seen = slice(start[n] + i + 1)
            for head in range(HEADS):
                query = q[n * block + i, head].astype(np.float64)
                s = latent[seen] @ w_uk[head].T @ query[:NOPE] + rope[seen] @ query[NOPE:]
                p = np.exp(0.2 * (s - s.max()))
                expected = p / p.sum() @ latent[seen] @ w_uv[head]
                for found in (one, two):
                    np.testing.assert_allclose(found[n * block + i, head], expected, atol=5e-5)
