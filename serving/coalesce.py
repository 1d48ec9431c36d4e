"""Holds back the deltas of a stream until enough came together: fewer, longer messages.

The first news and the end of an output are never held back, no token is lost or told twice. Called by
the faces, between Service.generate and what they write.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxinfer.types import CompletionOutput, Logprob, RequestOutput


async def coalesce(
    stream: AsyncGenerator[RequestOutput], interval: float, *, first: bool = True
) -> AsyncGenerator[RequestOutput]:
    """The deltas of `stream`, each output's held back until `interval` new tokens of it are there.

    Args:
        stream: deltas (Service.generate); closed together with the result.
        interval: tokens; 1 passes all on, math.inf waits for the end of each output.
        first: do not wait with the first news of an output.
    """
    async with aclosing(stream):
        held: dict[int, CompletionOutput] = {}
        begun: set[int] = set()
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        async for item in stream:
            for output in item.outputs:
                if output.index in held:
                    _add(held[output.index], output)
                else:
                    held[output.index] = output
            prompt_logprobs = prompt_logprobs or item.prompt_logprobs
            due = [
                output
                for output in held.values()
                if output.finish_reason is not None
                or len(output.token_ids) >= interval
                or (first and output.index not in begun)
            ]
            if not due and not item.finished:
                continue
            for output in due:
                begun.add(output.index)
                del held[output.index]
            item.outputs, item.prompt_logprobs, prompt_logprobs = due, prompt_logprobs, None
            yield item


def _add(held: CompletionOutput, news: CompletionOutput) -> None:
    """Append a delta to the one before it."""
    held.text += news.text
    held.token_ids += news.token_ids
    if held.logprobs is not None and news.logprobs is not None:
        held.logprobs += news.logprobs
    held.cumulative_logprob = news.cumulative_logprob
    held.finish_reason, held.stop_reason = news.finish_reason, news.stop_reason
