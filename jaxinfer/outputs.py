"""From the core's updates to RequestOutputs: text, stop strings, log-probabilities, finish reasons.

One RequestState per client request, holding its n outputs. Runs on the consumer's side of the
engine, so that detokenization never delays a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxinfer.inputs import Prompt
from jaxinfer.scheduler.plan import Score
from jaxinfer.scheduler.sequence import Update
from jaxinfer.text.output import OutputText
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    clamp_logprob,
)


class RequestState:
    """Collects what a request yields.

    Args:
        requests: the expanded Requests, index i giving output i.
        tokenizer: None when the model has none (then texts stay empty).
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        requests: Seq[Request],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self._prompt_ids = list(prompt.token_ids)  # one list for all snapshots
        self.requests = list(requests)
        self.params: SamplingParams = requests[0].params
        self._tokenizer = tokenizer
        self._index = {request.request_id: i for i, request in enumerate(requests)}
        self.outputs = [CompletionOutput(i) for i in range(len(requests))]
        self._texts: list[OutputText | None] = [None] * len(requests)
        if tokenizer is not None and self.params.detokenize:
            ids = prompt.token_ids
            self._texts = [OutputText(tokenizer, self.params, ids) for _ in requests]
        if self.params.logprobs is not None:
            for output in self.outputs:
                output.logprobs, output.cumulative_logprob = [], 0.0
        wants_prompt = self.params.prompt_logprobs is not None
        self._prompt_scores: list[Score | None] | None = [None] if wants_prompt else None
        self._told = [_Told() for _ in requests]
        self._told_prompt = False
        self.cached_tokens = 0
        self.metrics = RequestMetrics(arrival_time=requests[0].arrival)
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def unfinished_ids(self) -> list[str]:
        """Ids of the Requests that still run."""
        return [
            r.request_id
            for r, o in zip(self.requests, self.outputs, strict=True)
            if o.finish_reason is None
        ]

    def apply(self, update: Update) -> str | None:
        """Take one update. Returns a Request id that the engine must finish: its stop string was found."""
        index = self._index[update.sequence.request.request_id]
        output = self.outputs[index]
        if output.finish_reason is not None:
            return None  # a token that was in flight when a stop string ended the output
        self._stamp(index, update)
        if update.prompt_scores is not None and self._prompt_scores is not None and index == 0:
            self._prompt_scores.extend(update.prompt_scores)
        if update.token is not None:
            stopped = self._take_token(index, update)
            if stopped:
                self._finish(index, FinishReason.STOP)
                return update.sequence.request.request_id
        if update.finish_reason is not None:
            self._finish(index, update.finish_reason)
        return None

    def _stamp(self, index: int, update: Update) -> None:
        sequence, metrics = update.sequence, self.metrics
        if index == 0:  # the others find in the cache what the first one has computed
            self.cached_tokens = sequence.cached_tokens or 0
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = sequence.metrics.first_scheduled_time
        if metrics.first_token_time is None and update.token is not None:
            metrics.first_token_time = sequence.metrics.first_token_time

    def _take_token(self, index: int, update: Update) -> bool:
        """Append a token; True if it completed a stop string."""
        output, text, token = self.outputs[index], self._texts[index], update.token
        assert token is not None
        output.token_ids.append(token)
        if output.logprobs is not None and update.score is not None:
            entry = self._entry(token, update.score, self.params.logprobs or 0)
            output.logprobs.append(entry)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry[token].logprob
        is_stop = update.finish_reason == FinishReason.STOP
        if is_stop:
            eos = token not in (self.params.stop_token_ids or ())
            output.stop_reason = None if eos else token
        if text is None:
            return False
        delta = text.push([token], final_stop_token=is_stop)
        output.text += delta.text
        if delta.stop is None:
            return False
        output.stop_reason = delta.stop
        return True

    def _finish(self, index: int, reason: FinishReason) -> None:
        output, text = self.outputs[index], self._texts[index]
        if text is not None:
            rest = text.finish()
            output.text += rest.text
            if rest.stop is not None and reason is FinishReason.LENGTH:  # in the last, held text
                output.stop_reason, reason = rest.stop, FinishReason.STOP
        output.finish_reason = str(reason)
        if reason is FinishReason.ERROR:
            self.error = "the model yielded logits that are not finite, or its step failed"
        if self.finished:
            self.metrics.finished_time = time.monotonic()

    def _entry(self, token: int, score: Score, count: int) -> dict[int, Logprob]:
        """The chosen token first, then the `count` most likely ones."""
        logprob, rank, ids, top = score
        entry = {token: self._logprob(token, logprob, rank)}
        for place in range(count):
            candidate = int(ids[place])
            if candidate >= 0 and candidate not in entry:
                entry[candidate] = self._logprob(candidate, float(top[place]), place + 1)
        return entry

    def _logprob(self, token: int, logprob: float, rank: int) -> Logprob:
        text = self._tokenizer.token_text(token) if self._tokenizer else None
        return Logprob(clamp_logprob(logprob), int(rank), text)

    def output(self) -> RequestOutput:
        """A snapshot: later updates do not change it. All of a request's share prompt_token_ids.

        prompt_logprobs is None until all of them are there.
        """
        return self._output([_copy(output) for output in self.outputs], self._prompt_logprobs())

    def delta(self) -> RequestOutput:
        """What came since the last call: outputs that have anything new, with the new part only.

        cumulative_logprob is that of the whole output. prompt_logprobs is told once.
        """
        news = (told.news(output) for told, output in zip(self._told, self.outputs, strict=True))
        outputs = [output for output in news if output is not None]
        prompt_logprobs = None if self._told_prompt else self._prompt_logprobs()
        self._told_prompt |= prompt_logprobs is not None
        return self._output(outputs, prompt_logprobs)

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        scores, ids = self._prompt_scores, self._prompt_ids
        if scores is None or len(scores) != len(ids):
            return None
        count = self.params.prompt_logprobs or 0
        return [None if s is None else self._entry(ids[i], s, count) for i, s in enumerate(scores)]

    def _output(
        self,
        outputs: list[CompletionOutput],
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self._prompt_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.cached_tokens,
            metrics=_copy_metrics(self.metrics),
            error=self.error,
        )


@dataclass(slots=True)
class _Told:
    """How much of one output `delta` has handed out."""

    chars: int = 0
    tokens: int = 0
    finished: bool = False

    def news(self, output: CompletionOutput) -> CompletionOutput | None:
        chars, tokens = self.chars, self.tokens
        self.chars, self.tokens = len(output.text), len(output.token_ids)
        ended = output.finish_reason is not None and not self.finished
        self.finished |= ended
        if not ended and (chars, tokens) == (self.chars, self.tokens):
            return None
        return _copy(output, chars, tokens)


def _copy(output: CompletionOutput, chars: int = 0, tokens: int = 0) -> CompletionOutput:
    """What follows the first `chars` characters and `tokens` tokens. (dataclasses.replace is slow.)"""
    return CompletionOutput(
        index=output.index,
        text=output.text[chars:],
        token_ids=output.token_ids[tokens:],
        cumulative_logprob=output.cumulative_logprob,
        logprobs=None if output.logprobs is None else output.logprobs[tokens:],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _copy_metrics(metrics: RequestMetrics) -> RequestMetrics:
    return RequestMetrics(
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    )
