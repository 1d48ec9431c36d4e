"""The two jitted functions of service: `step` runs the model once, `load` fills sampling state of slots.

    step(params, state, buffer) -> (state, result)          load(state, buffer) -> state

Pure: they know nothing of requests. `state` is donated; `result` is one int32 buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.spec import CacheSpec
from jaxinfer.layout import LoadOp, RecordLayout, RowField, RowFlag, StepShape
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import Family
from jaxinfer.scheduler.plan import LOAD_RESETS, StepOutput
from jaxinfer.step.pack import HEADER, Unpacked, unpack
from jaxinfer.step.sampler import sample, token_logprobs
from jaxinfer.step.state import BAN_BIT, PROMPT_BIT, DeviceState
from jaxinfer.types import MAX_LOGPROBS

LOAD_CHUNK = 128  # entries that one round of the loading loop enters
SlotArrays = tuple[jax.Array, jax.Array]  # counts and bias
SCORE_WIDTH = 2 + 2 * MAX_LOGPROBS


@dataclass(frozen=True)
class StepModel:
    """What a step is compiled for, by value: equal models give equal executables."""

    config: ModelConfig
    family: Family
    specs: tuple[CacheSpec, ...]
    layout: RecordLayout
    page_size: int


def step(
    model: StepModel, shape: StepShape, params, state: DeviceState, buffer: jax.Array
) -> tuple[DeviceState, tuple[jax.Array, jax.Array]]:
    """One round of the model and the sampler.

    Returns the new state and (result, scored): i32 buffers that `unpack_result` reads. `scored` also
    holds the log-probabilities of the prefill tokens; the host copies one of the two.
    """
    view = unpack(buffer, state.last_token, shape, model.layout, model.specs, model.page_size)
    caches, hidden = model.family.forward(params, model.config, state.caches, view.batch)
    logits = model.family.logits(params, model.config, hidden[view.last])
    state = load(state, buffer[1:HEADER])
    drawn = sample(logits, state, view.rows)
    slots = jnp.where(view.rows.flag(RowFlag.SAMPLE), view.rows[RowField.SLOT], 0)
    token = jnp.maximum(drawn.tokens, 0)
    state = replace(
        state,
        caches=caches,
        last_token=state.last_token.at[slots].set(token),
        counts=state.counts.at[slots, token].add(1),
    )
    result = jnp.concatenate(
        [
            drawn.tokens,
            _bits(drawn.logprobs),
            drawn.ranks,
            drawn.top_ids.reshape(-1),
            _bits(drawn.top_logprobs).reshape(-1),
        ]
    )
    scored = jnp.concatenate([result, _scores(model, params, hidden, view)])
    return state, (result, scored)


def _scores(model: StepModel, params, hidden: jax.Array, view: Unpacked) -> jax.Array:
    """Log-probabilities of the prefill region's next tokens: i32[blocks * block * SCORE_WIDTH]."""
    batch = view.batch
    n = batch.blocks * batch.block

    def score() -> jax.Array:
        def one(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, targets = args
            logits = model.family.logits(params, model.config, x)
            logprobs, ranks, ids, top = token_logprobs(logits, targets)
            columns = [_bits(logprobs)[:, None], ranks[:, None], ids, _bits(top)]
            return jnp.concatenate(columns, axis=1)

        blocks = hidden[batch.rows :].reshape(batch.blocks, batch.block, -1)
        return jax.lax.map(one, (blocks, view.targets.reshape(batch.blocks, -1))).reshape(-1)

    if not n:
        return jnp.zeros((0,), jnp.int32)
    wanted = (view.rows.any_flags & int(RowFlag.PROMPT_LOGPROBS)) != 0
    return jax.lax.cond(wanted, score, lambda: jnp.zeros((n * SCORE_WIDTH,), jnp.int32))


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def unpack_result(result: np.ndarray, shape: StepShape) -> StepOutput:
    """Host view of a result (or scored) buffer; no copies."""
    n, k = shape.sample_rows, MAX_LOGPROBS
    ends = np.cumsum([n, n, n, n * k, n * k])
    tokens, logprobs, ranks, ids, top = np.split(result[: ends[-1]], ends[:-1])
    scores = None
    if len(result) > ends[-1]:
        table = result[ends[-1] :].reshape(-1, SCORE_WIDTH)
        scores = (
            table[:, 0].copy().view(np.float32),
            table[:, 1],
            table[:, 2 : 2 + k],
            table[:, 2 + k :].copy().view(np.float32),
        )
    return StepOutput(
        tokens=tokens,
        logprobs=logprobs.view(np.float32),
        ranks=ranks,
        top_ids=ids.reshape(n, k),
        top_logprobs=top.view(np.float32).reshape(n, k),
        scores=scores,
    )


def load(state: DeviceState, packed: jax.Array) -> DeviceState:
    """Apply a packed LoadPlan: clear the reset slots, then enter counts, bans and biases.

    Both are loops over what there is, so that a step with nothing to load pays nothing.
    """
    resets = packed[2 : 2 + 2 * LOAD_RESETS].reshape(LOAD_RESETS, 2)
    entries = packed[2 + 2 * LOAD_RESETS :].reshape(-1, LOAD_CHUNK, 4)
    fills = jax.lax.bitcast_convert_type(resets[:, 1], jnp.float32)
    vocab = state.counts.shape[1]

    def reset(i: jax.Array, arrays: SlotArrays) -> SlotArrays:
        counts, bias = arrays
        start = (resets[i, 0], jnp.int32(0))
        counts = jax.lax.dynamic_update_slice(counts, jnp.zeros((1, vocab), jnp.int32), start)
        row = jnp.full((1, vocab), fills[i], jnp.float32)
        return counts, jax.lax.dynamic_update_slice(bias, row, start)

    def enter(i: jax.Array, arrays: SlotArrays) -> SlotArrays:
        return _enter(*arrays, entries[i])

    arrays = jax.lax.fori_loop(0, packed[0], reset, (state.counts, state.bias))
    chunks = (packed[1] + LOAD_CHUNK - 1) // LOAD_CHUNK
    counts, bias = jax.lax.fori_loop(0, chunks, enter, arrays)
    return replace(state, counts=counts, bias=bias)


def _enter(counts: jax.Array, bias: jax.Array, entries: jax.Array) -> SlotArrays:
    slot, token, op = entries[:, 0], entries[:, 1], entries[:, 2]

    def at(*ops: LoadOp) -> jax.Array:
        """Slots of the entries with one of `ops`; all others go to the padding slot."""
        return jnp.where(sum((op == int(o)) for o in ops) > 0, slot, 0)

    prompt = at(LoadOp.PROMPT)
    # Setting a bit by `max` is idempotent, so a token may stand in the prompt twice.
    counts = counts.at[prompt, token].max(counts[prompt, token] | PROMPT_BIT)
    added = jnp.where(op == int(LoadOp.BAN), BAN_BIT, 1)
    counts = counts.at[at(LoadOp.BAN, LoadOp.OUTPUT), token].add(added)
    values = jax.lax.bitcast_convert_type(entries[:, 3], jnp.float32)
    return counts, bias.at[at(LoadOp.BIAS), token].set(values)
