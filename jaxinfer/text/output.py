"""The text of one output sequence: detokenizer and stop strings together.

The engine pushes new token ids and gets the text that is certain and the stop string that was hit.
Never decides about stop ids: the engine says which token was one. Called by outputs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.stops import StopChecker
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import SamplingParams


class TextDelta(NamedTuple):
    """What a push yielded.

    Attributes:
        text: new text that no later token can change.
        stop: the stop string that was hit, or None.
    """

    text: str
    stop: str | None


class OutputText:
    """One output sequence of a request.

    Args:
        tokenizer: of the model.
        params: detokenize, stop, include_stop_str_in_output, skip_special_tokens, min_tokens.
        prompt_ids: the prompt that the output continues.
    """

    __slots__ = ("_checker", "_detokenizer", "_params", "_seen", "_stop", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._detokenizer = (
            Detokenizer(tokenizer, params.skip_special_tokens, prompt_ids)
            if params.detokenize
            else None
        )
        self._checker = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._seen = 0  # tokens checked for stop strings
        self._stop: str | None = None

    def push(self, token_ids: Sequence[int], final_stop_token: bool = False) -> TextDelta:
        """Add tokens; `final_stop_token` says that the last one is an end-of-text or stop id.

        Such a token yields text only with include_stop_str_in_output. After a
        stop string was hit nothing more is added.
        """
        if self._stop is not None:
            return TextDelta("", self._stop)
        if self._detokenizer is None:
            return TextDelta("", None)
        if not self._params.stop_strings:
            return self._push_unchecked(token_ids, final_stop_token)
        texts = []
        for i, token in enumerate(token_ids):
            drop = final_stop_token and i == len(token_ids) - 1 and not self._includes_stop
            texts.append(self._push_one(token, drop))
            if self._stop is not None:
                break
        return TextDelta("".join(texts), self._stop)

    def finish(self) -> TextDelta:
        """The end of the output (length, stop id or abort): releases all held text."""
        if self._stop is not None or self._detokenizer is None:
            return TextDelta("", self._stop)
        text, self._stop = self._checker.push(self._detokenizer.finish())
        return TextDelta(text + self._checker.flush(), self._stop)

    @property
    def _includes_stop(self) -> bool:
        return self._params.include_stop_str_in_output

    def _push_unchecked(self, token_ids: Sequence[int], final_stop_token: bool) -> TextDelta:
        assert self._detokenizer is not None
        if final_stop_token and not self._includes_stop:
            token_ids = token_ids[:-1]
        return TextDelta(self._detokenizer.push(token_ids), None)

    def _push_one(self, token: int, drop: bool) -> str:
        assert self._detokenizer is not None
        self._seen += 1
        hidden = drop or (self._params.skip_special_tokens and self._tokenizer.is_special(token))
        if self._seen <= self._params.min_tokens:  # text of the first min_tokens never stops
            return "" if drop else self._detokenizer.push((token,))
        if hidden:
            text, self._stop = self._checker.push_hidden(self._tokenizer.token_text(token))
        else:
            text, self._stop = self._checker.push(self._detokenizer.push((token,)))
        return text
