"""One HTTP request's calls to the service: ids, running them together, usage.

A request of several prompts is several calls that run at once; their items come back with the
call's index. Closing the iteration aborts all of them. Called by the generating routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from jaxinfer.errors import JaxinferError, Unavailable
from jaxinfer.inputs import Prompt
from jaxinfer.types import CompletionOutput, Logprob, RequestOutput, SamplingParams
from serving.calls import TRACE_HEADERS, Call
from serving.coalesce import coalesce
from serving.errors import BadField
from serving.http.body import ARRIVAL
from serving.service import Phase, Service


class Failed(JaxinferError):
    """The engine gave up on a request that had started."""


def request_id(request: Request, service: Service, given: str | None, prefix: str) -> str:
    """The body's id, else the x-request-id header's, else a new one.

    A header names a client's attempt, and retries repeat it: while it is running, a part is added.
    """
    if given is not None:
        return given
    header = request.headers.get("x-request-id")
    if not header:
        return service.new_id(prefix)
    if not (header.isascii() and header.isprintable()) or " " in header:
        raise BadField("x-request-id", f"x-request-id={header!r:.100} must be printable ASCII")
    taken = any(header in (running, parent_id(running)) for running in service.running)
    return f"{header}-{service.new_id('again')}" if taken else header


def parent_id(request_id: str) -> str:
    """The id of the request that a call of several belongs to (make_calls)."""
    head, _, index = request_id.rpartition("-")
    return head if index.isdecimal() else request_id


def make_calls(
    request: Request,
    identity: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    **options: Any,
) -> list[Call]:
    """A Call for each prompt; ids are `identity`, plus "-index" if there are several.

    Args:
        options: further attributes of Call (priority, cache_salt, user).
    """
    trace = {name: value for name in TRACE_HEADERS if (value := request.headers.get(name))}
    several = len(prompts) > 1
    arrival = request.scope.get(ARRIVAL) or time.monotonic()
    return [
        Call(
            f"{identity}-{i}" if several else identity,
            prompt,
            params,
            face="http",
            endpoint=request.scope["path"],
            trace=trace,
            arrival=arrival,
            **options,
        )
        for i, prompt in enumerate(prompts)
    ]


async def run(
    service: Service, calls: Sequence[Call], interval: int = 1
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(index of the call, delta) until all have finished.

    Args:
        interval: ServerConfig.stream_interval where the caller streams.

    Raises what Service.generate raises; Failed for an output that ended with "error"; Unavailable for
    one that the server's shutdown cut off.
    """
    if len(calls) == 1:
        async with aclosing(_one(service, calls[0], interval)) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int, call: Call) -> None:
        try:
            async with aclosing(_one(service, call, interval)) as stream:
                async for item in stream:
                    await queue.put((index, item))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(pump(i, call)) for i, call in enumerate(calls)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one(service: Service, call: Call, interval: int) -> AsyncGenerator[RequestOutput]:
    stream = service.generate(call)
    async with aclosing(coalesce(stream, interval) if interval > 1 else stream) as stream:
        async for item in stream:
            for output in item.outputs:
                if output.finish_reason == "error":
                    raise Failed(item.error or "the engine failed")
                if output.finish_reason == "abort" and service.phase in _ENDING:
                    raise Unavailable("the server shut down before the request had finished")
            yield item


_ENDING = (Phase.DRAINING, Phase.STOPPED)


@dataclass(slots=True)
class Usage:
    """Token counts of a request: each prompt once, each output token once.

    Attributes:
        cached: cached prompt tokens by call. reasoning: None where no reasoning is told apart.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    reasoning: int | None = None

    def take(self, index: int, item: RequestOutput) -> None:
        """Count one item of `run`."""
        self.cached[index] = item.num_cached_tokens
        for output in item.outputs:
            self.completion_tokens += len(output.token_ids)

    def json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }
        if self.reasoning is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return body


@dataclass(slots=True)
class Whole:
    """All of one output, put together from its deltas."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, output: CompletionOutput) -> None:
        self.texts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


SMALL = 4096  # numbers in an answer that the event loop may encode itself


async def encoded(service: Service, size: int, write: Callable[[], bytes]) -> bytes:
    """What `write` makes of `size` numbers; a large one in a thread, a small one waits for none."""
    return write() if size <= SMALL else await service.in_thread(write)


def scores_size(scores: Sequence[Any] | None, params: SamplingParams) -> int:
    """Numbers that a prompt's log-probabilities are written with."""
    return len(scores or ()) * (1 + (params.prompt_logprobs or 0))


@dataclass(slots=True)
class Collected:
    """What a request that does not stream has yielded.

    Attributes:
        outputs: by call, then by output. prompt_logprobs: by call.
    """

    outputs: list[list[Whole]]
    prompt_logprobs: list[list[dict[int, Logprob] | None] | None]
    usage: Usage

    async def encode(
        self, service: Service, params: SamplingParams, write: Callable[[], bytes]
    ) -> bytes:
        """The answer's body, from `write`."""
        size = self.usage.completion_tokens * (1 + (params.logprobs or 0))
        if params.prompt_logprobs is not None:
            size += self.usage.prompt_tokens * (1 + params.prompt_logprobs)
        return await encoded(service, size, write)


async def collect(service: Service, calls: Sequence[Call]) -> Collected:
    """Run calls to their end. Run it inside sse.while_connected."""
    done = Collected(
        [[Whole() for _ in range(call.params.n)] for call in calls],
        [None] * len(calls),
        usage_of(calls),
    )
    async with aclosing(run(service, calls)) as stream:
        async for index, item in stream:
            done.usage.take(index, item)
            if item.prompt_logprobs is not None:
                done.prompt_logprobs[index] = item.prompt_logprobs
            for output in item.outputs:
                done.outputs[index][output.index].take(output)
    return done


def usage_of(calls: Sequence[Call]) -> Usage:
    """The usage of calls that have yielded nothing yet."""
    return Usage(sum(len(call.prompt.token_ids) for call in calls))
