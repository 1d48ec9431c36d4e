"""LLM: the offline API for scripts and notebooks. Names and results are those that vLLM users know.

    llm = LLM("smollm2-135m")
    outputs = llm.chat([{"role": "user", "content": "What is the capital of France?"}])

Drives an EngineCore in the calling thread. Not thread-safe; for streams and servers use Engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.config import engine_config
from jaxinfer.errors import InvalidRequest, JaxinferError, check_range
from jaxinfer.inputs import Prompt, default_sampling_params
from jaxinfer.loading import LoadedModel, load
from jaxinfer.loading import chat_template as make_template
from jaxinfer.outputs import RequestState
from jaxinfer.progress import Progress, console_progress
from jaxinfer.scheduler.inspection import MAX_NODES, CacheView
from jaxinfer.types import RequestOutput, SamplingParams

Params = SamplingParams | Seq[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """Log-likelihood of a text under the model.

    Attributes:
        token_ids: the scored tokens. logprobs: natural log-probability of each, given all before it
            (None for the first token of a text without a context). greedy: every scored token was the most likely one.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    total: float
    greedy: bool


class LLM:
    """A model with an engine.

    Args:
        model: a directory, a .gguf file, a Hub id or an alias ("smollm2-135m").
        chat_template: Jinja source that replaces the checkpoint's own.
        progress: show progress of loading, compiling and generating.
        options: any EngineConfig field, or vLLM's name for it.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        *,
        chat_template: str | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        config = engine_config(**options)
        self._progress: Progress = console_progress(progress)
        with self._progress:
            if not isinstance(model, LoadedModel):
                model = load(model, dtype=config.dtype, progress=self._progress.update)
            self.model = model
            self.core = model.core(config)
            if config.warmup == "eager":
                self.core.warm_up(lambda i, n: self._progress.update("compiling", i, n))
        self._inputs = model.inputs(self.core)
        template = model.template
        if chat_template is not None:
            template = make_template(chat_template, model.tokenizer)
        self._template = template
        self._ids = itertools.count()

    @property
    def tokenizer(self):
        return self.model.tokenizer

    def get_tokenizer(self):
        return self.model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the checkpoint's generation_config recommends."""
        return default_sampling_params(self.model.generation_config)

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: int | Seq[int] = 0,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, or dicts with `prompt` or `prompt_token_ids`, one or many.

        A dict may have `breakpoints`, see InputProcessor.prompt. What `prompt` and `chat_prompt` return is taken, too.

        Returns one finished RequestOutput a prompt, in order. Raises InvalidRequest (before anything
        runs) if any prompt or parameter is out of range, CapacityError if one can never fit.
        """
        items = _as_list(prompts)
        return self._run(
            [self._inputs.prompt(p) for p in items], sampling_params, use_tqdm, priority
        )

    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many (a list of lists).

        `continue_final_message` leaves the last message open, so that the model goes on with it; it needs
        add_generation_prompt=False, which would open a new one.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        prompts = [
            self.chat_prompt(
                m,
                add_generation_prompt,
                tools,
                chat_template_kwargs,
                continue_final_message=continue_final_message,
            )
            for m in (messages if many else [messages])
        ]
        return self._run(prompts, sampling_params, use_tqdm, 0)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.core.max_model_len

    def prompt(self, prompt: Any) -> Prompt:
        """Tokenize and check one prompt. Raises InvalidRequest."""
        return self._inputs.prompt(prompt)

    def chat_prompt(
        self,
        messages: Seq[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> Prompt:
        """Render messages through the chat template and tokenize the result without adding specials."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; send a raw prompt, or give a template with "
                "chat_template= (command line: --chat-template FILE)"
            )
        return self._inputs.chat(
            self._template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
        )

    def inspect(self, limit: int = 1000) -> CacheView:
        """The cache as it stands: kinds, hits, states in use, and at most `limit` nodes of the prefix tree."""
        check_range("limit", limit, 1, MAX_NODES)
        return self.core.scheduler.inspect(limit)

    def score(self, prompts: Any, continuations: Any = None) -> list[ScoreOutput]:
        """Log-likelihood of each prompt, or of each continuation given its prompt. Samples nothing.

        Raises JaxinferError if a prompt could not be scored: a step failed, or the logits are NaN.
        """
        heads = [self._inputs.prompt(p) for p in _as_list(prompts)]
        if continuations is None:
            fulls, starts = heads, [0] * len(heads)
        else:
            tails = [
                self._inputs.prompt(c, add_special_tokens=False) for c in _as_list(continuations)
            ]
            if len(tails) != len(heads):
                raise InvalidRequest(
                    f"continuations has {len(tails)} entries for {len(heads)} prompts; give one for each"
                )
            pairs = zip(heads, tails, strict=True)
            fulls = [self._inputs.prompt([*h.token_ids, *t.token_ids]) for h, t in pairs]
            starts = [len(h.token_ids) for h in heads]
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0, detokenize=False)
        outputs = self._run(fulls, params, False, 0)
        return [_score(o, start) for o, start in zip(outputs, starts, strict=True)]

    def _run(
        self, prompts: list[Prompt], params: Params, show: bool, priority: int | Seq[int]
    ) -> list[RequestOutput]:
        chosen = self._params_for(len(prompts), params)
        priorities = [priority] * len(prompts) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(prompts):
            raise InvalidRequest(
                f"priority has {len(priorities)} entries for {len(prompts)} prompts"
            )
        states = []
        for prompt, one, rank in zip(prompts, chosen, priorities, strict=True):
            name = str(next(self._ids))
            requests = self._inputs.requests(name, prompt, one, priority=rank)
            for request in requests:
                self.core.scheduler.check_fits(request)
            states.append(RequestState(name, prompt, requests, self.model.tokenizer))
        try:
            self._drive(states, show)
        except BaseException:
            self.core.reset()  # an error or Ctrl-C may have cut a round in the middle
            raise
        return [state.output() for state in states]

    def _drive(self, states: list[RequestState], show: bool) -> None:
        owners = {r.request_id: s for s in states for r in s.requests}
        for state in states:
            for request in state.requests:
                self.core.submit(request)
        done = 0
        with self._progress if show else console_progress(False) as progress:
            while self.core.has_work():
                for update in self.core.step():
                    state = owners[update.sequence.request.request_id]
                    stopped = state.apply(update)
                    if stopped is not None:
                        self.core.finish(stopped)
                    done += state.finished and (update.finish_reason or stopped) is not None
                progress.update("generating", done, len(states))

    def _params_for(self, count: int, params: Params) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, (list, tuple)):
            raise InvalidRequest(
                f"sampling_params={params!r:.60} must be SamplingParams, or a list with one for each prompt"
            )
        if len(params) != count:
            raise InvalidRequest(f"sampling_params has {len(params)} entries for {count} prompts")
        return list(params)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many -> many. A flat list or array of ints is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping, Prompt)):
        return [prompts]
    if isinstance(prompts, (list, tuple)):
        if prompts and all(isinstance(p, (int, np.integer)) for p in prompts):
            return [prompts]
        return list(prompts)
    if isinstance(prompts, np.ndarray) and prompts.ndim:
        return [prompts] if prompts.ndim == 1 else list(prompts)
    raise InvalidRequest(
        f"prompts={prompts!r:.60} must be text, token ids, a dict, or a list of those"
    )


def _score(output: RequestOutput, start: int) -> ScoreOutput:
    if output.prompt_logprobs is None:
        raise JaxinferError(f"request {output.request_id} could not be scored: {output.error}")
    ids, entries = output.prompt_token_ids[start:], output.prompt_logprobs[start:]
    found = [None if e is None else e[t] for t, e in zip(ids, entries, strict=True)]
    return ScoreOutput(
        token_ids=ids,
        logprobs=[None if f is None else f.logprob for f in found],
        total=sum(f.logprob for f in found if f is not None),
        greedy=all(f is None or f.rank == 1 for f in found),
    )
