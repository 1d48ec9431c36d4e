"""Chat messages to prompt text by the model's own Jinja template.

Checks the messages field by field and renders in the bounded sandbox. Never tokenizes (the result is
encoded with add_special_tokens=False) and never lets a request bring its own template. Called by
the Python API and the OpenAI routes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from jaxinfer.errors import ConfigError, InvalidRequest
from jaxinfer.text.sandbox import ChatEnvironment

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
MAX_MESSAGES = 65_536
MAX_SOURCE_CHARS = 1_000_000
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "tokenize", "chat_template"})
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_END = "\ufdef"  # a noncharacter: no text holds it for a reason
_ENVIRONMENT = ChatEnvironment()


class Arguments(dict[str, Any]):
    """A call's arguments: an object for most templates, its JSON text where one adds it to a string."""

    def __radd__(self, text: str) -> str:
        return (
            text + json.dumps(self, ensure_ascii=False) if isinstance(text, str) else NotImplemented
        )


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template; or several by name, of which "tool_use" serves requests with tools and
            "default" all others; or None for a model that has none (render then refuses).
        bos_token, eos_token: their texts; "" if the model has none.
        special_tokens: further variables, such as pad_token.

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        **special_tokens: str,
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self.source = sources.get("default") or next(iter(sources.values()), None)
        self._tokens = {
            **special_tokens,
            "bos_token": bos_token or "",
            "eos_token": eos_token or "",
        }
        self._renders = {name: _compile(name, text) for name, text in sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        _protect: Callable[[Any], Any] = lambda given: given,
        **kwargs: Any,
    ) -> str:
        """Prompt text for `messages`.

        Args:
            messages: OpenAI-style; content is a string or a list of text parts, which are joined by
                newlines. JSON strings in tool_calls arguments become objects, as templates expect.
            tools: OpenAI-style function descriptions.
            add_generation_prompt: open the assistant's turn.
            continue_final_message: leave the final message open so that the model continues it.
            _protect: applied to everything that the client gave, once it is checked (SpecialGuard).
            kwargs: further template variables (chat_template_kwargs).

        Raises:
            InvalidRequest: a bad field, a template that refuses the messages or does too much work,
                or no template at all.
        """
        if not self._renders:
            raise InvalidRequest(
                "messages cannot be rendered, as the model has no chat template; "
                "send a raw prompt, or start with --chat-template FILE"
            )
        if bad := RESERVED.intersection(kwargs) or self._tokens.keys() & kwargs.keys():
            raise InvalidRequest(f"chat_template_kwargs may not set {sorted(bad)}; leave them out")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message=True needs add_generation_prompt=False; set one of the two"
            )
        checked, checked_tools, kwargs = _protect(
            [self.check(messages), _check_tools(tools), kwargs]
        )
        if continue_final_message:
            checked[-1] = _with_end(f"messages[{len(checked) - 1}]", checked[-1])
        _wrap_arguments(checked)
        given = {"messages": checked, "tools": checked_tools}
        given["add_generation_prompt"] = add_generation_prompt
        text = self._run({**self._tokens, **kwargs, **given})
        return _cut_at_end(text, len(checked) - 1) if continue_final_message else text

    def check(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as templates expect them; InvalidRequest names the field that is wrong."""
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise InvalidRequest(f"messages must be a list, not {type(messages).__name__}")
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(
                f"messages has {len(messages)} entries; allowed range [1, {MAX_MESSAGES}]"
            )
        return [self._check_message(f"messages[{i}]", m) for i, m in enumerate(messages)]

    def _check_message(self, where: str, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{where} must be an object, not {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not (role in ROLES or self._knows_role(role)):
            raise InvalidRequest(
                f"{where}.role={role!r:.80} is unknown; allowed are {sorted(ROLES)} and the roles "
                "that the chat template names"
            )
        # Clients send null for what they leave out; templates ask whether a key is there.
        out = {key: value for key, value in message.items() if value is not None}
        if not out.get("tool_calls"):
            out.pop("tool_calls", None)
        else:
            out["tool_calls"] = _check_tool_calls(f"{where}.tool_calls", message["tool_calls"])
        content = message.get("content")
        if content is None and role == "assistant":  # a reply of calls, or one that said nothing
            out["content"] = None if out.get("tool_calls") else ""
        else:
            out["content"] = _check_content(f"{where}.content", content)
        return out

    def _knows_role(self, role: str) -> bool:
        """Templates name the extra roles they serve, such as 'ipython' or 'documents'."""
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", role):
            return False
        return any(quote + role + quote in (self.source or "") for quote in "'\"")

    def _run(self, variables: dict[str, Any]) -> str:
        name = "tool_use" if variables["tools"] and "tool_use" in self._renders else "default"
        render = self._renders.get(name) or next(iter(self._renders.values()))
        try:
            return render(variables)
        except TemplateError as error:
            reason = _ADDRESS.sub("", str(error))
        except Exception as error:  # whatever Python raises for the template's expressions
            reason = _ADDRESS.sub("", f"{type(error).__name__}: {error}")
        raise InvalidRequest(f"messages were refused by the chat template: {reason:.500}")


def _compile(name: str, source: object) -> Any:
    if not isinstance(source, str) or len(source) > MAX_SOURCE_CHARS:
        raise ConfigError(
            f"chat_template {name!r} must be text of at most {MAX_SOURCE_CHARS} characters"
        )
    try:
        return _ENVIRONMENT.compile_bounded(source)
    except (TemplateError, SyntaxError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"chat_template {name!r} does not compile (line {line}): {error}; "
            "mend it, or give another with --chat-template FILE"
        ) from error


def _check_content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(
            f"{where} must be a string or a list of text parts, not {type(content).__name__}"
        )
    return "\n".join(_check_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _check_part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where} must be an object, not {type(part).__name__}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise InvalidRequest(
            f"{where}.type={kind!r:.80} is not supported; allowed are {sorted(TEXT_PARTS)}"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string, not {type(text).__name__}")
    return text


def _check_tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise InvalidRequest(f"{where} must be a list, not {type(calls).__name__}")
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}[{i}].function must be an object with a name")
        field = f"{where}[{i}].function.arguments"
        arguments = _check_arguments(field, function.get("arguments"))
        out.append({**call, "function": {**function, "arguments": arguments}})
    return out


def _check_arguments(where: str, arguments: object) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{where} is not valid JSON; send a JSON object") from None
    if arguments is not None and not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where} must be a JSON object, not {type(arguments).__name__}")
    return dict(arguments or {})


def _wrap_arguments(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = Arguments(call["function"]["arguments"])


def _check_tools(tools: object) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidRequest(f"tools must be a list, not {type(tools).__name__}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"tools[{i}].function must be an object with a name")
    return [dict(tool) for tool in tools]


def _with_end(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """The final message with a mark behind its text: the text alone may also stand elsewhere."""
    text = (message["content"] or "").rstrip()
    if not text:
        raise InvalidRequest(
            f"{where}.content must be text; continue_final_message=True continues it"
        )
    return {**message, "content": text + _END}


def _cut_at_end(text: str, index: int) -> str:
    """The prompt up to the final message's mark, without the template's closing."""
    before, mark, _ = text.rpartition(_END)
    if not mark:
        raise InvalidRequest(
            f"messages[{index}].content must be text that the chat template keeps; "
            "continue_final_message=True continues it"
        )
    return before.replace(_END, "")
