"""Token ids to text as they arrive, with whole characters only.

A table gives the bytes of each token and an incremental UTF-8 decoder joins them, so a token costs
O(1) and any chunking yields the same text. Never emits U+FFFD for a character that may still be
completed. Used by text.output for streams and by Tokenizer.decode for whole texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

_MAX_PENDING_BYTES = 3  # an unfinished UTF-8 character has at most three bytes


class Detokenizer:
    """The text of one output sequence: decode(prompt + output) without decode(prompt).

    Args:
        tokenizer: supplies the bytes of each token.
        skip_special_tokens: special tokens yield no text.
        prompt_ids: what the output continues; decides about the leading space, and may end within a
            character that the output completes.
    """

    __slots__ = ("_at_start", "_hidden", "_owed", "_tokenizer", "_utf8")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = tokenizer.utf8_decoder()
        self._at_start = True
        self._owed = ""
        self._continue_prompt(prompt_ids)

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` complete; "" while the character is unfinished."""
        if self._at_start:
            return self._push_first(ids)
        pieces, hidden = self._tokenizer.pieces, self._hidden
        data = b"".join([pieces[token] for token in ids if token not in hidden])
        return self._emit(self._utf8.decode(data))

    def finish(self) -> str:
        """The rest: one mark for each broken character that was still pending."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _push_first(self, ids: Sequence[int]) -> str:
        for i, token in enumerate(ids):
            if self._is_visible(token):
                self._at_start = False
                text = self._utf8.decode(self._tokenizer.first_piece(token))
                return text + self.push(ids[i + 1 :])
        return ""

    def _is_visible(self, token: int) -> bool:
        return token not in self._hidden and self._tokenizer.id_to_token(token) is not None

    def _continue_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Take over the prompt's unfinished character, which its last bytes determine."""
        tail = b""
        for token in reversed(prompt_ids):
            if self._is_visible(token):
                self._at_start = False
                tail = self._tokenizer.pieces[token] + tail
                if len(tail) >= _MAX_PENDING_BYTES:
                    break
        self._utf8.decode(tail)
        pending = self._utf8.getstate()[0]
        # The prompt's own text already shows these bytes as marks, should they stay broken.
        self._owed = pending.decode(errors=self._utf8.errors) if pending else ""

    def _emit(self, text: str) -> str:
        if self._owed and text:
            text = text.removeprefix(self._owed)
            self._owed = ""
        return text
