"""prefill, extend and fork: any chunking, any padding and any branch give the numbers of one long run."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import InvalidRequest
from jaxinfer.loading import LoadedModel
from jaxinfer.research import extend, prefill
from tests.research import hand
from tests.research.hand import assert_close, is_close, some_tokens


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 64, 65, 200])
def test_prefill_is_the_model_written_by_hand(model: LoadedModel, count: int) -> None:
    tokens = some_tokens(count)
    state, out = prefill(model, tokens)
    truth, _ = hand.run(hand.to_numpy(model.params), model.config, tokens)
    assert_close(out.logits, truth)
    assert_close(out.logprobs, hand.logprobs(truth))
    np.testing.assert_array_equal(state.logits, out.logits[-1])
    assert out.logits.shape == (count, model.config.vocab_size)
    assert state.length == count and state.tokens.tolist() == tokens


@pytest.mark.parametrize("which", ["model", "windowed"])
@settings(max_examples=12, deadline=None)
@given(cuts=st.sets(st.integers(1, 79), max_size=6))
def test_every_chunking_gives_the_same_logits(
    request: pytest.FixtureRequest, which: str, cuts: set[int]
) -> None:
    model: LoadedModel = request.getfixturevalue(which)
    tokens = some_tokens(80, seed=3)
    _, whole = prefill(model, tokens)
    places = [0, *sorted(cuts), 80]
    state, out = prefill(model, tokens[: places[1]])
    parts = [out.logits]
    for start, stop in zip(places[1:], places[2:], strict=False):
        state, out = extend(model, state, tokens[start:stop])
        parts.append(out.logits)
    assert_close(np.concatenate(parts), whole.logits)
    assert state.tokens.tolist() == tokens


def test_the_window_is_seen(windowed: LoadedModel) -> None:
    """A token further back than all layers' windows together no longer matters, a nearer one does."""
    tokens = some_tokens(80, seed=4)
    _, before = prefill(windowed, tokens)
    for place, same in ((2, True), (70, False)):
        changed = list(tokens)
        changed[place] = (changed[place] + 1) % 256
        _, after = prefill(windowed, changed)
        assert is_close(after.logits[-1], before.logits[-1]) is same


def test_rope_that_depends_on_the_prompts_length(dynamic: LoadedModel) -> None:
    tokens = some_tokens(150, seed=5)
    _, whole = prefill(dynamic, tokens)
    first, out = prefill(dynamic, tokens[:50], rope_length=150)
    _, rest = extend(dynamic, first, tokens[50:])
    joined = np.concatenate([out.logits, rest.logits])
    assert_close(joined, whole.logits)
    _, short = prefill(dynamic, tokens[:50])
    assert not is_close(short.logits, out.logits)


def test_room_for_more_changes_nothing(model: LoadedModel) -> None:
    tokens = some_tokens(100, seed=6)
    _, small = prefill(model, tokens)
    state, large = prefill(model, tokens, max_len=500)
    np.testing.assert_array_equal(small.logits, large.logits)
    assert state.caches[0]["k"].shape[0] > 1 + 500 // 16


def test_forks_and_old_states_are_independent(model: LoadedModel) -> None:
    tokens = some_tokens(40, seed=7)
    root, _ = prefill(model, tokens)
    before = [np.array(leaf) for leaf in jax.tree.leaves(root)]
    left, right = root.fork(2)
    assert left.caches[0]["k"] is root.caches[0]["k"], "a fork shares its arrays"
    tails = {"left": [1, 2, 3], "right": [9, 8, 7]}
    left, out = extend(model, left, tails["left"])
    right, other = extend(model, right, tails["right"])
    for tail, got in ((tails["left"], out), (tails["right"], other)):
        _, whole = prefill(model, tokens + tail)
        assert_close(got.logits, whole.logits[40:])
    again, twice = extend(model, root, tails["left"])
    np.testing.assert_array_equal(twice.logits, out.logits)
    assert again.length == 43 and root.length == 40
    for leaf, old in zip(jax.tree.leaves(root), before, strict=True):
        np.testing.assert_array_equal(leaf, old)


def test_a_state_is_a_pytree(model: LoadedModel) -> None:
    state, _ = prefill(model, some_tokens(20, seed=8))
    copy = jax.tree.map(lambda x: x + 0, state)
    for a, b in zip(jax.tree.leaves(copy), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    _, out = extend(model, copy, [5])
    np.testing.assert_array_equal(out.logits, extend(model, state, [5])[1].logits)


@pytest.mark.parametrize(
    ("tokens", "options", "words"),
    [
        ([], {}, "non-empty"),
        ([[1, 2]], {}, "flat list"),
        ([1.5], {}, "token ids"),
        ([1, 288], {}, r"288, outside \[0, 287\]"),
        ([-1], {}, "-1, outside"),
        ([1] * 513, {}, r"allowed range \[1, 512\]"),
        ([1, 2], {"max_len": 1}, r"max_len=1 is out of range \[2, 512\]"),
        ([1, 2], {"rope_length": 513}, "rope_length=513"),
    ],
)
def test_bad_arguments_are_refused(
    model: LoadedModel, tokens: list, options: dict, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        prefill(model, tokens, **options)


def test_a_state_cannot_outgrow_the_model(model: LoadedModel) -> None:
    state, _ = prefill(model, some_tokens(510, seed=9))
    state, _ = extend(model, state, [1, 2])
    with pytest.raises(InvalidRequest, match="512 tokens so far and 1 more"):
        extend(model, state, [3])
    with pytest.raises(InvalidRequest, match="n=0"):
        state.fork(0)
