"""The prompts of a cross-check: the default ones, a user's file, or token ids for models without text.

Called by session.py. Items of a file: text, {"prompt"}, {"prompt_token_ids"} or {"messages"}, each
with an optional "name"; the default list also has {"line", "count"}: numbered variations of a line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.errors import InvalidRequest
from jaxinfer.llm import LLM

DEFAULT = Path(__file__).with_name("prompts.json")
WINDS = ("north", "south-west", "east", "north-east", "west")
NOTES = (
    "all well",
    "rain before noon",
    "a sail was mended",
    "dolphins off the bow",
    "no land in sight",
)
# Around a page and a block, and longer than small windows.
ID_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 130)


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """name: for reports. token_ids: of the prompt, chat template and special tokens applied."""

    name: str
    token_ids: list[int]


def load_prompts(
    llm: LLM, file: Path | None, max_tokens: int
) -> tuple[list[NamedPrompt], list[str]]:
    """(prompts, names of default prompts that this model cannot take: too long, or no chat template).

    Raises InvalidRequest for a file that cannot be read, or with a prompt that cannot be used.
    """
    if file is None and llm.model.tokenizer is None:
        items = _id_items(llm.model.config.vocab_size)
    else:
        items = _items(file or DEFAULT)
    room = llm.core.max_model_len - max_tokens
    kept, skipped = [], []
    for i, item in enumerate(items):
        name = str(item.get("name", f"prompt {i}")) if isinstance(item, dict) else f"prompt {i}"
        try:
            ids = _token_ids(llm, item)
            if len(ids) > room:
                raise InvalidRequest(
                    f"{name!r} has {len(ids)} tokens; with max_tokens={max_tokens} at most {room} fit"
                )
            kept.append(NamedPrompt(name, ids))
        except InvalidRequest:
            if file is not None:
                raise
            skipped.append(name)
    if not kept:
        raise InvalidRequest(f"no default prompt can be used; lower max_tokens={max_tokens}")
    return kept, skipped


def _id_items(vocab: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"name": f"{n} ids", "prompt_token_ids": rng.integers(0, vocab, n).tolist()}
        for n in ID_LENGTHS
    ]


def _items(file: Path) -> list[Any]:
    try:
        items = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"prompts={str(file)!r} cannot be read as JSON: {error}") from error
    if not isinstance(items, list) or not items:
        raise InvalidRequest(f"prompts={str(file)!r} must be a JSON list with at least one prompt")
    return items


def _token_ids(llm: LLM, item: Any) -> list[int]:
    if isinstance(item, dict) and "messages" in item:
        return list(llm.chat_prompt(item["messages"]).token_ids)
    if isinstance(item, dict) and "line" in item:
        item = _lines(item["line"], item["count"])
    if isinstance(item, dict):
        item = {k: v for k, v in item.items() if k != "name"}
    return list(llm.model.inputs(llm.core).prompt(item).token_ids)


def _lines(line: str, count: int) -> str:
    return "".join(
        line.format(i=i, a=(37 * i) % 190 + 10, b=WINDS[i % 5], c=NOTES[(i * i) % 5])
        for i in range(1, count + 1)
    )
