"""generate: continue a State with the sampler of service, so that equal seeds give equal tokens.

Request checks, row records, penalty counts and draws are service's own code; only the loop is here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache import Held
from jaxinfer.errors import InvalidRequest
from jaxinfer.inputs import InputProcessor, Prompt
from jaxinfer.layout import RecordLayout, RowField, RowFlag
from jaxinfer.loading import LoadedModel
from jaxinfer.research.prefix import State, extend
from jaxinfer.scheduler.loads import load_plans, needs_load
from jaxinfer.scheduler.rows import RowStore
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.step.forward import load
from jaxinfer.step.pack import Rows, pack_load
from jaxinfer.step.sampler import sample
from jaxinfer.step.state import DeviceState
from jaxinfer.types import FinishReason, Request, SamplingParams

LAYOUT = RecordLayout(())  # the sampler reads no page tables


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens drawn, the log-probability of each, and why it ended ("stop": the last token is a stop id)."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


def generate(
    model: LoadedModel, state: State, max_tokens: int, params: SamplingParams | None = None
) -> tuple[State, Generated]:
    """Draw up to `max_tokens` tokens after `state` and feed them.

    Args:
        params: as for LLM; None is greedy. Its max_tokens is replaced. Draws depend on (seed, position),
            positions counted from here, with all tokens of `state` as the prompt.
    Returns:
        The state that holds the tokens drawn, and what was drawn.
    Raises:
        InvalidRequest: what needs text or several outputs (stop strings, n, prompt_logprobs), or
            logits that are not finite.
    """
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens={max_tokens} must be at least 1")
    request = _request(
        model, state, replace(params or SamplingParams(temperature=0.0), max_tokens=max_tokens)
    )
    sampling, record = _slot(model, request)
    tokens: list[int] = []
    logprobs: list[float] = []
    reason = FinishReason.LENGTH
    for position in range(max_tokens):
        early = request.banned_ids and position < request.params.min_tokens
        row = record.copy()
        row[RowField.OUT_POS] = position
        row[RowField.FLAGS] |= int(RowFlag.MIN_TOKENS) if early else 0
        sampling, drawn, logprob = _draw(sampling, row, state.logits)
        token = int(drawn)
        if token < 0:
            raise InvalidRequest(f"the logits at position {state.length} are not finite")
        tokens.append(token)
        logprobs.append(float(logprob))
        state, _ = extend(model, state, [token])
        if token in request.stop_ids:
            reason = FinishReason.STOP
            break
    return state, Generated(tokens, logprobs, reason)


def _request(model: LoadedModel, state: State, params: SamplingParams) -> Request:
    """The request that service would make of these tokens and parameters."""
    refused = {
        "stop": (params.stop_strings, ()),
        "n": (params.n, 1),
        "prompt_logprobs": (params.prompt_logprobs, None),
    }
    for name, (value, only) in refused.items():
        if value != only:
            raise InvalidRequest(
                f"{name}={value!r} is not for research.generate; allowed: {only!r} (use LLM, fork or score)"
            )
    limit = model.config.max_length
    inputs = InputProcessor(model.config, model.tokenizer, model.eos_ids, limit, engine_seed=0)
    prompt = Prompt(None, tuple(state.tokens.tolist()))
    return inputs.requests("research", prompt, params)[0]


def _slot(model: LoadedModel, request: Request) -> tuple[DeviceState, np.ndarray]:
    """Sampling state with the request in slot 1, and the slot's row record i32[width]."""
    vocab = model.config.vocab_size
    sequence = Sequence(request, 0, request.max_tokens, list(request.prompt_token_ids), Held(0))
    rows = RowStore(1, LAYOUT)
    rows.open(sequence)
    state = DeviceState(
        caches=[],
        last_token=jnp.zeros((2,), jnp.int32),
        counts=jnp.zeros((2, vocab), jnp.int32),
        bias=jnp.zeros((2, vocab), jnp.float32),
    )
    for plan in load_plans([sequence]) if needs_load(sequence) else []:
        state = _load(state, pack_load(plan))
    record = rows.records[sequence.slot].copy()
    record[RowField.FLAGS] |= int(RowFlag.SAMPLE | RowFlag.LOGPROBS)
    return state, record


_load = jax.jit(load)


@jax.jit
def _draw(
    state: DeviceState, record: jax.Array, logits: jax.Array
) -> tuple[DeviceState, jax.Array, jax.Array]:
    """(state that counts the token, token i32[], its log-probability f32[]) from logits f32[vocab]."""
    rows = Rows(record[None], record[RowField.FLAGS])
    drawn = sample(logits[None], state, rows)
    token = drawn.tokens[0]
    counts = state.counts.at[record[RowField.SLOT], jnp.maximum(token, 0)].add(1)
    return replace(state, counts=counts), token, drawn.logprobs[0]
