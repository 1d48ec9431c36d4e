"""The plain values that cross borders: what a client asks, what a step does, what comes back.

SamplingParams checks everything that can be checked without a model when it is built; the engine
checks the rest (`check_against`) at submit, so nothing bad reaches the step loop. Imports no JAX.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from jaxinfer.errors import InvalidRequest, check_range

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_TOKEN_LIST = 65536
MAX_BIAS = 100.0
GREEDY_TEMPERATURE = 1e-4
LOGPROB_FLOOR = -9999.0
BOOLEANS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-text id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the model's maximum length
    ABORT = "abort"
    ERROR = "error"  # the model yielded NaN, or the step failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. Names and defaults are those that vLLM users know.

    Order of the filters: repetition, presence and frequency penalties -> logit_bias ->
    allowed_token_ids and min_tokens masks -> [logprobs are taken here] -> temperature -> top_k -> top_p ->
    min_p -> draw. Temperatures below 1e-4 are greedy. A draw depends on (seed, output position) only.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Seq[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop: str | Seq[str] | None = None
    stop_token_ids: Seq[int] | None = None
    include_stop_str_in_output: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if self.best_of not in (None, 1):
            raise InvalidRequest(
                f"best_of={self.best_of!r} is not supported; use n and choose among the outputs"
            )
        self._check_types()
        check_range("n", self.n, 1, MAX_N)
        check_range("temperature", _number("temperature", self.temperature), 0.0, 1e4)
        if self.top_k == -1:
            set_(self, "top_k", 0)
        check_range("top_k", self.top_k, 0, 2**63 - 1, "0 or -1 switches it off")
        check_range("top_p", _number("top_p", self.top_p), 0.0, 1.0)
        check_range("min_p", _number("min_p", self.min_p), 0.0, 1.0)
        check_range(
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty),
            0.01,
            100.0,
        )
        check_range("presence_penalty", _number("presence_penalty", self.presence_penalty), -2, 2)
        check_range(
            "frequency_penalty", _number("frequency_penalty", self.frequency_penalty), -2, 2
        )
        check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; "
                    f"allowed range [0, {self.max_tokens}]"
                )
        if self.seed == -1:  # vLLM's way to say that none is given
            set_(self, "seed", None)
        if self.seed is not None:
            check_range("seed", self.seed, 0, 2**63 - 1, "-1 is the same as None")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        set_(self, "stop", _stop_strings(self.stop))
        set_(self, "stop_token_ids", _token_list("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_list("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequest("allowed_token_ids=[] allows nothing; give at least one id")
            set_(self, "allowed_token_ids", allowed)
        set_(self, "logit_bias", _bias(self.logit_bias))
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids instead")

    def _check_types(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            _check_int(name, getattr(self, name))
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name))
        for name in BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name}={getattr(self, name)!r} must be True or False")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # normalized in __post_init__

    def check_against(self, vocab_size: int) -> None:
        """Raise InvalidRequest for token ids that the model does not have."""
        lists = {
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": self.logit_bias or (),
        }
        for name, ids in lists.items():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"{name} has token id {token}, outside [0, {vocab_size - 1}]"
                    )


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name}={value!r} must be an integer")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(
            f"{name} is too large for a float; give a number below 1e308"
        ) from None


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name}={value!r:.60} must be a list")
    return tuple(value)


def _stop_strings(stop: str | Seq[str] | None) -> tuple[str, ...]:
    items = (stop,) if isinstance(stop, str) else _listed("stop", stop)
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(items)} strings; at most {MAX_STOP_STRINGS} are allowed"
        )
    for item in items:
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop={item!r:.60} must be a string of 1 to {MAX_STOP_CHARS} characters"
            )
    return items


def _token_list(name: str, ids: Seq[int] | None) -> tuple[int, ...]:
    items = _listed(name, ids)
    if len(items) > MAX_TOKEN_LIST:
        raise InvalidRequest(f"{name} has {len(items)} ids; at most {MAX_TOKEN_LIST} are allowed")
    for item in items:
        _check_int(name, item)
    return items


def _bias(bias: Mapping[int, float] | None) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias={bias!r:.60} must map token ids to numbers")
    if len(bias) > MAX_TOKEN_LIST:
        raise InvalidRequest(
            f"logit_bias has {len(bias)} entries; at most {MAX_TOKEN_LIST} are allowed"
        )
    out = {}
    for key, value in bias.items():
        try:
            token = int(key) if isinstance(key, str) else operator.index(key)
        except (TypeError, ValueError):
            raise InvalidRequest(f"logit_bias key {key!r} must be a token id") from None
        check_range(f"logit_bias[{token}]", _number("logit_bias", value), -MAX_BIAS, MAX_BIAS)
        out[token] = float(value)
    return out


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, resolved against the model: what the scheduler gets (n is expanded).

    Attributes:
        stop_ids: ids that end generation (end-of-text ids unless ignore_eos, and stop_token_ids).
        banned_ids: ids masked while fewer than min_tokens were generated.
        max_tokens: resolved bound on output tokens, at least 1 (0 only for pure prompt scoring).
        seed: resolved, in [0, 2**63).
        priority: lower runs first. deadline: absolute time (time.monotonic), or None.
        namespace: prefix-cache key parts (weights version, adapter, salt, rope length ...).
        group: requests of one group (n > 1) share their prompt's pages once the first has computed it.
        rope_length: fixes length-dependent rope (dynamic, longrope): the prompt length.
        breakpoints: prompt positions at which the application says that other prompts will part from this one;
            recurrent states are kept there (EngineConfig.checkpoint_policy).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    banned_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    priority: int = 0
    deadline: float | None = None
    arrival: float = 0.0
    namespace: tuple[object, ...] = ()
    use_prefix_cache: bool = True
    group: str | None = None
    rope_length: int = 0
    breakpoints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token and its rank (1 = most likely)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n outputs of a request, as vLLM users know it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the monotonic clock; None until the event happened."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """What a request has yielded so far: the whole of it once `finished`.

    All items of a stream share one prompt_token_ids: copy it before you change it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None


def clamp_logprob(value: float) -> float:
    """A finite log-probability that strict JSON can carry (floor: LOGPROB_FLOOR)."""
    return value if math.isfinite(value) and value > LOGPROB_FLOOR else LOGPROB_FLOOR
