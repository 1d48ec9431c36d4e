"""The parsers by name, and make_parser, which puts one together for an output sequence.

Must never import the engine. Called by the faces that answer chat requests, and by the command
line for the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxinfer.errors import ConfigError
from serving.parsers import harmony, reasoning
from serving.parsers.output import Grammar, Output, OutputParser, ToolFormat, plain
from serving.parsers.tools_json import DeepSeek, Hermes, Llama3Json, Mistral
from serving.parsers.tools_pythonic import Pythonic
from serving.parsers.tools_qwen3_coder import Qwen3Coder

TOOL_PARSERS: Mapping[str, type[ToolFormat]] = {
    "deepseek": DeepSeek,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen3": Hermes,
    "qwen3_coder": Qwen3Coder,
}
GPT_OSS = "gpt_oss"
REASONING_PARSERS = ("deepseek_r1", GPT_OSS, "qwen3")


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ConfigError for a name that is none, or for two parsers that exclude each other."""
    for field, name, known in (
        ("tool_call_parser", tool_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name is not None and name not in known:
            raise ConfigError(f"{field}={name!r} is unknown; choose one of {', '.join(known)}")
    if reasoning_parser == GPT_OSS and tool_parser is not None:
        raise ConfigError(
            f"tool_call_parser={tool_parser!r} cannot go with reasoning_parser={GPT_OSS!r}, which "
            "reads tool calls itself; leave tool_call_parser out"
        )


def make_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: list[dict[str, Any]] | None,
    tool_choice: object = "auto",
    prompt: str,
    thinking: bool | None = None,
    special_tokens: Iterable[str] = (),
    keep_special_tokens: bool = False,
    parallel_tool_calls: bool = True,
) -> OutputParser:
    """The parser of one output sequence.

    Args:
        tool_parser: a name of TOOL_PARSERS; None: tool calls stay text.
        reasoning_parser: a name of REASONING_PARSERS; None: reasoning stays text.
        tools: the request's tools, as chat completions, responses or messages write them.
        tool_choice: "none" (or no tools): tool calls stay text. Anything else: they are looked for.
        prompt: the rendered prompt; its end tells whether the template opened a think block.
        thinking: False: the request switched thinking off, all is content (gpt_oss ignores it).
        special_tokens: the texts of all special tokens of the tokenizer.
        keep_special_tokens: the request said skip_special_tokens=false: they stay in the text.
        parallel_tool_calls: False: only the first call is reported.

    Raises:
        ConfigError: an unknown name, or gpt_oss with a tool parser.
    """
    check_parsers(tool_parser, reasoning_parser)
    special = frozenset(special_tokens)
    calls = bool(tools) and tool_choice != "none"
    format = TOOL_PARSERS[tool_parser](tools or []) if tool_parser and calls else None
    grammar: Grammar = format.read if format else plain
    tokens = format.tokens if format else frozenset()
    if reasoning_parser == GPT_OSS:
        grammar, tokens = harmony.harmony(prompt, calls), harmony.TOKENS
    elif reasoning_parser and thinking is not False:
        opened = reasoning.opened_by(prompt)
        if opened is not False:
            grammar = reasoning.think(bool(opened), grammar)
            tokens |= {reasoning.OPEN, reasoning.CLOSE}
    shown = special & tokens
    trim = format is not None or (calls and reasoning_parser == GPT_OSS)
    out = Output(frozenset() if keep_special_tokens else shown, parallel_tool_calls, trim)
    hidden = frozenset() if keep_special_tokens else special - tokens
    return OutputParser(out, grammar, hidden, needs_special_tokens=bool(shown))
