"""Splits reasoning between `<think>` and `</think>` from the answer (qwen3, deepseek_r1).

The written rule, the same streaming and not:
  1. Thinking switched off, or a prompt that ends with `</think>`: all text is content.
  2. A prompt that ends with `<think>`: text is reasoning from the start; a `<think>` that the model
     repeats there is dropped. Else it is reasoning if the text starts with `<think>`.
  3. The first `</think>` ends it. What follows is content, where tool calls are looked for; in
     reasoning they are not. `</think>` at the very start just goes away.
  4. An output that ends before `</think>` stays reasoning, for it may have been sent already. If
     there is reasoning and then neither content nor a tool call, finish() says so with
     `truncated_reasoning`: an empty content is never silent.
  5. Line breaks next to a marker belong to it: both ends of the reasoning and the start of the
     content lose theirs. Other white space stays. Without a marker nothing is dropped, but line
     breaks at the start of reasoning that the prompt opened.
"""

from __future__ import annotations

from serving.parsers.output import Grammar, Output
from serving.parsers.scanner import Wait, markers

OPEN, CLOSE = "<think>", "</think>"
LINE_BREAKS = "\r\n"


def opened_by(prompt: str) -> bool | None:
    """True: the prompt ends inside of a think block; False: it closed one; None: it has none."""
    tail = prompt[-64:].rstrip()
    return True if tail.endswith(OPEN) else False if tail.endswith(CLOSE) else None


def think(opened: bool, answer: Grammar) -> Grammar:
    """The grammar of reasoning, then `answer`."""

    def grammar(out: Output) -> Wait[None]:
        out.in_reasoning = opened
        out.mark()
        yield from out.skip_space()
        found = yield from out.expect(OPEN)
        if found or opened:
            skipped, out.tape = "".join(out.tape or ()), None
            if not found:
                out.reason(skipped)
            yield from _reasoning(out)
        elif (yield from out.expect(CLOSE)):
            out.forget()
            out.content_edge.marker(LINE_BREAKS)
        out.settle()
        yield from answer(out)

    return grammar


def _reasoning(out: Output) -> Wait[None]:
    out.in_reasoning = True
    wanted = markers(frozenset((CLOSE, *out.special)))
    while (marker := (yield from out.until(wanted, out.reason))) not in (CLOSE, None):
        out.take(len(str(marker)))
    if marker is None:
        return
    out.take(len(CLOSE))
    out.reason_edge.marker("")
    out.in_reasoning = False
    out.content_edge.marker(LINE_BREAKS)
