"""From what a client sends to Requests: tokenizes, checks against the model, resolves defaults.

Everything that can be wrong with a request is found here, before it reaches the scheduler.
Called by LLM and Engine; knows no devices.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.errors import InvalidRequest
from jaxinfer.model_config import ModelConfig
from jaxinfer.text.chat import RESERVED, ChatTemplate
from jaxinfer.text.guard import SpecialGuard
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import Request, SamplingParams

SEED_RANGE = 2**63
MAX_BREAKPOINTS = 64  # in one prompt
MAX_TIMEOUT = 1e9  # seconds: past it a clock's float loses the fraction


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt: token ids, the text that they came from (None for ids), and Request.breakpoints."""

    text: str | None
    token_ids: tuple[int, ...]
    breakpoints: tuple[int, ...] = ()

    def with_breakpoints(self, positions: Any) -> Prompt:
        """The same prompt with these breakpoints: numbers of tokens from its start. Raises InvalidRequest."""
        return replace(self, breakpoints=_checked_breakpoints(positions, len(self.token_ids)))


class InputProcessor:
    """Makes Requests for one model.

    Args:
        model: its ModelConfig. tokenizer: None if the checkpoint has none (then only token ids are accepted).
        max_model_len: longest prompt + output, in tokens. engine_seed: base of seeds not given.
        no_tokenizer: what a text prompt is told where there is no tokenizer.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        max_model_len: int,
        engine_seed: int,
        no_tokenizer: str = "the model has no tokenizer; send prompt_token_ids",
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._max_model_len = max_model_len
        self._engine_seed = engine_seed
        self._no_tokenizer = no_tokenizer
        self._guard: SpecialGuard | None = None
        self._count = itertools.count(1)  # event loops share it; next() is atomic

    def prompt(self, prompt: Any, add_special_tokens: bool = True) -> Prompt:
        """Read a prompt: text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.

        Token ids are a list, a tuple or a numpy array of integers. A dict may have "breakpoints": numbers of
        tokens from the start after which other prompts will go on differently. A Prompt that this has returned
        comes back as it is.
        """
        if isinstance(prompt, Prompt):
            return prompt
        name, wanted = (
            "prompt",
            "text, a list of token ids, or a dict with prompt or prompt_token_ids",
        )
        text_allowed = True
        if isinstance(prompt, Mapping):
            if (positions := prompt.get("breakpoints")) is not None:
                rest = {key: value for key, value in prompt.items() if key != "breakpoints"}
                return self.prompt(rest, add_special_tokens).with_breakpoints(positions)
            key, prompt = self._from_mapping(prompt)
            text_allowed = key == "prompt"
            name = f'prompt["{key}"]'
            wanted = "text or a list of token ids" if text_allowed else "a list of token ids"
        if isinstance(prompt, str) and text_allowed:
            if self._tokenizer is None:
                raise InvalidRequest(f"{name} is text, but {self._no_tokenizer}")
            ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return Prompt(prompt, self._checked_ids(ids))
        if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
            prompt = prompt.tolist()
        if isinstance(prompt, (list, tuple)):
            return Prompt(None, self._checked_ids(prompt))
        raise InvalidRequest(f"{name}={prompt!r:.60} must be {wanted}")

    def chat(
        self,
        template: ChatTemplate,
        messages: Any,
        *,
        tools: Any = None,
        add_special_tokens: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> Prompt:
        """Messages through a chat template, tokenized; the result's text is the rendered one.

        Templates spell their special tokens, so none are added. Those that a client spells in its
        messages, tools or template_kwargs stay text. `keep`: so many tokens at the end are kept (-1:
        max_model_len; None: all).
        """
        if self._tokenizer is None:
            raise InvalidRequest(f"messages are text, but {self._no_tokenizer}")
        more = dict(template_kwargs or {})
        if bad := sorted({*RESERVED, "continue_final_message"}.intersection(more)):
            raise InvalidRequest(f"chat_template_kwargs may not set {bad}; they are arguments")
        if self._guard is None:
            self._guard = SpecialGuard(self._tokenizer)
        text, ids = self._guard.render(
            template.render,
            messages,
            add_special_tokens=add_special_tokens,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **more,
        )
        if keep is not None:
            ids = ids[-(self._max_model_len if keep == -1 else keep) :]
        return Prompt(text, self._checked_ids(ids))

    def _from_mapping(self, prompt: Mapping[str, Any]) -> tuple[str, Any]:
        known = {"prompt", "prompt_token_ids", "breakpoints"}
        if unknown := sorted(set(prompt) - known):
            raise InvalidRequest(f"prompt has unknown keys {unknown}; allowed: {sorted(known)}")
        for key in ("prompt_token_ids", "prompt"):
            if prompt.get(key) is not None:
                return key, prompt[key]
        raise InvalidRequest("prompt has neither prompt nor prompt_token_ids")

    def _checked_ids(self, ids: Seq[int]) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest("prompt is empty; give at least one token")
        if len(ids) > self._max_model_len:
            raise InvalidRequest(
                f"prompt has {len(ids)} tokens; allowed range [1, {self._max_model_len}] (max_model_len)"
            )
        vocab = self._model.vocab_size
        checked = []
        for i, token in enumerate(ids):
            try:
                value = -1 if isinstance(token, bool) else operator.index(token)
            except TypeError:
                value = -1
            if not 0 <= value < vocab:
                raise InvalidRequest(
                    f"prompt_token_ids[{i}]={token!r:.60} is not a token id in [0, {vocab - 1}]"
                )
            checked.append(value)
        return tuple(checked)

    def requests(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        use_prefix_cache: bool = True,
    ) -> list[Request]:
        """One Request for each of the n outputs; ids are `request_id` plus "/index" when n > 1."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params={params!r:.60} must be SamplingParams")
        params.check_against(self._model.vocab_size)
        self._check_masks(params)
        _check_options(priority, timeout, cache_salt)
        max_tokens = self._max_tokens(len(prompt.token_ids), params)
        now = time.monotonic()
        stops = frozenset(params.stop_token_ids or ())
        eos = frozenset() if params.ignore_eos else self._eos_ids
        seed = self._seed(params)
        namespace: tuple[object, ...] = (cache_salt or "",)
        if self._model.length_dependent_rope:
            namespace += (self._model.rope_key(len(prompt.token_ids)),)
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}/{i}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                stop_ids=stops | eos,
                banned_ids=tuple(sorted(stops | self._eos_ids)) if params.min_tokens else (),
                max_tokens=max_tokens,
                seed=seed if i == 0 else _derived_seed(seed, i),
                priority=priority,
                deadline=None if timeout is None else now + timeout,
                arrival=now,
                namespace=namespace,
                use_prefix_cache=use_prefix_cache,
                group=request_id if params.n > 1 else None,
                rope_length=len(prompt.token_ids),
                breakpoints=prompt.breakpoints,
            )
            for i in range(params.n)
        ]

    def _check_masks(self, params: SamplingParams) -> None:
        """min_tokens bans what would stop the output; something must be left to draw."""
        allowed = params.allowed_token_ids
        banned = self._eos_ids | frozenset(params.stop_token_ids or ())
        if params.min_tokens and allowed is not None and banned.issuperset(allowed):
            raise InvalidRequest(
                f"min_tokens={params.min_tokens} bans every id of allowed_token_ids={list(allowed)!r:.60}: "
                "all of them stop the output; allow another id or set min_tokens=0"
            )

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        room = self._max_model_len - prompt_tokens
        if params.max_tokens is None:
            if room < 1:
                raise InvalidRequest(
                    f"prompt has {prompt_tokens} tokens, which leaves no room for output; "
                    f"allowed range [1, {self._max_model_len - 1}]"
                )
            return room
        if params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens={params.max_tokens} and a prompt of {prompt_tokens} tokens exceed "
                f"max_model_len={self._max_model_len}; allowed range [0, {max(room, 0)}]"
            )
        return params.max_tokens

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return _derived_seed(self._engine_seed, next(self._count))


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """What a generation_config.json recommends, on top of our defaults."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {n: generation_config[n] for n in names if generation_config.get(n) is not None}
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return replace(SamplingParams(), **found)


def _checked_breakpoints(positions: Any, length: int) -> tuple[int, ...]:
    """Sorted, each once; they lie in a prompt of `length` tokens."""
    if isinstance(positions, np.ndarray):
        positions = positions.tolist()
    if not isinstance(positions, (list, tuple)):
        raise InvalidRequest(f"breakpoints={positions!r:.60} must be a list of token positions")
    if len(positions) > MAX_BREAKPOINTS:
        raise InvalidRequest(
            f"breakpoints has {len(positions)} positions; at most {MAX_BREAKPOINTS} are allowed"
        )
    for i, position in enumerate(positions):
        whole = isinstance(position, (int, np.integer)) and not isinstance(position, bool)
        if not whole or not 1 <= position <= length:
            raise InvalidRequest(
                f"breakpoints[{i}]={position!r:.60} must be an integer in [1, {length}]: it counts "
                "tokens from the prompt's start"
            )
    return tuple(sorted({int(position) for position in positions}))


def _check_options(priority: object, timeout: object, cache_salt: object) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequest(f"priority={priority!r} must be an integer (lower runs first)")
    seconds = 0 if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) else timeout
    if timeout is not None and not 0 < seconds <= MAX_TIMEOUT:
        raise InvalidRequest(
            f"timeout={timeout!r:.60} must be a positive number of seconds, at most {MAX_TIMEOUT:g}, or None"
        )
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequest(f"cache_salt={cache_salt!r:.60} must be a string")


def _derived_seed(seed: int, index: int) -> int:
    """An unrelated seed for (seed, index): the first 63 bits of their hash."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % SEED_RANGE
