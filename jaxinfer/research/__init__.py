"""The model as functions of values: what service runs, for notebooks.

    state, out = prefill(model, tokens)            out.logits is f32[T, vocab]
    state, out = extend(model, state, more, taps=["layers.*.out"])
    left, right = state.fork(2)
    grads = jax.grad(lambda p: -score(p, model, tokens).sum())(model.params)

Nothing here changes its arguments: a State stays valid after every call.
"""

from jaxinfer.research.generation import Generated, generate
from jaxinfer.research.prefix import Output, State, extend, prefill
from jaxinfer.research.scoring import score, score_batch
from jaxinfer.research.taps import activation_shapes

__all__ = [
    "Generated",
    "Output",
    "State",
    "activation_shapes",
    "extend",
    "generate",
    "prefill",
    "score",
    "score_batch",
]
