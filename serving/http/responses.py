"""/v1/responses: create, fetch, delete, cancel. A dialect of chat completions, text only.

The request becomes a chat job, whose segments become items; whole and streamed come from the same
steps. Finished responses are kept in bounded memory unless store=false.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.errors import BadField, message
from serving.http.answer import Answer
from serving.http.body import read_model, validate
from serving.http.chat import ChatJob, prepare
from serving.http.dialects import Event
from serving.http.errors import JsonResponse, UnsupportedField, counted
from serving.http.fields import warning_headers
from serving.http.responses_events import ResponseWriter, new_response, usage
from serving.http.responses_request import ResponsesRequest, input_items, to_chat
from serving.http.responses_store import ResponseStore, owner_of
from serving.http.schemas import ChatRequest
from serving.http.sse import EventStream, event, while_connected, with_errors
from serving.service import Service


@dataclass(slots=True)
class ResponseJob:
    """A checked request.

    Attributes:
        owner: who may see the response. size: bytes that keeping it takes without its output.
    """

    body: ResponsesRequest
    chat: ChatJob
    answer: Answer
    writer: ResponseWriter
    store: ResponseStore
    owner: str
    size: int

    @property
    def key(self) -> tuple[str, str]:
        return self.owner, self.writer.response["id"]

    def failed(self, error: Exception) -> bytes:
        """The events that end a stream that `error` has broken."""
        return _encoded(self.writer.close("error", self.usage(), message(error)))

    def usage(self) -> dict[str, Any]:
        counts = self.answer.usage
        return usage(
            counts.prompt_tokens,
            self.answer.cached_tokens,
            counts.completion_tokens,
            counts.reasoning or 0,
        )


# --- create -----------------------------------------------------------------------------------


async def create(request: Request) -> Response:
    """An answer to input items, whole or as events."""
    service: Service = request.app.state.service
    with counted(service):
        body = await read_model(request, ResponsesRequest)
        unknown = body.warnings()
        job = await _job(request, service, body)
    headers = {"x-request-id": job.chat.id, **warning_headers(unknown + job.chat.unknown)}
    if body.stream:
        idle = service.config.limits.idle_seconds
        return EventStream(with_errors(_stream(job), job.failed, end=b""), idle, headers)
    return JsonResponse(await while_connected(request.receive, _whole(job)), headers=headers)


async def _job(request: Request, service: Service, body: ResponsesRequest) -> ResponseJob:
    store, owner = _store(request), owner_of(request.headers)
    history = store.history(owner, body.previous_response_id)
    chat_body, size = await service.in_thread(_translated, body, history)
    chat = await prepare(request, service, chat_body, "resp")
    params = chat.params
    told = {"temperature": params.temperature, "top_p": params.top_p}  # as they are used
    writer = ResponseWriter(new_response(body, chat.model) | told)
    return ResponseJob(body, chat, Answer(chat), writer, store, owner, size)


def _translated(body: ResponsesRequest, history: list[Any]) -> tuple[ChatRequest, int]:
    """The chat request, and the bytes that keeping the response takes without its output."""
    chat = validate(to_chat(body, history), ChatRequest)
    if body.store is False:
        return chat, 0
    return chat, len(json.dumps([body.input, body.instructions, body.tools, body.metadata]))


async def _whole(job: ResponseJob) -> dict[str, Any]:
    async with aclosing(_events(job, interval=1)) as events:
        async for _ in events:
            pass
    return job.writer.response


async def _stream(job: ResponseJob) -> AsyncGenerator[bytes]:
    """Events as bytes."""
    async with aclosing(_events(job, job.chat.service.config.stream_interval)) as steps:
        async for events in steps:
            yield _encoded(events)


async def _events(job: ResponseJob, interval: int) -> AsyncGenerator[list[Event]]:
    """Events of each step that has any. Keeps the response when it is finished."""
    writer, begun = job.writer, False
    with _running(job):
        async with aclosing(job.answer.steps(interval)) as steps:
            async for step in steps:
                events = [] if begun else writer.open()
                begun = True
                events += writer.add(step.segments, step.logprobs)
                if step.finish_reason is not None:
                    events += writer.close(step.finish_reason, job.usage())
                    if job.body.store is not False:
                        items = input_items(job.body.input)
                        job.store.put(job.owner, writer.response, items, job.size)
                if events:
                    yield events


def _encoded(events: Iterable[Event]) -> bytes:
    return b"".join(event(each, each["type"]) for each in events)


@contextmanager
def _running(job: ResponseJob) -> Iterator[None]:
    """While it runs, the response can be fetched and cancelled."""
    running = job.store.running
    running[job.key] = (job.chat.id, job.writer)
    try:
        yield
    finally:
        del running[job.key]


# --- kept responses ---------------------------------------------------------------------------


async def one(request: Request) -> Response:
    """GET: the response as it is now. DELETE: forget it."""
    store, owner = _store(request), owner_of(request.headers)
    name = request.path_params["response_id"]
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise UnsupportedField("stream", "stream of a kept response is not supported; leave it out")
    if request.method == "DELETE":
        store.delete(owner, name)
        return JsonResponse({"id": name, "object": "response", "deleted": True})
    running = store.running.get((owner, name))
    return JsonResponse(running[1].snapshot() if running else store.get(owner, name).response)


async def cancel(request: Request) -> Response:
    """End a response that is running. What it has so far is the answer."""
    store, owner = _store(request), owner_of(request.headers)
    name = request.path_params["response_id"]
    running = store.running.get((owner, name))
    if running is None:
        status = store.get(owner, name).response["status"]
        raise BadField("response_id", f"response_id={name!r:.100} is {status}; it no longer runs")
    call, writer = running
    await request.app.state.service.abort(call)
    return JsonResponse({**writer.snapshot(), "status": "cancelled"})


def _store(request: Request) -> ResponseStore:
    """The app's store, made when it is first needed."""
    state = request.app.state
    if not hasattr(state, "responses"):
        state.responses = ResponseStore()
    return state.responses


ROUTES = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses/{response_id}", one, methods=["GET", "DELETE"]),
    Route("/v1/responses/{response_id}/cancel", cancel, methods=["POST"]),
]
