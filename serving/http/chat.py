"""POST /v1/chat/completions: messages through the template, the answer through the parsers.

`prepare` turns a checked body into a ChatJob, for this route and for those of other APIs that speak
of conversations. The same parsers run whether the answer is streamed or not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.types import SamplingParams
from serving.calls import Call
from serving.errors import BadField
from serving.http import logprobs as forms
from serving.http.body import read_model
from serving.http.chat_stream import stream
from serving.http.chunks import whole as whole_body
from serving.http.errors import UnsupportedField, counted
from serving.http.exchange import Collected, Whole, collect, make_calls, request_id
from serving.http.fields import sampling_params, warning_headers
from serving.http.prompts import chat_prompt
from serving.http.schemas import ChatRequest
from serving.http.sse import EventStream, while_connected, with_errors
from serving.parsers import Message, OutputParser, make_parser
from serving.service import Service


@dataclass(slots=True)
class ChatJob:
    """A checked request.

    Attributes:
        call: its one call, of n outputs. parsers: one for each output; empty: text goes out as it is.
        prefix: text that the answer begins with (echo). unknown: names of fields nobody knows.
    """

    service: Service
    body: ChatRequest
    id: str
    model: str
    call: Call
    parsers: list[OutputParser]
    prefix: str
    unknown: list[str]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def params(self) -> SamplingParams:
        return self.call.params

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told apart from the answer."""
        return self.service.config.reasoning_parser is not None

    @property
    def tells_reasoning(self) -> bool:
        return self.reasons and self.body.include_reasoning is not False

    def reasoning_tokens(self, text: str) -> int:
        """Tokens of a reasoning text, by the tokenizer: the same however a stream was cut."""
        return len(self.service.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def fixed(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def logprobs(self, entries: Sequence[forms.Entry]) -> dict[str, Any]:
        told = forms.chat_logprobs(
            entries,
            self.body.top_logprobs or 0,
            self.service.engine.model.tokenizer,
            bool(self.body.return_tokens_as_token_ids),
        )
        return {"content": told, "refusal": None}


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    with counted(service):
        job = await prepare(request, service, await read_model(request, ChatRequest), "chatcmpl")
    headers = {"x-request-id": job.id, **warning_headers(job.unknown)}
    if job.body.stream:
        idle = service.config.limits.idle_seconds
        return EventStream(with_errors(stream(job)), idle, headers)
    done = await while_connected(request.receive, collect(service, [job.call]))
    answer = await done.encode(service, job.params, lambda: _whole(job, done))
    return Response(answer, headers=headers, media_type="application/json")


ROUTES = [Route("/v1/chat/completions", chat, methods=["POST"])]


async def prepare(request: Request, service: Service, body: ChatRequest, prefix: str) -> ChatJob:
    """Check a chat request and make its call. Run it under errors.counted.

    Args:
        prefix: of a request id that the server makes.

    Raises what Service.chat_prompt and SamplingParams raise, UnsupportedField and BadField.
    """
    unknown = body.warnings()
    model = service.check_model(body.model)
    if body.tools or body.tool_choice is not None:
        check_tool_choice(service, body.tools, body.tool_choice)
    echo = _echo(service, body)
    kwargs, ignored = template_kwargs(service, body)
    prompt = await chat_prompt(
        service,
        body,
        tools=body.tools,
        template_kwargs=kwargs,
        truncate=body.truncate_prompt_tokens,
    )
    parsers = _parsers(service, body, prompt.text or "", kwargs)
    changes: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if parsers and parsers[0].needs_special_tokens:
        changes["skip_special_tokens"] = False
    params = sampling_params(body, service, body.limit, **changes)
    identity = request_id(request, service, body.request_id, prefix)
    (call,) = make_calls(
        request,
        identity,
        [prompt],
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        user=body.user,
    )
    return ChatJob(service, body, identity, model, call, parsers, echo, unknown + ignored)


def check_tool_choice(service: Service, tools: Sequence[Any] | None, choice: object) -> None:
    """Refuse a tool_choice that this server cannot keep."""
    if choice == "none" or (not tools and choice == "auto"):
        return
    if choice not in (None, "auto"):
        raise UnsupportedField(
            "tool_choice",
            f'tool_choice={choice!r:.100} is not supported by this server; use "auto" or "none"',
        )
    if tools and not service.config.enable_auto_tool_choice and not _own_calls(service):
        raise UnsupportedField(
            "tool_choice",
            'tool_choice="auto" (the default with tools) needs a server started with '
            '--enable-auto-tool-choice and --tool-call-parser; or send tool_choice="none"',
        )


def _own_calls(service: Service) -> bool:
    """Whether the reasoning parser reads tool calls itself."""
    return service.config.reasoning_parser == "gpt_oss"


def template_kwargs(service: Service, body: ChatRequest) -> tuple[dict[str, Any], list[str]]:
    """Variables of the template, and the names of fields that it does not look at."""
    kwargs = dict(body.chat_template_kwargs or {})
    ignored = []
    for name in ("documents", "reasoning_effort"):
        value = getattr(body, name)
        if value is None:
            continue
        kwargs.setdefault(name, value)
        if name not in (service.template.source or ""):
            ignored.append(name)
    return kwargs, ignored


def thinking(kwargs: Mapping[str, Any]) -> bool | None:
    """Whether the request switched thinking on or off, by the names that templates use."""
    for name in ("enable_thinking", "thinking"):
        if isinstance(kwargs.get(name), bool):
            return kwargs[name]
    return None


def _parsers(
    service: Service, body: ChatRequest, prompt: str, kwargs: Mapping[str, Any]
) -> list[OutputParser]:
    config = service.config
    if config.tool_call_parser is None and config.reasoning_parser is None:
        return []
    tokenizer = service.tokenizer
    specials = [text for i in tokenizer.special_ids if (text := tokenizer.id_to_token(i))]
    return [
        make_parser(
            config.tool_call_parser if config.enable_auto_tool_choice else None,
            config.reasoning_parser,
            tools=body.tools,
            tool_choice="auto" if body.tool_choice is None else body.tool_choice,
            prompt=prompt,
            thinking=thinking(kwargs),
            special_tokens=specials,
            keep_special_tokens=body.skip_special_tokens is False,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        for _ in range(body.n or 1)
    ]


def _echo(service: Service, body: ChatRequest) -> str:
    """The text of the final message, which the answer continues, if it is to be repeated."""
    if not body.echo:
        return ""
    if not body.continue_final_message:
        raise BadField("echo", "echo=true needs continue_final_message=true; set both or none")
    return (service.template.check(body.messages)[-1]["content"] or "").strip()


# --- whole ------------------------------------------------------------------------------------------


def _whole(job: ChatJob, done: Collected) -> bytes:
    """The answer's body."""
    if job.reasons:
        done.usage.reasoning = 0
    choices = [_choice(job, i, whole, done) for i, whole in enumerate(done.outputs[0])]
    more: dict[str, Any] = {"usage": done.usage.json()}
    scores = done.prompt_logprobs[0]
    if scores is not None:
        more["prompt_logprobs"] = forms.prompt_logprobs(scores, job.params.prompt_logprobs or 0)
    if job.body.return_token_ids:
        more["prompt_token_ids"] = list(job.call.prompt.token_ids)
    return whole_body(job.fixed("chat.completion"), choices, more)


def _choice(job: ChatJob, index: int, whole: Whole, done: Collected) -> dict[str, Any]:
    finish, message, extra = whole.finish_reason, {"content": job.prefix + whole.text}, {}
    if job.parsers:
        message, extra = _parse(job, index, whole.text)
        if done.usage.reasoning is not None:
            done.usage.reasoning += job.reasoning_tokens(message["reasoning"] or "")
        if not job.tells_reasoning:
            message = {k: v for k, v in message.items() if not k.startswith("reasoning")}
        if finish == "stop" and "tool_calls" in message:
            finish = "tool_calls"
    choice = {
        "index": index,
        "message": {"role": "assistant", "refusal": None, **message},
        "logprobs": job.logprobs(whole.logprobs) if job.body.logprobs else None,
        "finish_reason": finish,
        "stop_reason": whole.stop_reason,
        **extra,
    }
    if job.body.return_token_ids:
        choice["token_ids"] = whole.token_ids
    return choice


def _parse(job: ChatJob, index: int, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The members of the message, and further ones of the choice."""
    parser, parsed = job.parsers[index], Message()
    parsed.add(parser.push(text))
    parsed.add(parser.finish())
    content = parsed.content
    message: dict[str, Any] = {"content": job.prefix + (content or "") if job.prefix else content}
    message |= {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning}
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls
        ]
    return message, {"reasoning_truncated": True} if parsed.truncated_reasoning else {}
