"""Record: what a call is said to have come to, from the items that its client took."""

from __future__ import annotations

from itertools import permutations

import pytest

from jaxinfer.inputs import Prompt
from jaxinfer.types import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from serving.calls import Call, Record


def record_of(*reasons: str | None) -> Record:
    """A record of n outputs, of which each ends in an item of its own (None: it has not ended)."""
    record = Record(Call("a", Prompt(None, (1,)), SamplingParams(n=len(reasons))), 0.0, 1)
    for index, reason in enumerate(reasons):
        output = CompletionOutput(index, "x", [7], finish_reason=reason)
        record.take(RequestOutput("a", None, [1], [output], False, metrics=RequestMetrics(0.0)))
    return record


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        (["stop", "stop"], "stop"),
        (["stop", "length"], "length"),
        (["stop", "abort"], "abort"),
        (["stop", None], "abort"),  # its client has left in the middle
        (["length", None], "abort"),
        (["error", None, "stop"], "error"),
    ],
)
def test_reasons(reasons: list[str | None], told: str):
    """In whatever order the outputs ended."""
    for order in permutations(reasons):
        assert record_of(*order).reason == told
    assert record_of(*reasons).output_tokens == [1] * len(reasons)
