"""The answer to a chat job as a sequence of segments: what the model wrote, in its order.

/v1/responses and /v1/messages tell items in sequence, while a MessageDelta has a field for each kind:
so the parser gets pieces that hold one kind here. Whole and streamed answers come from the same steps.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from serving.http.chat import ChatJob
from serving.http.exchange import run, usage_of
from serving.parsers import MessageDelta, OutputParser, ToolCallDelta

# No format begins or ends anything at a letter, a digit or a blank: pieces of the text up to, and
# apart from, all other characters give deltas of one kind.
PIECES = re.compile(r"[\w ]+|.", re.DOTALL)
LONG = 1024  # characters past which parsing would delay other streams

type Segment = tuple[Literal["reasoning", "content"], str] | ToolCallDelta


@dataclass(slots=True)
class Step:
    """What one item of the engine added. `logprobs`: chat's entries of its tokens, if asked for."""

    segments: list[Segment]
    logprobs: list[dict[str, Any]]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer:
    """One output of a chat job, read once by `steps`.

    Attributes:
        usage: token counts so far.
    """

    def __init__(self, job: ChatJob) -> None:
        self.job = job
        self.usage = usage_of([job.call])
        self._segments = Segmenter(job.parsers[0]) if job.parsers else None
        self._reasoning: list[str] = []

    async def steps(self, interval: int = 1) -> AsyncGenerator[Step]:
        """The steps; the last one has a finish_reason, and usage is complete. Raises what `run` does."""
        job = self.job
        async with aclosing(run(job.service, [job.call], interval)) as items:
            async for _, item in items:
                self.usage.take(0, item)
                for output in item.outputs:
                    ended = output.finish_reason is not None
                    segments = await self._parse(output.text, ended)
                    if ended and job.reasons:
                        text = "".join(self._reasoning)
                        count = await job.service.in_thread(job.reasoning_tokens, text)
                        self.usage.reasoning = count
                    entries = job.logprobs(output.logprobs)["content"] if output.logprobs else []
                    yield Step(segments, entries, output.finish_reason, output.stop_reason)

    @property
    def cached_tokens(self) -> int:
        return sum(self.usage.cached.values())

    async def _parse(self, text: str, ended: bool) -> list[Segment]:
        parser = self._segments
        if parser is None:
            return [("content", text)] if text else []
        if len(text) > LONG:
            segments = await self.job.service.in_thread(parser.push, text, ended)
        else:
            segments = parser.push(text, ended)
        self._reasoning += [s[1] for s in segments if isinstance(s, tuple) and s[0] == "reasoning"]
        return segments


class Segmenter:
    """Text of one output sequence to segments, by its parser."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._call = -1  # index of the call that is being written; -1: none is

    def push(self, text: str, ended: bool) -> list[Segment]:
        """What the text makes certain, pieces of the same kind joined. `ended`: it is the last one."""
        parts: list[Segment] = []
        for piece in PIECES.findall(text):
            if delta := self._parser.push(piece):
                parts += self._in_order(delta)
        if ended:
            parts += self._in_order(self._parser.finish())
        return joined(parts)

    def _in_order(self, delta: MessageDelta) -> Iterator[Segment]:
        """Reasoning, the rest of the open call, content, further calls: one piece's order."""
        if delta.reasoning:
            self._call = -1
            yield "reasoning", delta.reasoning
        yield from (piece for piece in delta.tool_calls if piece.index == self._call)
        if delta.content:
            yield "content", delta.content
        for piece in delta.tool_calls:
            if piece.index != self._call:
                yield piece
        if delta.tool_calls:
            self._call = delta.tool_calls[-1].index
        elif delta.content:
            self._call = -1


def joined(parts: Iterable[Segment]) -> list[Segment]:
    """Segments of the same kind that follow each other, as one."""
    out: list[Segment] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, ToolCallDelta):
            if isinstance(last, ToolCallDelta) and last.index == part.index:
                arguments = last.arguments + part.arguments
                out[-1] = ToolCallDelta(part.index, last.id, last.name, arguments)
                continue
        elif isinstance(last, tuple) and last[0] == part[0]:
            out[-1] = (part[0], last[1] + part[1])
            continue
        out.append(part)
    return out
