"""Control tokens spelled out in a client's messages stay text: only the template may speak them.

A Shield breaks such spellings before the template renders; `encode` then reads the template's own
as control ids and the client's as ordinary characters. A conversation without any takes the plain
way and is encoded as Hugging Face does it. Called by inputs.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxinfer.errors import InvalidRequest
from jaxinfer.text.tokenizer import Tokenizer, encode_ids

# Unicode's noncharacters: no text holds them for a reason.
_MARKS = [chr(c) for c in range(0xFDD0, 0xFDE0)]
_SEPARATORS = [chr(c) for c in range(0xFDE0, 0xFDE4)]  # one for each (lstrip, rstrip)
_MAX_DEPTH = 100


class SpecialGuard:
    """Keeps the special tokens of one tokenizer out of the hands of clients."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        # A single character cannot be broken in two; no known model has such a control token.
        self._special = {t.content: t for t in added.values() if t.special and len(t.content) > 1}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._plain: tokenizers.Tokenizer | None = None

    def shield(self) -> Shield:
        """Protection for one conversation."""
        return Shield(self._pattern)

    def encode(self, text: str, mark: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a rendered `text`; what `mark` breaks is text, other special tokens are themselves."""
        if self._plain is None:
            self._plain = self._make_plain()
        real: list[str] = []

        def stand_in(found: re.Match[str]) -> str:
            token = self._special[found[0]]
            real.append(found[0])
            return _SEPARATORS[2 * token.lstrip + token.rstrip]

        text = self._pattern.sub(stand_in, text).replace(mark, "")
        ids = encode_ids(self._plain, text, add_special_tokens)
        separators = {self._plain.token_to_id(s) for s in _SEPARATORS}
        names = iter(real)
        return [self._id(next(names)) if i in separators else i for i in ids]

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        assert found is not None
        return found

    def _make_plain(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as text, with stand-ins that split it as they would."""
        plain = tokenizers.Tokenizer.from_str(self._tokenizer.backend.to_str())
        plain.encode_special_tokens = True
        flags = [(left, right) for left in (False, True) for right in (False, True)]
        plain.add_tokens(
            [
                AddedToken(s, lstrip=left, rstrip=right, normalized=False)
                for s, (left, right) in zip(_SEPARATORS, flags, strict=True)
            ]
        )
        return plain


class Shield:
    """What one rendering needs; `mark` is None until `protect` has found a control token spelled out."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.mark: str | None = None

    def protect(self, value: Any) -> Any:
        """`value` with all spellings in its strings broken by the mark."""
        strings = list(_strings(value))
        if not any(self._pattern.search(text) for text in strings):
            return value
        used = set().union(*strings)
        self.mark = next((m for m in _MARKS if m not in used), None)
        if self.mark is None or used.intersection(_SEPARATORS):
            raise InvalidRequest("messages spell control tokens and hold Unicode noncharacters")
        return self._break(value, self.mark)

    def _break(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda m: m[0][0] + mark + m[0][1:], value)
        if isinstance(value, Mapping):
            return {self._break(k, mark): self._break(v, mark) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._break(v, mark) for v in value]
        return value


def _strings(value: Any, depth: int = 0) -> list[str]:
    """Every string in a JSON-like value."""
    if isinstance(value, str):
        return [value]
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"messages are nested too deep; at most {_MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return [s for item in value.items() for part in item for s in _strings(part, depth + 1)]
    if isinstance(value, (list, tuple)):
        return [s for part in value for s in _strings(part, depth + 1)]
    return []
