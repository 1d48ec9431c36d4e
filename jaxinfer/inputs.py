"""From what a client sends to Requests: tokenizes, checks against the model, resolves defaults.

Everything that can be wrong with a request is found here, before it reaches the scheduler.
Called by LLM and Engine; knows no devices.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from jaxinfer.errors import InvalidRequest
from jaxinfer.model_config import ModelConfig
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import Request, SamplingParams

SEED_RANGE = 2**63


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt: token ids, and the text that they came from (None for ids)."""

    text: str | None
    token_ids: tuple[int, ...]


class InputProcessor:
    """Makes Requests for one model.

    Args:
        model: its ModelConfig. tokenizer: None if the checkpoint has none (then only token ids are accepted).
        max_model_len: longest prompt + output, in tokens. engine_seed: base of seeds not given.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        max_model_len: int,
        engine_seed: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._max_model_len = max_model_len
        self._engine_seed = engine_seed
        self._count = itertools.count(1)  # event loops share it; next() is atomic

    def prompt(self, prompt: Any, add_special_tokens: bool = True) -> Prompt:
        """Read a prompt: text, a list of token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.

        A Prompt that this has returned comes back as it is.
        """
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, Mapping):
            prompt = self._from_mapping(prompt)
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequest(
                    "prompt is text, but the model has no tokenizer; send prompt_token_ids"
                )
            ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return Prompt(prompt, self._checked_ids(ids))
        if isinstance(prompt, (list, tuple)):
            return Prompt(None, self._checked_ids(prompt))
        raise InvalidRequest(
            f"prompt={prompt!r:.60} must be text, a list of token ids, or a dict with prompt or prompt_token_ids"
        )

    def _from_mapping(self, prompt: Mapping[str, Any]) -> Any:
        known = {"prompt", "prompt_token_ids"}
        if unknown := sorted(set(prompt) - known):
            raise InvalidRequest(f"prompt has unknown keys {unknown}; allowed: {sorted(known)}")
        for key in ("prompt_token_ids", "prompt"):
            if prompt.get(key) is not None:
                return prompt[key]
        raise InvalidRequest("prompt has neither prompt nor prompt_token_ids")

    def _checked_ids(self, ids: Seq[int]) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest("prompt is empty; give at least one token")
        if len(ids) > self._max_model_len:
            raise InvalidRequest(
                f"prompt has {len(ids)} tokens; allowed range [1, {self._max_model_len}] (max_model_len)"
            )
        vocab = self._model.vocab_size
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise InvalidRequest(
                    f"prompt_token_ids[{i}]={token!r} is not a token id in [0, {vocab - 1}]"
                )
        return tuple(ids)

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


def _check_options(priority: object, timeout: object, cache_salt: object) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequest(f"priority={priority!r} must be an integer (lower runs first)")
    seconds = timeout if isinstance(timeout, (int, float)) else 0
    if timeout is not None and (isinstance(timeout, bool) or not seconds > 0):
        raise InvalidRequest(f"timeout={timeout!r} must be a positive number of seconds")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequest(f"cache_salt={cache_salt!r:.60} must be a string")


def _derived_seed(seed: int, index: int) -> int:
    """An unrelated seed for (seed, index): the first 63 bits of their hash."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % SEED_RANGE
