"""What a run sends: synthetic prompts, a JSONL file of prompts or chats, or a trace; seeded.

Same settings, same conversations. Reads no tokenizer: text is made of common words, about one token
each, and how many tokens it was is taken from the server's answer. Called by session.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidRequest
from serving.bench.settings import DataSettings

Message = dict[str, Any]
Prompt = str | list[int] | list[Message]  # text, token ids, or a chat

DEFAULT_COUNT = 100
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member "
    "law car city name team minute idea body back parent face level office door health person art"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user adds to the conversation, and the most tokens of the answer."""

    content: str | list[int] | list[Message]
    output_len: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that are sent one after another; `at` is the trace's start time in seconds, if any."""

    turns: tuple[Turn, ...]
    at: float | None = None


class Source:
    """Draws tokens: ids below `vocab_size`, or words where it is None."""

    def __init__(self, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size

    def draw(self, rng: random.Random, count: int) -> list[Any]:
        if self._vocab_size is None:
            return rng.choices(WORDS, k=count)
        return rng.choices(range(self._vocab_size), k=count)

    def join(self, tokens: list[Any]) -> str | list[int]:
        # The space in front keeps a turn apart from what the server answered before it.
        return tokens if self._vocab_size is not None else " " + " ".join(tokens)


def conversations(data: DataSettings, vocab_size: int | None) -> list[Conversation]:
    """All conversations of a run. `vocab_size` None makes text.

    Raises InvalidRequest for a file that cannot be read or a line that is none of the formats.
    """
    source = Source(vocab_size)
    if data.dataset is None:
        return _synthetic(data, source)
    out = [_from_line(data, source, i, line) for i, line in _lines(data.dataset)]
    if not out:
        raise InvalidRequest(f"dataset={str(data.dataset)!r} has no lines")
    if len({c.at is None for c in out}) > 1:
        raise InvalidRequest(
            f"dataset={str(data.dataset)!r}: some lines have a timestamp and others none"
        )
    if data.num_prompts is not None and data.num_prompts > len(out):
        raise InvalidRequest(
            f"num_prompts={data.num_prompts}, but dataset={str(data.dataset)!r} has {len(out)} lines"
        )
    return out[: data.num_prompts]


def _synthetic(data: DataSettings, source: Source) -> list[Conversation]:
    rng = random.Random(f"{data.seed}/prompts")
    prefix = source.draw(random.Random(f"{data.seed}/prefix"), data.prefix_len)

    def length(mean: int) -> int:
        spread = int(mean * data.range_ratio)
        return max(1, rng.randint(mean - spread, mean + spread))

    out = []
    for _ in range(data.num_prompts or DEFAULT_COUNT):
        turns = []
        for number in range(data.turns):
            tokens = source.draw(rng, length(data.input_len))
            content = source.join(tokens if number else [*prefix, *tokens])
            turns.append(Turn(content, length(data.output_len)))
        out.append(Conversation(tuple(turns)))
    return out


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"dataset={str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise InvalidRequest(
                f"dataset={str(path)!r}: line {number} is not JSON: {error}"
            ) from None


def _from_line(data: DataSettings, source: Source, number: int, line: Any) -> Conversation:
    try:
        if isinstance(line, dict) and "input_length" in line:
            return _from_trace(data, source, number, line)
        line = {"prompt": line} if isinstance(line, (str, list)) else line
        limit = _whole(line, "output_len", _whole(line, "max_tokens", data.output_len))
        at = line.get("timestamp")
        turns = _turns(line, data.turns)
        return Conversation(
            tuple(Turn(content, limit) for content in turns), None if at is None else _seconds(at)
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(
            f"dataset={str(data.dataset)!r}: line {number} cannot be used ({error}); write "
            '{"prompt": TEXT or IDS}, {"messages": [...]}, or a trace\'s {"timestamp": MS, '
            '"input_length": N, "output_length": N, "hash_ids": [...]}'
        ) from None


def _turns(line: dict[str, Any], most: int) -> list[Any]:
    """One turn as it stands; with several turns, each user message is one, answers are left out."""
    if "messages" not in line:
        if most > 1:
            raise ValueError(f"turns={most} needs messages")
        prompt = line["prompt"]
        if isinstance(prompt, str) and prompt:
            return [prompt]
        if prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
            return [prompt]
        raise ValueError("prompt is neither text nor token ids")
    messages = line["messages"]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message must be the user's")
    if most == 1:
        return [messages]
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            continue
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    return turns[:-1][:most]


def _from_trace(
    data: DataSettings, source: Source, number: int, line: dict[str, Any]
) -> Conversation:
    """The same hash id gives the same tokens, so requests share the prefixes that they shared then."""
    if data.turns > 1:
        raise ValueError(f"turns={data.turns} cannot be made from a trace")
    length = _whole(line, "input_length", 0)
    output = _whole(line, "output_length", data.output_len)
    hashes = line.get("hash_ids") or []
    tokens: list[Any] = []
    for block in hashes[: -(-length // data.trace_block_size)]:
        rng = random.Random(f"{data.seed}/block/{block}")
        tokens += source.draw(rng, data.trace_block_size)
    rest = random.Random(f"{data.seed}/line/{number}")
    tokens = tokens[:length] + source.draw(rest, max(0, length - len(tokens)))
    return Conversation((Turn(source.join(tokens), output),), _seconds(line["timestamp"]))


def _whole(line: dict[str, Any], name: str, default: int) -> int:
    value = line.get(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} is no positive integer")
    return value


def _seconds(milliseconds: Any) -> float:
    if not isinstance(milliseconds, (int, float)) or not 0 <= milliseconds < 1e12:
        raise ValueError(f"timestamp={milliseconds!r} is no time in milliseconds")
    return milliseconds / 1000


def first_prompt(content: Any, backend: str) -> Prompt:
    """A conversation's first prompt as the backend takes it; InvalidRequest where it cannot."""
    chat = isinstance(content, list) and isinstance(content[0], dict)
    if backend == "openai-chat":
        if isinstance(content, list) and not chat:
            raise InvalidRequest(
                "token ids cannot be sent to a chat endpoint; use --backend openai"
            )
        return content if chat else [{"role": "user", "content": content}]
    if chat:
        raise InvalidRequest(f"messages cannot be sent with backend={backend!r}; use openai-chat")
    return content


def next_prompt(prompt: Prompt, text: str, ids: list[int], content: Any, backend: str) -> Prompt:
    """The history, the server's own answer, and what the user says next."""
    added = first_prompt(content, backend)
    if backend == "openai-chat":
        return [*prompt, {"role": "assistant", "content": text}, *added]  # type: ignore[list-item]
    if isinstance(prompt, str):
        return prompt + text + str(added)
    return [*prompt, *ids, *added]  # type: ignore[list-item]
