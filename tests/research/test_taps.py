"""Taps show the activations of the model written by hand; interventions change what it changes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import InvalidRequest
from jaxinfer.loading import LoadedModel
from jaxinfer.research import activation_shapes, extend, prefill, score
from tests.research import hand
from tests.research.hand import assert_close, some_tokens


def test_all_taps_equal_the_hand_written_activations(model: LoadedModel) -> None:
    tokens = some_tokens(70)
    _, out = prefill(model, tokens, taps=["*"])
    _, truth = hand.run(hand.to_numpy(model.params), model.config, tokens)
    assert list(out.taps) == list(activation_shapes(model))
    assert set(out.taps) == set(truth)
    for name, value in out.taps.items():
        assert_close(value, truth[name], name)
        assert value.shape == (70, *activation_shapes(model)[name])


def test_taps_do_not_depend_on_chunks(model: LoadedModel) -> None:
    tokens = some_tokens(300, seed=1)
    names = ["layers.*.out", "final_norm"]
    _, whole = prefill(model, tokens, taps=names)
    state, first = prefill(model, tokens[:5], taps=names)
    _, rest = extend(model, state, tokens[5:], taps=names)
    assert list(whole.taps) == ["layers.0.out", "layers.1.out", "final_norm"]
    for name in whole.taps:
        joined = np.concatenate([first.taps[name], rest.taps[name]])
        assert_close(joined, whole.taps[name])


def zeroed(wanted: str):
    return lambda name, value: 0 * value if name == wanted else value


@pytest.mark.parametrize("name", ["embed", "layers.0.attn_out", "layers.1.mlp_out", "layers.0.v"])
@pytest.mark.parametrize("how", ["value", "function"])
def test_zeroing_an_activation(model: LoadedModel, name: str, how: str) -> None:
    tokens = some_tokens(37, seed=2)
    replace = 0.0 if how == "value" else (lambda x: 0 * x)
    _, out = prefill(model, tokens, taps=[name], interventions={name: replace})
    truth, _ = hand.run(hand.to_numpy(model.params), model.config, tokens, zeroed(name))
    assert_close(out.logits, truth)
    assert not np.any(out.taps[name]), "a tap shows what replaced the activation"


def test_patching_from_another_run(model: LoadedModel) -> None:
    """With the last layer's output of another prompt the logits are the other prompt's."""
    clean, other = some_tokens(90, seed=3), some_tokens(90, seed=4)
    _, source = prefill(model, clean, taps=["layers.1.out"])
    _, patched = prefill(model, other, interventions=source.taps)
    assert_close(patched.logits, source.logits)


def test_a_function_sees_all_tokens_at_once_and_no_padding(model: LoadedModel) -> None:
    tokens = some_tokens(301, seed=5)
    seen = []

    def centre(x):
        seen.append(x.shape)
        return x - x.mean(axis=0)

    _, out = prefill(model, tokens, interventions={"layers.0.out": centre})
    truth, _ = hand.run(
        hand.to_numpy(model.params),
        model.config,
        tokens,
        lambda name, x: x - x.mean(0) if name == "layers.0.out" else x,
    )
    assert set(seen) == {(301, 64)}
    assert_close(out.logits, truth)


def test_a_function_may_change_between_calls(model: LoadedModel) -> None:
    scale = 1.0

    def scaled(x):
        return scale * x

    tokens = some_tokens(10, seed=6)
    _, plain = prefill(model, tokens, interventions={"layers.*.attn_out": scaled})
    scale = 0.0
    _, off = prefill(model, tokens, interventions={"layers.*.attn_out": scaled})
    assert_close(plain.logits, prefill(model, tokens)[1].logits)
    _, zero = prefill(model, tokens, interventions={"layers.*.attn_out": 0.0})
    assert_close(off.logits, zero.logits)


def test_interventions_in_one_token_and_in_score(model: LoadedModel) -> None:
    tokens = some_tokens(20, seed=7)
    change = {"layers.1.attn_out": 0.0}
    _, out = prefill(model, tokens, interventions=change)
    state, _ = prefill(model, tokens[:-1], interventions=change)
    _, last = extend(model, state, tokens[-1:], interventions=change)
    assert_close(last.logits[0], out.logits[-1])
    by_hand = hand.score(
        hand.to_numpy(model.params), model.config, tokens, zeroed("layers.1.attn_out")
    )
    for replace in (0.0, lambda x: 0 * x):
        total = score(model.params, model, tokens, interventions={"layers.1.attn_out": replace})
        assert float(total.sum()) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"taps": ["layers.7.out"]}, r"tap 'layers.7.out' names no activation.*layers.1.out"),
        ({"taps": ["layer.*.attn"]}, "names no activation"),
        ({"interventions": {"embedding": 0.0}}, "intervention 'embedding'.*embed"),
        ({"interventions": {"embed": 0.0, "e*": 1.0}}, "meets embed a second time"),
        ({"interventions": {"embed": np.zeros((2, 64))}}, r"does not broadcast to \(3, 64\)"),
        ({"interventions": {"embed": lambda x: x[:1]}}, "keep the shape"),
    ],
)
def test_unknown_names_and_shapes_are_refused(
    model: LoadedModel, options: dict, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        prefill(model, [1, 2, 3], **options)
    _, out = prefill(model, [1, 2, 3])
    assert jnp.isfinite(out.logits).all()
