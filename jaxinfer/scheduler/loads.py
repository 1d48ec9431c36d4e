"""LoadPlans: the sampling state (counts, bans, biases) that a slot needs before it first samples.

Pure functions of sequences. Called by the scheduler at every admission.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxinfer.layout import LoadOp
from jaxinfer.scheduler.plan import LOAD_ENTRIES, LOAD_RESETS, LoadPlan
from jaxinfer.scheduler.rows import needs_bias, needs_counts
from jaxinfer.scheduler.sequence import Sequence

Entry = tuple[int, int, LoadOp, float]


def needs_load(sequence: Sequence) -> bool:
    request = sequence.request
    return needs_counts(request.params, request.banned_ids) or needs_bias(request.params)


def load_plans(sequences: Iterable[Sequence]) -> list[LoadPlan]:
    """Plans that reset and fill the slots of freshly admitted sequences, in order."""
    plans: list[LoadPlan] = []
    for sequence in sequences:
        if not plans or len(plans[-1].resets) == LOAD_RESETS:
            plans.append(LoadPlan([], []))
        plans[-1].resets.append((sequence.slot, _fill(sequence)))
        entries = _entries(sequence)
        while entries:
            room = LOAD_ENTRIES - len(plans[-1].entries)
            if not room:
                plans.append(LoadPlan([], []))
                continue
            plans[-1].entries.extend(entries[:room])
            entries = entries[room:]
    return plans


def _fill(sequence: Sequence) -> float:
    return float("-inf") if sequence.request.params.allowed_token_ids is not None else 0.0


def _entries(sequence: Sequence) -> list[Entry]:
    request, params, slot = sequence.request, sequence.request.params, sequence.slot
    out: list[Entry] = []
    if params.repetition_penalty != 1.0:
        prompt = dict.fromkeys(request.prompt_token_ids)
        out += [(slot, token, LoadOp.PROMPT, 0.0) for token in prompt]
    if needs_counts(params, request.banned_ids):
        out += [(slot, token, LoadOp.OUTPUT, 0.0) for token in sequence.output]
        if params.min_tokens:
            out += [(slot, token, LoadOp.BAN, 0.0) for token in request.banned_ids]
    bias = params.logit_bias or {}
    if params.allowed_token_ids is not None:
        bias = {token: bias.get(token, 0.0) for token in params.allowed_token_ids}
    out += [(slot, token, LoadOp.BIAS, value) for token, value in bias.items()]
    return out
