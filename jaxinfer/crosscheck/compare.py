"""From both sides' numbers to a verdict: per layer, per token, and a hint where to look.

Pure numpy on plain values; knows no model. Called by session.py, and by tests with made-up faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NEAR_TIE = 1e-3  # logits: the reference's own two best are this close


@dataclass(frozen=True, slots=True)
class Thresholds:
    """dlogprob: largest |difference of log-probabilities| in nats, on the reference's top 20.
    layer: largest relative error of a token's hidden state before a layer counts as diverging.
    """

    dlogprob: float
    layer: float
    near_tie: float = NEAR_TIE


# Rounding alone stays below these; above, it is a fault. bfloat16: across kernels about 1e-2 nats.
THRESHOLDS = {
    "float32": Thresholds(2e-3, 1e-4),
    "float16": Thresholds(2e-2, 2e-2),
    "bfloat16": Thresholds(1e-1, 1e-1),
}


@dataclass(frozen=True, slots=True)
class LayerError:
    """max_abs over all elements; relative: worst token's |difference| / |reference| (2-norms)."""

    name: str
    max_abs: float
    relative: float


@dataclass(frozen=True, slots=True)
class Greedy:
    """How two greedy continuations agree: `length` common tokens of `of`.

    Attributes:
        margin: the reference's lead at the first disagreement, None if there is none.
        near_tie: that lead is below the threshold, so the disagreement is allowed.
    """

    length: int
    of: int
    margin: float | None
    near_tie: bool

    @property
    def identical(self) -> bool:
        return self.margin is None

    @property
    def agrees(self) -> bool:
        return self.identical or self.near_tie


def layer_errors(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> list[LayerError]:
    """One entry for each hidden state that the reference has; NaN counts as infinite."""
    out = []
    for name, want in reference.items():
        difference = ours[name].astype(np.float64) - want
        scale = np.maximum(np.linalg.norm(want.astype(np.float64), axis=-1), 1e-30)
        relative = np.linalg.norm(difference, axis=-1) / scale
        out.append(LayerError(name, _worst(np.abs(difference)), _worst(relative)))
    return out


def merge_layers(parts: Sequence[Sequence[LayerError]]) -> list[LayerError]:
    """The worst of all sequences, layer by layer."""
    return [
        LayerError(same[0].name, max(e.max_abs for e in same), max(e.relative for e in same))
        for same in zip(*parts, strict=True)
    ]


def first_diverging(layers: Sequence[LayerError], limit: float) -> str | None:
    """The first layer, in the order of the forward pass, whose relative error passes the limit."""
    return next((e.name for e in layers if not e.relative <= limit), None)


def compare_greedy(
    ours: Sequence[int], theirs: Sequence[int], margins: Sequence[float], near_tie: float
) -> Greedy:
    """Compare continuations; both end at the same end-of-text ids or after as many tokens."""
    pairs = zip(ours, theirs, strict=False)
    length = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    if length == len(theirs) and len(ours) == len(theirs):
        return Greedy(length, len(theirs), None, False)
    margin = float(margins[length]) if length < len(margins) else float("inf")
    return Greedy(length, len(theirs), min(margin, 1e9), margin < near_tie)


def top1(best: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray, tie: float) -> np.ndarray:
    """bool[T]: our most likely token is the reference's, or one as likely within `tie`."""
    close = top_logprobs >= top_logprobs[:, :1] - tie
    return ((top_ids == best[:, None]) & close).any(axis=1)


def hint(deltas: Sequence[np.ndarray], limit: float, page_size: int) -> str | None:
    """What the shape of |difference| over positions says about the cause; None if all is small.

    Args:
        deltas: one array a sequence, by position from its first token.
    """
    bad = [np.flatnonzero(~(d <= limit)) for d in deltas]
    firsts = [int(b[0]) for b in bad if len(b)]
    if not firsts:
        return None
    if min(firsts) == 0:
        return "a shift from the first token on: look at the weights, the embedding and the norms"
    if all(first % page_size == 0 for first in firsts):
        return (
            f"starts at position {min(firsts)}, a multiple of the page size {page_size}: look at cache "
            "writes, page tables and chunked prefill"
        )
    if _grows(deltas):
        return "grows with the position: look at rope, positions, masks and windows"
    return (
        f"first seen at position {min(firsts)}, without a pattern: look at single tokens and rows"
    )


def _grows(deltas: Sequence[np.ndarray]) -> bool:
    """Long sequences differ at least twice as much in their last third as in their first."""
    thirds = [np.array_split(d[1:], 3) for d in deltas if len(d) >= 10]
    early = sum(float(np.mean(t[0])) for t in thirds)
    late = sum(float(np.mean(t[2])) for t in thirds)
    return bool(thirds) and late > 2 * early


def _worst(values: np.ndarray) -> float:
    """The maximum; what is not finite becomes 1e30, so that strict JSON can carry it."""
    return float(np.nan_to_num(values, nan=1e30, posinf=1e30).max()) if values.size else 0.0
