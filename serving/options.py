"""Flags of the command line that set a field of SamplingParams or EngineConfig, as tables.

One row a field: tests walk the fields, so a new one without a flag fails. Values are checked by the
dataclasses themselves; here text is only turned into numbers. Called by the commands; imports no JAX.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jaxinfer.config import CHECKPOINT_POLICIES, DTYPES, POLICIES, REPLAYS, WARMUPS
from jaxinfer.errors import InvalidRequest
from jaxinfer.types import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        field: field of the dataclass. kind: type that the command line parses.
        name: spelling, if it is not the field's name with dashes.
        parse: from what was typed to the field's value.
        aliases: further spellings. " /--off" is one that switches a bool off.
    """

    field: str
    kind: Any
    help: str
    name: str | None = None
    parse: Callable[[str, Any], Any] | None = None
    aliases: tuple[str, ...] = ()

    @property
    def spelling(self) -> str:
        return self.name or "--" + self.field.replace("_", "-")

    @property
    def switches(self) -> tuple[list[str], list[str]]:
        """Every spelling; those of the second list switch a bool off."""
        parts = [text.partition("/") for text in (self.spelling, *self.aliases)]
        on, off = [p[0].strip() for p in parts], [p[2].strip() for p in parts]
        return [name for name in on if name], [name for name in off if name]

    def value(self, typed: Any) -> Any:
        return self.parse(self.spelling, typed) if self.parse else typed


def whole(text: str | int) -> int:
    """An integer that was typed; the error shows what was."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer") from None


def number(text: str | float) -> float:
    """A number that was typed; the error shows what was."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


# The command line's own message does not show the value.
READERS: dict[Any, dict[str, Any]] = {
    int: {"parser": whole, "metavar": "INTEGER"},
    float: {"parser": number, "metavar": "NUMBER"},
}


ALIAS = "__alias"  # ends the name of the parameter that takes a flag's aliases


def parse_ids(name: str, text: str) -> list[int]:
    """Token ids from "1,2,3"; InvalidRequest names the flag and the part that is no integer."""
    out = []
    for part in text.replace(",", " ").split():
        try:
            out.append(int(part))
        except ValueError:
            raise InvalidRequest(
                f"{name} has {part!r}, which is no integer; write token ids like 1,2,3"
            ) from None
    return out


def parse_bias(name: str, items: list[str]) -> dict[int, float]:
    """A bias for each token id, from ID=VALUE items."""
    out = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            out[int(token)] = float(value)
        except ValueError:
            raise InvalidRequest(
                f"{name} has {item!r}; write ID=VALUE with an integer and a number, like 42=-5.0"
            ) from None
    return out


SAMPLING = (
    Flag("n", int, "outputs for each prompt"),
    Flag("best_of", int, "not supported: use --n and choose among the outputs"),
    Flag("max_tokens", int, "most tokens to generate  [default: 128, or what room is left]"),
    Flag("min_tokens", int, "no end before this many tokens"),
    Flag("temperature", float, "0 is greedy"),
    Flag("top_k", int, "draw from the k most likely tokens; 0 is off"),
    Flag("top_p", float, "draw from the smallest set with this probability"),
    Flag("min_p", float, "drop tokens below this share of the best probability"),
    Flag("repetition_penalty", float, "divides the logits of tokens seen before; 1 is off"),
    Flag("presence_penalty", float, "subtracted once from tokens generated before"),
    Flag("frequency_penalty", float, "subtracted for each time a token was generated"),
    Flag(
        "logit_bias", list[str], "ID=VALUE, added to a token's logit; repeatable", None, parse_bias
    ),
    Flag("allowed_token_ids", str, "only these ids may be drawn: 1,2,3", None, parse_ids),
    Flag("ignore_eos", bool, "go on after an end-of-text token", "--ignore-eos/--heed-eos"),
    Flag("stop", list[str], "end at this text; repeatable"),
    Flag("stop_token_ids", str, "end at these ids: 1,2,3", None, parse_ids),
    Flag(
        "include_stop_str_in_output",
        bool,
        "keep the stop text in the output",
        "--include-stop-str-in-output/--exclude-stop-str-from-output",
    ),
    Flag("seed", int, "seed of the draws"),
    Flag("logprobs", int, f"log-probabilities of the top tokens, 0 to {MAX_LOGPROBS}"),
    Flag("prompt_logprobs", int, f"the same for the prompt's tokens, 0 to {MAX_LOGPROBS}"),
    Flag(
        "skip_special_tokens",
        bool,
        "leave special tokens out of the text",
        "--skip-special-tokens/--no-skip-special-tokens",
    ),
    Flag("detokenize", bool, "turn tokens into text", "--detokenize/--no-detokenize"),
)

ENGINE = (
    Flag("dtype", str, f"compute dtype: {', '.join(DTYPES)}"),
    Flag(
        "max_model_len",
        int,
        "longest prompt and output together, in tokens",
        aliases=("--context-length",),
    ),
    Flag("page_size", int, "tokens of a cache page, a power of two", aliases=("--block-size",)),
    Flag("num_pages", int, "pages of the cache", aliases=("--num-gpu-blocks-override",)),
    Flag(
        "memory_fraction",
        float,
        "share of the free memory that the cache may take",
        aliases=(
            "--gpu-memory-utilization",
            "--device-memory-utilization",
            "--mem-fraction-static",
        ),
    ),
    Flag("max_num_seqs", int, "sequences that run at once", aliases=("--max-running-requests",)),
    Flag(
        "max_num_batched_tokens",
        int,
        "most tokens that a step feeds",
        aliases=("--chunked-prefill-size",),
    ),
    Flag(
        "max_partial_prefills",
        int,
        "prompts that may be partly prefilled at once",
        aliases=("--max-num-partial-prefills",),
    ),
    Flag(
        "long_prefill_threshold",
        int,
        "most tokens of one prompt in a step; 0 is no limit",
        aliases=("--long-prefill-token-threshold",),
    ),
    Flag(
        "policy",
        str,
        f"order of the waiting queue: {', '.join(POLICIES)}",
        aliases=("--scheduling-policy", "--schedule-policy"),
    ),
    Flag(
        "enable_prefix_caching",
        bool,
        "reuse the pages of common prefixes",
        "--prefix-caching/--no-prefix-caching",
        aliases=("--enable-prefix-caching/--no-enable-prefix-caching", " /--disable-radix-cache"),
    ),
    Flag(
        "num_states",
        int,
        "slots for recurrent states",
        aliases=("--max-mamba-cache-size",),
    ),
    Flag(
        "checkpoint_policy",
        str,
        f"where recurrent states are kept for reuse: {', '.join(CHECKPOINT_POLICIES)}",
        aliases=("--mamba-cache-mode",),
    ),
    Flag(
        "checkpoint_interval",
        int,
        "tokens between two states that are kept",
        aliases=("--mamba-block-size", "--mamba-track-interval"),
    ),
    Flag("max_states_per_path", int, "most states kept along one prefix; 0 is no limit"),
    Flag("replay", str, f"rounding of recurrent layers: {', '.join(REPLAYS)}"),
    Flag("serial_weight", float, "what a recurrent model's prompt token takes of a step's budget"),
    Flag(
        "prefill_deadline",
        int,
        "steps until a prompt under way gets every second step for itself; 0 is never",
    ),
    Flag(
        "overlap",
        bool,
        "keep one step in flight ahead of the host",
        "--overlap/--no-overlap",
        aliases=("--async-scheduling/--no-async-scheduling", " /--disable-overlap-schedule"),
    ),
    Flag("warmup", str, f"when to compile: {', '.join(WARMUPS)}"),
    Flag(
        "seed",
        int,
        "base of the seeds of requests that give none",
        "--engine-seed",
        aliases=("--random-seed",),
    ),
    Flag("compile_cache", str, 'folder of compiled programs; "" switches it off'),
    Flag(
        "strict_compile",
        bool,
        "fail if anything compiles after an eager warm-up",
        "--strict-compile/--no-strict-compile",
    ),
)


def with_options(**groups: tuple[Flag, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of each group; it gets those that were typed as one dict a group."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            for group, flags in groups.items():
                typed = {f: _typed(f, values, f"{group}_{f.field}") for f in flags}
                values[group] = {
                    flag.field: flag.value(value)
                    for flag, value in typed.items()
                    if value is not None
                }
            return command(**values)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in groups]
        for group, flags in groups.items():
            parameters += [p for flag in flags for p in _parameters(group, flag)]
        del run.__wrapped__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _typed(flag: Flag, values: dict[str, Any], name: str) -> Any:
    """What was typed for a flag under any of its names; None if nothing was."""
    value, alias = values.pop(name), values.pop(name + ALIAS, None)
    if value is None or alias is None:
        return alias if value is None else value
    if isinstance(value, list):
        return value + alias
    names = ", ".join(sum(flag.switches, []))
    raise InvalidRequest(f"{names} are names of one option, and two were given; give one of them")


def _parameters(group: str, flag: Flag) -> list[inspect.Parameter]:
    """The flag as a command's parameter; its aliases are a second one, which the help only mentions."""
    name, also = f"{group}_{flag.field}", ""
    if flag.aliases:
        also = "; also " + ", ".join(alias.strip(" /") for alias in flag.aliases)
    own = _parameter(name, flag.kind, (flag.spelling,), help=flag.help + also,
                     rich_help_panel=f"{group.capitalize()} options")  # fmt: skip
    if not flag.aliases:
        return [own]
    return [own, _parameter(name + ALIAS, flag.kind, flag.aliases, hidden=True)]


def _parameter(name: str, kind: Any, spellings: tuple[str, ...], **more: Any) -> inspect.Parameter:
    option = typer.Option(*spellings, show_default=False, **more, **READERS.get(kind, {}))
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
