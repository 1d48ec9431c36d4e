"""/v1/messages and its count_tokens, as Anthropic's clients speak it. A dialect of chat completions.

The request becomes a chat job, whose segments become content blocks; whole and streamed come from
the same steps. Text only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from itertools import takewhile
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.errors import InvalidRequest
from jaxinfer.inputs import Prompt
from serving.http.answer import Answer
from serving.http.body import read_model, validate
from serving.http.chat import ChatJob, prepare, template_kwargs
from serving.http.dialects import Event
from serving.http.errors import JsonResponse, anthropic_error_body, counted
from serving.http.exchange import Failed
from serving.http.fields import warning_headers
from serving.http.messages_events import MessageWriter, usage
from serving.http.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    beginnings,
    to_chat,
)
from serving.http.prompts import chat_prompt
from serving.http.schemas import ChatRequest
from serving.http.sse import EventStream, event, while_connected, with_errors
from serving.service import Service


async def create(request: Request) -> Response:
    """An answer to messages, whole or as events."""
    service: Service = request.app.state.service
    with counted(service):
        body = await read_model(request, MessagesRequest)
        unknown = body.warnings()
        chat_body = await service.in_thread(_translated, body)
        parts = beginnings(body)
        job = await prepare(request, service, chat_body, "msg")
        if parts and service.engine.heeds_breakpoints:
            job.call.prompt = await _with_breakpoints(service, job.call.prompt, parts)
    headers = {"request-id": job.id, **warning_headers(unknown + job.unknown)}
    if body.stream:
        events = with_errors(_stream(job), lambda e: _encoded([anthropic_error_body(e)]), end=b"")
        return EventStream(events, service.config.limits.idle_seconds, headers)
    return JsonResponse(await while_connected(request.receive, _whole(job)), headers=headers)


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of the same message would have."""
    service: Service = request.app.state.service
    with counted(service):
        body = await read_model(request, CountTokensRequest)
        unknown = body.warnings()
        service.check_model(body.model)
        chat = await service.in_thread(_translated, body)
        kwargs, _ = template_kwargs(service, chat)
        prompt = await chat_prompt(service, chat, tools=chat.tools, template_kwargs=kwargs)
    answer = {"input_tokens": len(prompt.token_ids)}
    return JsonResponse(answer, headers=warning_headers(unknown))


ROUTES = [
    Route("/v1/messages", create, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]


def _translated(body: CountTokensRequest, begins: bool = False) -> ChatRequest:
    return validate(to_chat(body, begins), ChatRequest)


async def _with_breakpoints(
    service: Service, prompt: Prompt, parts: Iterable[CountTokensRequest]
) -> Prompt:
    """The prompt with a breakpoint where each part ends: as far as its own prompt is the same."""
    found = set()
    for part in parts:
        chat = await service.in_thread(_translated, part, True)
        kwargs, _ = template_kwargs(service, chat)
        try:
            begin = await chat_prompt(service, chat, tools=chat.tools, template_kwargs=kwargs)
        except InvalidRequest:  # a template that takes no such beginning: there is nothing to keep
            continue
        pairs = zip(prompt.token_ids, begin.token_ids, strict=False)
        found.add(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return prompt.with_breakpoints(sorted(found - {0}))


# --- generation -------------------------------------------------------------------------------


async def _whole(job: ChatJob) -> dict[str, Any]:
    writer = MessageWriter(job.model)
    async with aclosing(_events(job, writer, interval=1)) as events:
        async for _ in events:
            pass
    return writer.message


async def _stream(job: ChatJob) -> AsyncGenerator[bytes]:
    """Events as bytes."""
    writer = MessageWriter(job.model)
    async with aclosing(_events(job, writer, job.service.config.stream_interval)) as steps:
        async for events in steps:
            yield _encoded(events)


async def _events(
    job: ChatJob, writer: MessageWriter, interval: int
) -> AsyncGenerator[list[Event]]:
    """Events of each step that has any. Raises Failed for an aborted one: it has no stop reason."""
    answer, begun = Answer(job), False

    def counts() -> dict[str, Any]:
        all_ = answer.usage
        cached, output = answer.cached_tokens, all_.completion_tokens
        return usage(all_.prompt_tokens, cached, output, all_.reasoning)

    async with aclosing(answer.steps(interval)) as steps:
        async for step in steps:
            events = [] if begun else writer.open(counts())
            begun = True
            events += writer.add(step.segments)
            aborted = step.finish_reason == "abort"
            if step.finish_reason is not None and not aborted:
                events += writer.close(step.finish_reason, step.stop_reason, counts())
            if events:
                yield events
            if aborted:
                raise Failed("the request was aborted")


def _encoded(events: Iterable[Event]) -> bytes:
    return b"".join(event(each, each["type"]) for each in events)
