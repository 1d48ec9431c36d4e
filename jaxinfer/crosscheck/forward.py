"""Our side of the cross-check: the engine's own paged forward pass over a sequence, with taps.

One prefill step of one row, packed and unpacked as in service, so that pages, tables and masks are the
real ones. Called by session.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.spec import Scope
from jaxinfer.layout import RecordLayout, RowField, StepShape
from jaxinfer.llm import LLM
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.step.forward import StepModel
from jaxinfer.step.pack import pack_step, unpack
from jaxinfer.step.state import cache_shapes

BLOCK = 64


@dataclass(frozen=True, slots=True)
class Ours:
    """What our forward pass made of T tokens.

    Attributes:
        hidden: f32[T, D] by tap name. logprobs: f32[T, k] of the ids asked for. best: i32[T] the most
            likely next token.
    """

    hidden: dict[str, np.ndarray]
    logprobs: np.ndarray
    best: np.ndarray


def run_forward(llm: LLM, ids: list[int], wanted: np.ndarray) -> Ours:
    """Feed `ids` in one step; `wanted` i32[T, k] names the tokens whose log-probabilities are read."""
    core, count = llm.core, len(ids)
    blocks = 1 << (-(-count // BLOCK) - 1).bit_length()  # few shapes, so few compilations
    shape = StepShape(0, blocks, BLOCK)
    specs, page_size = core.step_model.specs, core.config.page_size
    pages = -(-shape.tokens // page_size)
    states = tuple(i for i, spec in enumerate(specs) if spec.scope is Scope.STATE)
    tables = tuple(1 if spec.scope is Scope.STATE else pages for spec in specs)
    layout = RecordLayout(tables, states)
    model = StepModel(llm.model.config, core.step_model.family, specs, layout, page_size)
    buffer = pack_step(_plan(ids, shape, layout), layout)
    padded = np.zeros((shape.tokens, wanted.shape[1]), np.int32)
    padded[:count] = wanted
    taps, logprobs, best = _run(model, shape, llm.model.params, buffer, padded)
    hidden = {name: np.asarray(value[:count], np.float32) for name, value in taps.items()}
    return Ours(hidden, np.asarray(logprobs)[:count], np.asarray(best)[:count])


def _plan(ids: list[int], shape: StepShape, layout: RecordLayout) -> StepPlan:
    count = len(ids)
    used = -(-count // BLOCK)
    record = np.zeros((1, layout.width), np.int32)
    record[0, RowField.SLOT], record[0, RowField.LENGTH] = 1, count
    # The reference feeds all tokens in one pass, so this length fixes its length-dependent rope.
    record[0, RowField.ROPE_LENGTH], record[0, RowField.BLOCKS] = count, used
    for kind, width in enumerate(layout.tables):
        record[0, layout.table_slice(kind)] = np.arange(1, width + 1)
    starts = np.arange(used) * BLOCK
    # Nothing reads a state after these tokens, so no block keeps one.
    kept = [0 * starts for _ in layout.states]
    lengths = np.minimum(BLOCK, count - starts)
    blocks = np.stack([0 * starts, starts, lengths, *kept], 1).astype(np.int32)
    return StepPlan(
        shape=shape,
        decode=np.zeros((0, layout.width), np.int32),
        prefill=record,
        blocks=blocks,
        tokens=np.asarray(ids, np.int32),
        targets=np.asarray([*ids[1:], 0], np.int32),
        sampled=[],
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    model: StepModel, shape: StepShape, params: Any, buffer: jax.Array, wanted: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    last_token = jnp.zeros((2,), jnp.int32)
    view = unpack(buffer, last_token, shape, model.layout, model.specs, model.page_size)
    counts = tuple(1 + width for width in model.layout.tables)
    shapes = cache_shapes(model.specs, counts, model.page_size, model.config.num_layers)
    caches = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    seen: dict[str, jax.Array] = {}

    def tap(name: str, value: jax.Array) -> jax.Array:
        if name in ("embed", "final_norm") or name.endswith(".out"):
            seen[name] = value
        return value

    _, hidden = model.family.forward(params, model.config, caches, view.batch, tap)

    def one(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = model.family.logits(params, model.config, args[0])
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        return jnp.take_along_axis(logprobs, args[1], axis=-1), jnp.argmax(logits, axis=-1)

    # Block by block: the logits of all positions at once may be larger than the model.
    parts = hidden.reshape(shape.blocks, BLOCK, -1), wanted.reshape(shape.blocks, BLOCK, -1)
    logprobs, best = jax.lax.map(one, parts)
    return seen, logprobs.reshape(shape.tokens, -1), best.reshape(-1)
