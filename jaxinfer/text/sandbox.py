"""The Jinja environment that chat templates run in: no access to Python, bounded work and memory.

Jinja's sandbox blocks attributes and mutation, but not endless loops or huge strings. Here the syntax
tree is rewritten so that loops, calls, literals and filters report to a budget, which raises when a
render does too much. Never runs a template outside of a budget. Used by text.chat alone.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import Environment, nodes, pass_environment
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 2**23  # of one string; 8 M characters are some 2 M tokens
MAX_TOTAL_CHARS = 64 * MAX_CHARS  # of all strings that one render makes
MAX_TICKS = 2_000_000  # loop rounds, calls and elements of new containers
MAX_SECONDS = 5.0
MAX_INT = 1_000_000  # as an argument, repeat count or width
REMOVED_FILTERS = (
    "center",
    "pprint",
    "random",
    "sum",
    "urlencode",
    "urlize",
    "wordwrap",
    "xmlattr",
)
REMOVED_METHODS = frozenset({"encode", "expandtabs", "to_bytes", "translate"})
# A width of five digits or one that is computed, in "%5d" and "{:5d}" formats; linear to search.
_WIDE_FORMAT = re.compile(r"%(?:\([^)%]*\))?[^a-zA-Z%]*?(?:\d{5}|\*)|\{[^{}:]*:[^{}]*?(?:\d{5}|\{)")


class Budget:
    """What one render may still do; every method raises SecurityError when that is used up."""

    def __init__(self) -> None:
        self.ticks = self.chars = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def tick(self, count: int = 1) -> None:
        self.ticks += count
        if self.ticks > MAX_TICKS:
            raise SecurityError(f"the template needs more than {MAX_TICKS} operations")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"the template runs for more than {MAX_SECONDS:g} seconds")

    def room(self, chars: int) -> None:
        """Refuse a string of `chars` characters before it is made."""
        if chars > MAX_CHARS:
            raise SecurityError(f"the template makes a text of more than {MAX_CHARS} characters")

    def charge(self, chars: int) -> None:
        """Account for text that was made, or will be."""
        self.chars += chars
        if self.chars > MAX_TOTAL_CHARS:
            raise SecurityError(f"the template makes more than {MAX_TOTAL_CHARS} characters in all")

    def weigh(self, value: object) -> int:
        """Characters that `value` has when it is printed; shared parts count each time."""
        chars, stack = 0, [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, (list, tuple, set, Mapping)):
                self.tick(len(item) + 1)
                stack.extend(item)
                if isinstance(item, Mapping):
                    stack.extend(item.values())
            self.room(chars)
        return chars

    def result(self, value: Any) -> Any:
        """Account for a new value; lazy results are accounted for as they are read."""
        if isinstance(value, str):
            self.room(len(value))
            self.charge(len(value))
        elif isinstance(value, (list, tuple, set, Mapping)):
            self.weigh(value)
        elif isinstance(value, int) and value.bit_length() > 4096:
            raise SecurityError("the template makes a number of more than 4096 bits")
        elif isinstance(value, Iterator):
            return map(self._item, value)
        return value

    def _item(self, value: Any) -> Any:
        self.tick()
        return self.result(value)

    def bounded(self, value: Any) -> Any:
        """An argument that is no huge number, as that could be a count or a width."""
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise SecurityError(f"the template passes the number {value}, beyond {MAX_INT}")
        return value

    def formatting(self, pattern: str, args: object) -> None:
        if _WIDE_FORMAT.search(pattern):
            raise SecurityError("the template formats with a huge or computed width")
        holes = pattern.count("%") + pattern.count("{")
        self.room(len(pattern) + holes * (self.weigh(args) + 32))


_BUDGET: ContextVar[Budget] = ContextVar("budget")


def _result(value: Any) -> Any:
    return _BUDGET.get().result(value)


def _bounded(value: Any) -> Any:
    return _BUDGET.get().bounded(value)


def _loop(value: Any, chars: int) -> Any:
    """The iterable of a loop whose body prints `chars` constant characters a round."""
    budget = _BUDGET.get()
    if isinstance(value, Sized):
        budget.tick(len(value))
        budget.charge(chars * len(value))
        return value

    def rounds() -> Iterator[Any]:
        for item in value:
            budget.tick()
            budget.charge(chars)
            yield item

    return rounds()


def _replace(text: object, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    found = text.count(old) if old else len(text) + 1
    _BUDGET.get().room(len(text) + found * len(new))
    return text.replace(old, new, -1 if count is None else count)


@pass_environment
def _join(
    environment: Environment, values: Iterable[Any], d: str = "", attribute: str | None = None
) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    budget, parts, chars = _BUDGET.get(), [], 0
    for value in values:
        chars += budget.weigh(value) + len(d)
        budget.room(chars)
        parts.append(str(value))
    return d.join(parts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = len(width) if isinstance(width, str) else _BUDGET.get().bounded(width)
    _BUDGET.get().room(len(text) + pad * (len(text.splitlines()) + 1))
    return do_indent(text, width, first, blank)


def _format(pattern: object, *args: Any, **kwargs: Any) -> str:
    _BUDGET.get().formatting(str(pattern), [args, kwargs])
    return str(pattern) % (kwargs or args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: no HTML escapes, characters as they are."""
    _BUDGET.get().weigh(value)
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError(f"tojson(indent={indent}) is out of range [0, 16]")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _wrap(name: str, node: Any, *args: Any) -> Any:
    """`node|name(*args)`; Any, as Jinja's node classes make their fields at run time."""
    return nodes.Filter(node, name, list(args), [], None, None).set_lineno(node.lineno)


class _Accounting(NodeTransformer):
    """Puts the budget's filters around everything that can take time or memory."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        chars = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _wrap("_loop", node.iter, nodes.Const(chars).set_lineno(node.lineno))
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        self.generic_visit(node)
        node.args = [_wrap("_bounded", arg) for arg in node.args]
        for keyword in node.kwargs:
            keyword.value = _wrap("_bounded", keyword.value)
        return _wrap("_result", node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _wrap("_result", node)

    visit_List = visit_Dict = visit_Concat

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _wrap("_result", node) if node.ctx == "load" else node


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what a trainer learns; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with the budget in force. Immutable once built."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            finalize=_result,
        )
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {"tojson": _tojson, "replace": _replace, "join": _join, "format": _format}
        self.filters |= {
            "indent": _indent,
            "_result": _result,
            "_bounded": _bounded,
            "_loop": _loop,
        }
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_bounded(self, source: str) -> Callable[[Mapping[str, Any]], str]:
        """A function that renders `source` within a budget of its own."""
        tree = _Accounting().visit(self.parse(source))
        template = self.from_string(tree)

        def render(variables: Mapping[str, Any]) -> str:
            budget = Budget()
            token = _BUDGET.set(budget)
            try:
                parts, chars = [], 0
                for part in template.generate(variables):
                    chars += len(part)
                    budget.room(chars)
                    parts.append(part)
                return "".join(parts)
            finally:
                _BUDGET.reset(token)

        return render

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.tick()
        for value in (*args, *kwargs.values()):
            budget.bounded(value)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name == "replace":
                return budget.result(_replace(owner, *args, **kwargs))
            if name == "join":
                return budget.result(_join(self, *args, owner))  # type: ignore[reportCallIssue]
        return budget.result(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _BUDGET.get().formatting(value.__self__, [args, kwargs])
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        budget.tick()
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)):
                    budget.bounded(times)
                    budget.room(len(value) * max(int(times), 0))
        elif operator == "**":
            budget.bounded(left)
            if isinstance(right, int) and right > 64:
                raise TemplateRuntimeError(f"the exponent {right} is out of range [-64, 64]")
        elif operator == "%" and isinstance(left, str):
            budget.formatting(left, right)
        return budget.result(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in REMOVED_METHODS and super().is_safe_attribute(obj, attr, value)
