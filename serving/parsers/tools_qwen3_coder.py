"""Tool calls as Qwen3-Coder writes them: one tag for each parameter, values as plain text.

Values become JSON by the tool's schema: a text where the schema says string or nothing, else what
the text spells if it spells JSON. A parameter goes out when it is complete. Must never evaluate a
value. Chosen by registry.py.
"""

from __future__ import annotations

import json
import re
from typing import Any, override

from serving.parsers.literals import dumps, parse_literal
from serving.parsers.output import Output, ToolFormat
from serving.parsers.scanner import Wait, markers

_TAG_NAME = re.compile(r"[^<>\s]*")
_KEY = re.compile(r"[^<>\n]*")
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class Qwen3Coder(ToolFormat):
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`.

    The model forgets tags at times: `<tool_call>` may be missing, and a value also ends where a
    line starts with the next parameter's tag or `</function>`. A call that is cut off keeps what
    there is of its last value and stays open JSON, so nobody takes it for a whole one.
    """

    openers = ("<tool_call>", "<function=")
    closers = ("</function>", "</tool_call>")
    inner = ("<parameter=", "</parameter>")

    @override
    def call(self, out: Output, opener: str) -> Wait[None]:
        yield from out.skip_space()
        if opener == "<tool_call>" and not (yield from out.expect("<function=")):
            return
        name = yield from out.word(_TAG_NAME)
        if not name or not (yield from out.expect(">")):
            return
        out.begin_call(name)
        out.arguments("{")
        types = self.parameters.get(name, {})
        comma = ""
        while True:
            out.mark()
            yield from out.skip_space()
            if not (yield from out.expect("<parameter=")):
                break
            if not (yield from self._parameter(out, comma, types)):
                return
            comma = ", "
        if (yield from out.peek()):
            out.arguments("}")

    def _parameter(self, out: Output, comma: str, types: dict[str, Any]) -> Wait[bool]:
        key = yield from out.word(_KEY)
        if not (yield from out.expect(">")):
            return False
        out.forget()
        ends = markers(frozenset(("</parameter>", "\n<parameter=", "\n</function>")))
        parts: list[str] = []
        end = yield from out.until(ends, parts.append)
        value = "".join(parts).removeprefix("\n")
        head = f"{comma}{dumps(key)}: "
        if end is None:
            out.arguments(head + dumps(value)[:-1])
            return False
        if end == "</parameter>":
            out.take(len(end))
            value = value.removesuffix("\n")
        out.arguments(head + to_json(value, types.get(key)))
        return True


def to_json(value: str, schema: Any) -> str:
    """The JSON text of a parameter's value, by its schema; a JSON string where nothing else fits.

    Never raises: a schema that is none, or numbers that JSON does not have, give a string.
    """
    types = _types(schema) - {"string"}
    if types:
        text = value.strip()
        text = _LITERALS.get(text.lower(), text)
        if _kind(text) in types | {"null"}:
            return text
        if text.startswith(("[", "{")) and types & {"array", "object"}:
            try:
                return dumps(parse_literal(text))
            except ValueError:
                pass  # no JSON and no Python: the text itself
    return dumps(value)


def _types(schema: Any, depth: int = 8) -> set[str]:
    """The JSON types that a schema allows, as far as it says so itself or by alternatives."""
    if not isinstance(schema, dict) or not depth:
        return set()
    named = schema.get("type")
    found = {name for name in [named, *_list(named)] if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for option in _list(schema.get(key)):
            found |= _types(option, depth - 1)
    for option in _list(schema.get("enum")):
        found.add(_kind(json.dumps(option)))
    if "number" in found:
        found.add("integer")
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind(text: str) -> str:
    """The JSON type that `text` spells; "" if it is no JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ""
    kinds: dict[type, str] = {
        bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
        dict: "object", type(None): "null",
    }  # fmt: skip
    return kinds[type(value)]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
