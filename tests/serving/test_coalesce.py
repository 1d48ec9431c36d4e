"""coalesce: whatever the deltas and the interval, nothing is lost, told twice or held back for ever."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.types import CompletionOutput, Logprob, RequestOutput
from serving.coalesce import coalesce

PIECES = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=3), max_size=8)


def delta(index: int, first: int, count: int, end: str | None = None) -> CompletionOutput:
    ids = list(range(first, first + count))
    return CompletionOutput(
        index,
        text="".join(f"{i}," for i in ids),
        token_ids=ids,
        cumulative_logprob=-float(first + count),
        logprobs=[{i: Logprob(-1.0)} for i in ids],
        finish_reason=end,
        stop_reason="x" if end == "stop" else None,
    )


def stream_of(pieces: list[list[tuple[int, int]]]) -> tuple[list[RequestOutput], list[int]]:
    """Items as the engine makes them, and the tokens of each of three outputs."""
    counts, items = [0, 0, 0], []
    for piece in pieces:
        outputs = {}
        for index, count in piece:
            if count and index not in outputs:
                outputs[index] = delta(index, counts[index], count)
                counts[index] += count
        items.append(RequestOutput("r", None, [1], list(outputs.values())))
    last = [delta(i, counts[i], 1, "stop" if i else "length") for i in range(3)]
    items.append(RequestOutput("r", None, [1], last, finished=True))
    if len(items) > 1:
        items[len(items) // 2].prompt_logprobs = [None]
    return items, [count + 1 for count in counts]


async def collect(items: list[RequestOutput], interval: float, first: bool) -> list[RequestOutput]:
    async def source() -> AsyncGenerator[RequestOutput]:
        for item in items:
            yield item

    return [item async for item in coalesce(source(), interval, first=first)]


@settings(max_examples=150, deadline=None)
@given(PIECES, st.sampled_from([1, 2, 5, math.inf]), st.booleans())
def test_nothing_is_lost(pieces: list[list[tuple[int, int]]], interval: float, first: bool) -> None:
    items, counts = stream_of(pieces)
    wants_prompt = any(item.prompt_logprobs for item in items)
    got = asyncio.run(collect(items, interval, first))
    for index in range(3):
        parts = [o for item in got for o in item.outputs if o.index == index]
        ids = list(range(counts[index]))
        assert [i for part in parts for i in part.token_ids] == ids
        assert "".join(part.text for part in parts) == "".join(f"{i}," for i in ids)
        assert [i for part in parts for e in part.logprobs or () for i in e] == ids
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == ("stop" if index else "length")
        assert parts[-1].cumulative_logprob == -float(counts[index])
        held = parts[1:-1] if first else parts[:-1]
        assert all(len(part.token_ids) >= interval for part in held)
    assert sum(item.prompt_logprobs is not None for item in got) == wants_prompt
    assert got[-1].finished and not any(item.finished for item in got[:-1])


async def test_leaving_closes_the_source() -> None:
    closed = []

    async def source() -> AsyncGenerator[RequestOutput]:
        try:
            for i in range(100):
                yield RequestOutput("r", None, [1], [delta(0, i, 1)])
        finally:
            closed.append(True)

    stream = coalesce(source(), 2)
    await anext(stream)
    await stream.aclose()
    assert closed == [True]
