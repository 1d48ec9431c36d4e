"""Control tokens spelled out in a client's messages stay text: only the template may speak them.

A Shield breaks such spellings before the template renders, also parts that could become one beside
what the template writes; `encode` then reads the template's own as control ids and the client's as
ordinary characters. A conversation without any takes the plain way and is encoded as Hugging Face
does it. Called by inputs.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxinfer.errors import InvalidRequest
from jaxinfer.text.tokenizer import Tokenizer, encode_ids

# Unicode's noncharacters: no text holds them for a reason.
_MARKS = [chr(c) for c in range(0xFDD0, 0xFDE0)]
_SEPARATORS = [chr(c) for c in range(0xFDE0, 0xFDE4)]  # one for each (lstrip, rstrip)
_MAX_DEPTH = 100
_MARKED = re.compile(r"\W")
# Control tokens that some tokenizers (DeepSeek's) do not mark as special.
_LOOKS_SPECIAL = re.compile(r"<[|｜][^\s<>]+[|｜]>")


class SpecialGuard:
    """Keeps the special tokens of one tokenizer out of the hands of clients."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._special = {
            t.content: t
            for t in added
            # A single character cannot be broken in two; no known model has such a control token.
            if (t.special and len(t.content) > 1) or _LOOKS_SPECIAL.fullmatch(t.content)
        }
        self._spellings = Spellings(self._special)
        self._normalizer = tokenizer.backend.normalizer
        normalized = [t.content for t in self._special.values() if t.normalized]
        self._folded = _any_of(map(self._normalizer.normalize_str, normalized)) if (
            self._normalizer and normalized
        ) else None  # fmt: skip
        self._plain: tokenizers.Tokenizer | None = None

    def shield(self) -> Shield:
        """Protection for one conversation."""
        return Shield(self._spellings, self._hides)

    def _hides(self, text: str) -> bool:
        """Whether the tokenizer would find a control token that is spelled otherwise (`＜|x|＞`)."""
        if self._folded is None:
            return False
        return self._folded.search(self._normalizer.normalize_str(text)) is not None

    def render(
        self,
        render: Callable[..., str],
        *args: Any,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """(text, ids) of a conversation. `render`: ChatTemplate.render, called with the rest."""
        shield = self.shield()
        text = render(*args, _protect=shield.protect, **options)
        if shield.mark is None:
            return text, self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids = self.encode(text, shield.mark, add_special_tokens)
        return text.replace(shield.mark, ""), ids

    def encode(self, text: str, mark: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a rendered `text`; what `mark` breaks is text, other special tokens are themselves."""
        if self._plain is None:
            self._plain = self._make_plain()
        real: list[str] = []

        def stand_in(found: re.Match[str]) -> str:
            token = self._special[found[0]]
            real.append(found[0])
            return _SEPARATORS[2 * token.lstrip + token.rstrip]

        text = self._spellings.pattern.sub(stand_in, text).replace(mark, "")
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
        plain.add_special_tokens(
            [
                AddedToken(name, normalized=False)
                for name, t in self._special.items()
                if not t.special
            ]
        )
        plain.encode_special_tokens = True
        flags = [(left, right) for left in (False, True) for right in (False, True)]
        plain.add_tokens(
            [
                AddedToken(s, lstrip=left, rstrip=right, normalized=False)
                for s, (left, right) in zip(_SEPARATORS, flags, strict=True)
            ]
        )
        return plain


class Spellings:
    """Finds `tokens`, and parts of them, in a client's strings.

    A part counts only with a character that is no letter, digit or underscore: roles, types and keys
    of messages, which templates compare and put between `<|` and `|>`, stay as they are.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = list(tokens)
        self.pattern = _any_of(tokens)
        self._longest = max(map(len, tokens), default=0)
        self._all = "\n".join(tokens)
        sizes = [(t, size) for t in tokens for size in range(1, len(t))]
        self._heads = frozenset(h for t, size in sizes if _MARKED.search(h := t[:size]))
        self._tails = frozenset(h for t, size in sizes if _MARKED.search(h := t[-size:]))

    def cuts(self, text: str) -> list[int]:
        """Where to break `text` so that it neither is, begins, ends nor completes a control token."""
        found = {match.start() + 1 for match in self.pattern.finditer(text)}
        end = len(text.rstrip())  # templates strip
        body = text[:end].lstrip()
        start = end - len(body)
        for size in range(1, min(self._longest, len(body) + 1)):
            if body[-size:] in self._heads:
                found.add(end - size + 1)
            if body[:size] in self._tails:
                found.add(start + size - 1)
        if 0 < len(body) < self._longest and _MARKED.search(body) and body in self._all:
            found.add(start + 1)
        return sorted(found)


class Shield:
    """What one rendering needs; `mark` is None until `protect` has found a control token spelled out.

    Args:
        hides: whether the tokenizer finds a control token in a text that does not spell it.
    """

    def __init__(self, spellings: Spellings, hides: Callable[[str], bool]) -> None:
        self._spellings, self._hides = spellings, hides
        self.mark: str | None = None

    def protect(self, value: Any) -> Any:
        """`value` with all spellings in its strings broken by the mark."""
        strings = list(_strings(value))
        if not any(self._spellings.cuts(text) or self._hides(text) for text in strings):
            return value
        used = set().union(*strings)
        self.mark = next((m for m in _MARKS if m not in used), None)
        if self.mark is None or used.intersection(_SEPARATORS):
            raise InvalidRequest("messages spell control tokens and hold Unicode noncharacters")
        return self._break(value, self.mark)

    def _break(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            places = [0, *self._spellings.cuts(value), len(value)]
            return mark.join(value[a:b] for a, b in pairwise(places)) if len(places) > 2 else value
        if isinstance(value, Mapping):
            return {self._break(k, mark): self._break(v, mark) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._break(v, mark) for v in value]
        return value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """One of `texts`, the longest that fits; matches nothing if there are none."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


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
