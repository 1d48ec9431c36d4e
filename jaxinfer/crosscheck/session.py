"""The cross-check as a whole: our greedy run, the reference's run on the same tokens, the comparison.

Three paths meet: the engine as it serves (chunked prefill, decode), one forward pass with taps, and the
reference. Called by the CLI and by tests.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.crosscheck.compare import (
    THRESHOLDS,
    Greedy,
    LayerError,
    compare_greedy,
    first_diverging,
    hint,
    layer_errors,
    merge_layers,
    top1,
)
from jaxinfer.crosscheck.exchange import Progress, Reference, Request, Sequence, read_reference
from jaxinfer.crosscheck.forward import Ours, run_forward
from jaxinfer.crosscheck.prompts import NamedPrompt
from jaxinfer.errors import InvalidRequest, JaxinferError
from jaxinfer.llm import LLM
from jaxinfer.types import SamplingParams

RunReference = Callable[[Request, Path, Progress | None], None]


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine made of one prompt: greedy tokens, and the log-probability of every token
    from the second of the prompt to the last one generated."""

    tokens: list[int]
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptReport:
    """One prompt. dlogprob: over the reference's top 20 of the forward pass; served: |difference| of
    the tokens' own log-probabilities as the engine reported them."""

    name: str
    prompt_tokens: int
    generated: int
    greedy: Greedy
    max_dlogprob: float
    mean_dlogprob: float
    max_dlogprob_served: float
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict and what it rests on; `as_json` documents the JSON form."""

    model: str
    dtype: str
    reference: dict[str, Any]
    prompts: list[PromptReport]
    skipped: list[str]
    layers: list[LayerError]
    mean_dlogprob: float
    hint: str | None
    hint_served: str | None
    failures: list[str] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        return not self.failures

    @property
    def first_diverging_layer(self) -> str | None:
        return first_diverging(self.layers, THRESHOLDS[self.dtype].layer)

    def as_json(self) -> dict[str, Any]:
        """Plain finite values: `agree`, `failures`, `thresholds`, totals, `layers`, `prompts`."""
        greedy = [p.greedy for p in self.prompts]
        return {
            "agree": self.agree,
            "failures": self.failures,
            "model": self.model,
            "dtype": self.dtype,
            "reference": self.reference,
            "thresholds": asdict(THRESHOLDS[self.dtype]),
            "max_dlogprob": max(p.max_dlogprob for p in self.prompts),
            "mean_dlogprob": self.mean_dlogprob,
            "max_dlogprob_served": max(p.max_dlogprob_served for p in self.prompts),
            "top1_agreement": min(p.top1_agreement for p in self.prompts),
            "greedy": {
                "identical": sum(g.identical for g in greedy),
                "near_ties": sum(g.near_tie for g in greedy),
                "different": sum(not g.agrees for g in greedy),
                "shortest_agreement": min(g.length for g in greedy),
            },
            "first_diverging_layer": self.first_diverging_layer,
            "hint": self.hint,
            "hint_served": self.hint_served,
            "layers": [asdict(e) for e in self.layers],
            "prompts": [asdict(p) | {"greedy": asdict(p.greedy)} for p in self.prompts],
            "skipped": self.skipped,
        }


def crosscheck(
    llm: LLM,
    prompts: list[NamedPrompt],
    max_tokens: int,
    run_reference: RunReference,
    *,
    reference_model: str | None = None,
    skipped: list[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare the engine with the reference.

    Args:
        prompts: token ids, which both sides are fed. max_tokens: greedy tokens for each, at least 1.
        run_reference: fills a folder, see exchange.run_reference.
        reference_model: what the reference loads, if not the engine's own checkpoint.
    """
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens={max_tokens} must be at least 1")
    served = _serve(llm, prompts, max_tokens)
    sequences = [
        Sequence(p.name, [*p.token_ids, *s.tokens[:-1]], len(p.token_ids))
        for p, s in zip(prompts, served, strict=True)
    ]
    source = reference_model or str(llm.model.path)
    request = Request(source, sequences, max_tokens, sorted(llm.model.eos_ids))
    with tempfile.TemporaryDirectory(prefix="jaxinfer-crosscheck-") as name:
        folder = Path(name)
        run_reference(request, folder, progress)
        parts = []
        for i, (sequence, one) in enumerate(zip(sequences, served, strict=True)):
            reference = read_reference(folder, i)
            parts.append(_compare(llm, sequence, one, reference))
            (folder / f"{i}.safetensors").unlink()
            if progress:
                progress("comparing", i + 1, len(sequences))
        versions = json.loads((folder / "versions.json").read_text("utf-8"))
    return _report(llm, parts, versions, skipped or [])


def _serve(llm: LLM, prompts: list[NamedPrompt], max_tokens: int) -> list[Served]:
    """Greedy continuations of all prompts at once, as the engine serves them; JaxinferError if one fails."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    outputs = llm.generate([p.token_ids for p in prompts], params)
    served = []
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.error is not None:
            raise JaxinferError(f"prompt {prompt.name!r} could not be served: {output.error}")
        tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs or []
        scored = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        found = [e[t].logprob for t, e in scored if e is not None]
        found += [e[t].logprob for t, e in zip(tokens, entries, strict=True)]
        served.append(Served(tokens, np.asarray(found)))
    return served


@dataclass(frozen=True, slots=True)
class _Part:
    report: PromptReport
    layers: list[LayerError]
    deltas: np.ndarray  # f64[T, k]
    served: np.ndarray  # f64[T - 1]


def _compare(llm: LLM, sequence: Sequence, served: Served, reference: Reference) -> _Part:
    ours: Ours = run_forward(llm, sequence.token_ids, reference.top_ids)
    limits = THRESHOLDS[llm.model.dtype]
    deltas = _finite(np.abs(ours.logprobs.astype(np.float64) - reference.top_logprobs))
    fed = len(sequence.token_ids)
    # The last token generated is not fed, so the reference has no log-probability of it here.
    own = _finite(np.abs(served.logprobs[: fed - 1] - reference.next_logprobs))
    greedy = compare_greedy(
        served.tokens,
        reference.greedy_ids.tolist(),
        reference.greedy_margins.tolist(),
        limits.near_tie,
    )
    same = top1(ours.best, reference.top_ids, reference.top_logprobs, limits.near_tie)
    report = PromptReport(
        name=sequence.name,
        prompt_tokens=sequence.prompt_tokens,
        generated=len(served.tokens),
        greedy=greedy,
        max_dlogprob=float(deltas.max()),
        mean_dlogprob=float(deltas.mean()),
        max_dlogprob_served=float(own.max(initial=0.0)),
        top1_agreement=float(same.mean()),
    )
    return _Part(report, layer_errors(ours.hidden, reference.hidden), deltas, own)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.nan_to_num(values, nan=1e30, posinf=1e30)


def _report(llm: LLM, parts: list[_Part], versions: dict[str, Any], skipped: list[str]) -> Report:
    limits, page_size = THRESHOLDS[llm.model.dtype], llm.core.config.page_size
    prompts = [p.report for p in parts]
    total = sum(float(p.deltas.sum()) for p in parts)
    failures = []
    for what, worst in (
        ("max_dlogprob", max(p.max_dlogprob for p in prompts)),
        ("max_dlogprob_served", max(p.max_dlogprob_served for p in prompts)),
    ):
        if not worst < limits.dlogprob:
            failures.append(f"{what}={worst:.3g} is not below {limits.dlogprob:g}")
    for p in prompts:
        if p.greedy.agrees:
            continue
        failures.append(
            f"{p.name!r}: greedy tokens differ after {p.greedy.length} of {p.greedy.of}, where the "
            f"reference's two best logits are {p.greedy.margin:.3g} apart (near tie: {limits.near_tie:g})"
        )
    return Report(
        model=llm.model.name,
        dtype=llm.model.dtype,
        reference=versions,
        prompts=prompts,
        skipped=skipped,
        layers=merge_layers([p.layers for p in parts]),
        mean_dlogprob=total / sum(p.deltas.size for p in parts),
        hint=hint([p.deltas.max(1) for p in parts], limits.dlogprob, page_size),
        # Entry i was computed at position i, whose next token it scores.
        hint_served=hint([p.served for p in parts], limits.dlogprob, page_size),
        failures=failures,
    )
