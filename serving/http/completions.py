"""POST /v1/completions: prompts of text or tokens, whole or streamed, with echo and log-probabilities.

Chunks of a stream are written from a template: only what varies is encoded. What a stream says in
sum equals what the whole answer says.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.inputs import Prompt
from jaxinfer.types import CompletionOutput, RequestOutput, SamplingParams
from serving.calls import Call
from serving.errors import BadField
from serving.http import logprobs as forms
from serving.http.body import read_model
from serving.http.chunks import Frame, dumps, ending
from serving.http.chunks import whole as whole_body
from serving.http.errors import counted
from serving.http.exchange import (
    Collected,
    Whole,
    collect,
    encoded,
    make_calls,
    request_id,
    run,
    scores_size,
)
from serving.http.fields import sampling_params, warning_headers
from serving.http.prompts import text_prompt, with_breakpoints
from serving.http.schemas import CompletionRequest
from serving.http.sse import EventStream, while_connected, with_errors
from serving.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(slots=True)
class Job:
    """A checked request. `echoes`: text of each prompt, if the answer begins with it."""

    service: Service
    body: CompletionRequest
    id: str
    model: str
    calls: list[Call]
    echoes: list[str] | None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def params(self) -> SamplingParams:
        return self.calls[0].params

    @property
    def fixed(self) -> dict[str, Any]:
        """What every chunk of the answer has in common."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    @property
    def waits_for_scores(self) -> bool:
        """Whether the first chunk tells of the prompt's log-probabilities."""
        return self.params.prompt_logprobs is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are part of the text."""
        return self.echoes is not None and self.body.logprobs is not None


async def completions(request: Request) -> Response:
    """Continue prompts."""
    service: Service = request.app.state.service
    with counted(service):
        body = await read_model(request, CompletionRequest)
        unknown = body.warnings()
        job = await _job(request, service, body)
    headers = {"x-request-id": job.id, **warning_headers(unknown)}
    if body.stream:
        return EventStream(with_errors(_stream(job)), service.config.limits.idle_seconds, headers)
    done = await while_connected(request.receive, collect(service, job.calls))
    answer = await done.encode(service, job.params, lambda: _whole(job, done))
    return Response(answer, headers=headers, media_type="application/json")


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]


async def _job(request: Request, service: Service, body: CompletionRequest) -> Job:
    model = service.check_model(body.model)
    _check_counts(service, len(body.prompt), body.n or 1)
    limit = DEFAULT_MAX_TOKENS if body.limit is None else body.limit
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    params = sampling_params(
        body,
        service,
        limit,
        logprobs=body.logprobs,
        prompt_logprobs=max((w for w in wanted if w is not None), default=None),
    )
    special = True if body.add_special_tokens is None else body.add_special_tokens
    prompts: list[Prompt] = await asyncio.gather(
        *(text_prompt(service, p, special, body.truncate_prompt_tokens) for p in body.prompt)
    )
    if body.breakpoints:
        prompts = [with_breakpoints(prompts[0], body.breakpoints)]
    if body.limit is None:  # a default that nobody asked for is cut to the room, not refused
        room = service.engine.core.max_model_len - max(len(p.token_ids) for p in prompts)
        params = replace(params, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room)))
    identity = request_id(request, service, body.request_id, "cmpl")
    calls = make_calls(
        request,
        identity,
        prompts,
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        user=body.user,
    )
    echoes = None
    if body.echo:
        echoes = await service.in_thread(_echoes, service, prompts, params.skip_special_tokens)
    return Job(service, body, identity, model, calls, echoes)


def _check_counts(service: Service, prompts: int, n: int) -> None:
    limits = service.config.limits
    if prompts > limits.prompts:
        raise BadField(
            "prompt", f"prompt has {prompts} prompts; at most {limits.prompts} are allowed"
        )
    if prompts * n > limits.outputs:
        raise BadField(
            "n", f"n={n} for {prompts} prompts is more than {limits.outputs} outputs; ask for fewer"
        )


def _echoes(service: Service, prompts: Sequence[Prompt], skip_special: bool) -> list[str]:
    """Texts of the prompts: the client's own where it sent text."""
    return [
        service.tokenizer.decode(p.token_ids, skip_special) if p.text is None else p.text
        for p in prompts
    ]


# --- whole ------------------------------------------------------------------------------------------


def _whole(job: Job, done: Collected) -> bytes:
    choices = (
        _choice(job, i, i * job.params.n + k, whole, done.prompt_logprobs[i])
        for i, outputs in enumerate(done.outputs)
        for k, whole in enumerate(outputs)
    )
    return whole_body(job.fixed, choices, {"usage": done.usage.json()})


def _choice(job: Job, call: int, index: int, whole: Whole, scores: Any) -> dict[str, Any]:
    writer = _Writer(job, call, scores)
    choice = {
        "index": index,
        "text": (job.echoes[call] if job.echoes else "") + whole.text,
        "logprobs": writer.logprobs(whole.logprobs),
        "finish_reason": whole.finish_reason,
        "stop_reason": whole.stop_reason,
    }
    if job.body.prompt_logprobs is not None and scores is not None:
        choice["prompt_logprobs"] = forms.prompt_logprobs(scores, job.body.prompt_logprobs)
    if job.body.return_token_ids:
        choice["prompt_token_ids"] = list(job.calls[call].prompt.token_ids)
        choice["token_ids"] = whole.token_ids
    return choice


class _Writer:
    """Log-probabilities of one output, chunk by chunk; begins with the prompt's where it is echoed."""

    def __init__(self, job: Job, call: int, scores: Any) -> None:
        self._job, self._scores = job, scores
        self._first = job.calls[call].prompt.token_ids[0]
        self._begun = False
        self._offset = 0

    def logprobs(self, entries: Sequence[forms.Entry] | None) -> dict[str, Any] | None:
        body = self._job.body
        if body.logprobs is None:
            return None
        as_ids = bool(body.return_tokens_as_token_ids)
        head = None
        if not self._begun and self._job.scores_prompt:
            head, self._offset = forms.echo_logprobs(
                self._first, self._scores, body.logprobs, self._job.service.tokenizer, as_ids
            )
        self._begun = True
        told, self._offset = forms.completion_logprobs(
            entries or (), body.logprobs, self._offset, as_ids
        )
        return told if head is None else forms.join(head, told)


# --- streamed ---------------------------------------------------------------------------------------


async def _stream(job: Job) -> AsyncGenerator[bytes]:
    """Events of a stream, without the final [DONE]."""
    chunks = _Chunks(job)
    interval = job.service.config.stream_interval
    held: list[tuple[int, RequestOutput]] = []  # until the prompt's log-probabilities are there
    async with aclosing(run(job.service, job.calls, interval)) as stream:
        async for index, item in stream:
            held.append((index, item))
            if item.prompt_logprobs is not None:
                chunks.scores[index] = item.prompt_logprobs
            if not job.waits_for_scores or index in chunks.scores:
                ready = [one for one in held if one[0] == index]
                held = [one for one in held if one[0] != index]
                if text := await encoded(
                    job.service, chunks.size(ready), partial(chunks.join, ready)
                ):
                    yield text
    if chunks.frame.include_usage:
        yield chunks.frame.usage_event()


class _Chunks:
    """Writes the events of a stream. `scores`: log-probabilities of the prompts, by call."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.frame = Frame(job.fixed, job.body.stream_options, job.calls)
        self.scores: dict[int, Any] = {}
        self._writers: dict[tuple[int, int], _Writer] = {}

    def size(self, items: Sequence[tuple[int, RequestOutput]]) -> int:
        """Numbers of the prompts' log-probabilities that the items' events tell."""
        new = {(i, o.index) for i, item in items for o in item.outputs} - self._writers.keys()
        return sum(scores_size(self.scores.get(i), self.job.params) for i, _ in new)

    def join(self, items: Sequence[tuple[int, RequestOutput]]) -> bytes:
        """The events of items."""
        return b"".join(self.take(*item) for item in items)

    def take(self, call: int, item: RequestOutput) -> bytes:
        """The events of one item; empty if it has nothing to tell."""
        self.frame.take(call, item)
        return "".join(self._chunk(call, output) for output in item.outputs).encode()

    def _chunk(self, call: int, output: CompletionOutput) -> str:
        job, frame, key = self.job, self.frame, (call, output.index)
        first = key not in self._writers
        if first:
            self._writers[key] = _Writer(job, call, self.scores.get(call))
        text = output.text
        if first and job.echoes is not None:
            text = job.echoes[call] + text
        logprobs = self._writers[key].logprobs(output.logprobs)
        told = text or output.finish_reason or (logprobs and logprobs["tokens"])
        if not (told or job.body.return_token_ids or frame.continuous):
            return ""
        return (
            f'{frame.begin(call * job.params.n + output.index)},"text":{json.dumps(text)},"logprobs":'
            f"{'null' if logprobs is None else dumps(logprobs)}"
            f"{ending(output.finish_reason, output.stop_reason)}"
            f"{self._more(call, output, first)}{frame.end()}"
        )

    def _more(self, call: int, output: CompletionOutput, first: bool) -> str:
        """Members that only some requests ask for."""
        body, more = self.job.body, ""
        if first and body.prompt_logprobs is not None and self.scores.get(call) is not None:
            told = forms.prompt_logprobs(self.scores[call], body.prompt_logprobs)
            more += f',"prompt_logprobs":{dumps(told)}'
        if body.return_token_ids:
            if first:
                more += f',"prompt_token_ids":{dumps(self.job.calls[call].prompt.token_ids)}'
            more += f',"token_ids":{dumps(output.token_ids)}'
        return more
