"""The chunks of a streamed chat completion; in sum they say what the whole answer says.

Each output begins with a chunk that has the role. Called by chat.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from jaxinfer.types import CompletionOutput, RequestOutput
from serving.http import logprobs as forms
from serving.http.chunks import Frame, dumps, ending
from serving.http.exchange import encoded, run, scores_size
from serving.parsers import MessageDelta

if TYPE_CHECKING:
    from serving.http.chat import ChatJob


async def stream(job: ChatJob) -> AsyncGenerator[bytes]:
    """Events of a stream, without the final [DONE]."""
    chunks = _Chunks(job)
    interval = job.service.config.stream_interval
    held: list[RequestOutput] = []  # until the prompt's log-probabilities are there
    async with aclosing(run(job.service, [job.call], interval)) as items:
        async for _, item in items:
            held.append(item)
            chunks.scores = item.prompt_logprobs or chunks.scores
            if job.params.prompt_logprobs is None or chunks.scores is not None:
                size = scores_size(item.prompt_logprobs, job.params)
                if text := await encoded(
                    job.service, size, lambda: b"".join(map(chunks.take, held))
                ):
                    yield text
                held.clear()
    if chunks.frame.include_usage:
        if job.reasons:
            texts = ["".join(parts) for parts in chunks.reasoning]
            counts = [await job.service.in_thread(job.reasoning_tokens, text) for text in texts]
            chunks.frame.usage.reasoning = sum(counts)
        yield chunks.frame.usage_event()


class _Chunks:
    """Writes the events. `reasoning`: pieces of it, by output, where it must be counted."""

    def __init__(self, job: ChatJob) -> None:
        self.job = job
        fixed = job.fixed("chat.completion.chunk")
        self.frame = Frame(fixed, job.body.stream_options, [job.call])
        self.scores: Any = None
        self.reasoning: list[list[str]] = [[] for _ in range(job.params.n)]
        self._called = [False] * job.params.n
        self._begun = False

    def take(self, item: RequestOutput) -> bytes:
        """The events of one item; empty if it has nothing to tell."""
        head = "" if self._begun else self._roles()  # they hold no token: not counted yet
        self._begun = True
        self.frame.take(0, item)
        chunk = self._parsed if self.job.parsers else self._plain
        return (head + "".join(map(chunk, item.outputs))).encode()

    def _roles(self) -> str:
        """The first chunks, and what they alone tell."""
        job, more = self.job, {}
        if self.scores is not None:
            count = job.params.prompt_logprobs or 0
            more["prompt_logprobs"] = forms.prompt_logprobs(self.scores, count)
        if job.body.return_token_ids:
            more["prompt_token_ids"] = list(job.call.prompt.token_ids)
        text = ""
        for index in range(job.params.n):
            delta = {"role": "assistant", "content": job.prefix}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            text += self.frame.chunk(choice, **more)
            more = {}
        return text

    def _plain(self, output: CompletionOutput) -> str:
        delta = f'{{"content":{json.dumps(output.text)}}}' if output.text else "{}"
        return self._chunk(output, delta, output.finish_reason)

    def _parsed(self, output: CompletionOutput) -> str:
        parser = self.job.parsers[output.index]
        deltas = [parser.push(output.text)]
        if output.finish_reason is not None:
            deltas.append(parser.finish())
        told = _join(deltas)
        self._called[output.index] |= bool(told.tool_calls)
        if self.job.reasons and self.frame.include_usage:
            self.reasoning[output.index].append(told.reasoning)
        finish = output.finish_reason
        if finish == "stop" and self._called[output.index]:
            finish = "tool_calls"
        extra = ',"reasoning_truncated":true' if told.truncated_reasoning else ""
        return self._chunk(output, self._delta(told), finish, extra)

    def _delta(self, told: MessageDelta) -> str:
        delta: dict[str, Any] = {}
        if told.reasoning and self.job.tells_reasoning:
            delta |= {"reasoning": told.reasoning, "reasoning_content": told.reasoning}
        if told.content:
            delta["content"] = told.content
        if told.tool_calls:
            delta["tool_calls"] = [_call(piece) for piece in told.tool_calls]
        return dumps(delta)

    def _chunk(
        self, output: CompletionOutput, delta: str, finish: str | None, extra: str = ""
    ) -> str:
        body, frame = self.job.body, self.frame
        logprobs = "null"
        if body.logprobs and output.logprobs:
            logprobs = dumps(self.job.logprobs(output.logprobs))
        told = delta != "{}" or finish or logprobs != "null"
        if not (told or body.return_token_ids or frame.continuous):
            return ""
        ids = f',"token_ids":{dumps(output.token_ids)}' if body.return_token_ids else ""
        return (
            f'{frame.begin(output.index)},"delta":{delta},"logprobs":{logprobs}'
            f"{ending(finish, output.stop_reason)}{extra}{ids}{frame.end()}"
        )


def _join(deltas: list[MessageDelta]) -> MessageDelta:
    """The deltas of one item as one; the pieces of a call stay as they are."""
    return MessageDelta(
        "".join(d.reasoning for d in deltas),
        "".join(d.content for d in deltas),
        [piece for d in deltas for piece in d.tool_calls],
        any(d.truncated_reasoning for d in deltas),
    )


def _call(piece: Any) -> dict[str, Any]:
    """A piece of a tool call; id, type and name come with the first one."""
    function: dict[str, Any] = {"arguments": piece.arguments}
    if piece.name is None:
        return {"index": piece.index, "function": function}
    return {
        "index": piece.index,
        "id": piece.id,
        "type": "function",
        "function": {"name": piece.name, **function},
    }
