"""A server whose model says what the test wants, in the pieces that the test wants.

Stands in for the engine behind a real Service, so that the HTTP side meets every cutting of a text.
Used by tests of chat and of failures.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from jaxinfer.types import CompletionOutput, RequestOutput
from serving.calls import Call
from serving.service import Service

type Start = Callable[[Call], AsyncGenerator[RequestOutput]]


def item(
    call: Call,
    outputs: Sequence[CompletionOutput],
    finished: bool = False,
    error: str | None = None,
) -> RequestOutput:
    """A delta of a call."""
    ids = list(call.prompt.token_ids)
    return RequestOutput(call.request_id, None, ids, list(outputs), finished, error=error)


def saying(
    service: Service, texts: Sequence[Sequence[str]], reason: str = "stop", error: str | None = None
) -> Start:
    """Output i is texts[i], given in pieces; all end with `reason`."""

    async def start(call: Call) -> AsyncGenerator[RequestOutput]:
        assert call.params.n == len(texts)
        for index, pieces in enumerate(texts):
            for piece in pieces:
                ids = service.tokenizer.encode(piece, add_special_tokens=False)
                yield item(call, [CompletionOutput(index, piece, ids)])
        ends = [CompletionOutput(i, finish_reason=reason) for i in range(len(texts))]
        yield item(call, ends, finished=True, error=error)

    return start


@contextmanager
def scripted(service: Service, start: Start) -> Iterator[None]:
    """While this lasts, calls of the service run `start`."""
    with patch.object(service, "_start", start):
        yield
