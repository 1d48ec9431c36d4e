"""Log-probabilities in OpenAI's two forms, and in vLLM's for prompts.

An entry of the engine maps token id -> Logprob, the chosen token first. The chosen token's number is
written from the same float wherever it appears: evaluators compare it exactly. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import Logprob

type Entry = dict[int, Logprob]


def completion_logprobs(
    entries: Iterable[Entry | None], count: int, offset: int, as_ids: bool
) -> tuple[dict[str, list[Any]], int]:
    """The `logprobs` object of a completion, and the text offset after it.

    Args:
        entries: None for the prompt's first token, which nothing predicts.
        count: top tokens to list; the chosen one is listed besides. offset: characters before.
        as_ids: write tokens as "token_id:N".

    Offsets count the tokens' own texts, so they do not depend on how a stream is cut.
    """
    body: dict[str, list[Any]] = {
        "text_offset": [],
        "token_logprobs": [],
        "tokens": [],
        "top_logprobs": [],
    }
    for entry in entries:
        if not entry:
            continue
        token, chosen = next(iter(entry.items()))
        top: dict[str, float] = {}
        for other, logprob in best(entry, count, and_chosen=True):
            name = token_name(other, logprob, as_ids)
            top[f"token_id:{other}" if name in top else name] = logprob.logprob
        _append(body, token_name(token, chosen, as_ids), chosen.logprob, top, offset)
        offset += len(chosen.decoded_token or "")
    return body, offset


def echo_logprobs(
    first: int, entries: Sequence[Entry | None], count: int, tokenizer: Tokenizer, as_ids: bool
) -> tuple[dict[str, list[Any]], int]:
    """`completion_logprobs` of a prompt; its first token has no number."""
    text = tokenizer.token_text(first)
    body, offset = completion_logprobs(entries[1:], count, len(text), as_ids)
    head: dict[str, list[Any]] = {key: [] for key in body}
    _append(head, f"token_id:{first}" if as_ids else text, None, None, 0)
    return {key: head[key] + body[key] for key in body}, offset


def _append(body: dict[str, list[Any]], name: str, number: Any, top: Any, offset: int) -> None:
    body["tokens"].append(name)
    body["token_logprobs"].append(number)
    body["top_logprobs"].append(top)
    body["text_offset"].append(offset)


def join(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two `logprobs` objects, one after the other."""
    return {key: first[key] + second[key] for key in first}


def chat_logprobs(
    entries: Iterable[Entry], count: int, tokenizer: Tokenizer | None, as_ids: bool
) -> list[dict[str, Any]]:
    """The `logprobs.content` list of a chat choice; `bytes` are the token's own, also of parts of characters."""

    def told(token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": token_name(token, logprob, as_ids),
            "logprob": logprob.logprob,
            "bytes": None if tokenizer is None else list(tokenizer.pieces[token]),
        }

    return [
        told(*next(iter(entry.items())))
        | {"top_logprobs": [told(*item) for item in best(entry, count)]}
        for entry in entries
    ]


def prompt_logprobs(
    entries: Iterable[Entry | None], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's form: for each prompt token {id: {logprob, rank, decoded_token}}, None for the first."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": item.logprob,
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for token, item in best(entry, count, and_chosen=True)
        }
        for entry in entries
    ]


def best(entry: Entry, count: int, and_chosen: bool = False) -> list[tuple[int, Logprob]]:
    """The `count` most likely tokens, best first; with `and_chosen` the chosen one first, in any case."""
    items = list(entry.items())
    chosen, others = items[:1], items[1:]
    if and_chosen:
        return chosen + [item for item in others if (item[1].rank or 0) <= count]
    ranked = sorted(items, key=lambda item: (item[1].rank or 0, item[0] != chosen[0][0]))
    return [item for item in ranked if (item[1].rank or 0) <= count][:count]


def token_name(token: int, logprob: Logprob, as_ids: bool) -> str:
    """The token's text; "token_id:N" if asked for, or if there is no tokenizer."""
    if as_ids or logprob.decoded_token is None:
        return f"token_id:{token}"
    return logprob.decoded_token
