"""Service: one model behind all faces. Phases, admission, prompts, generation, records.

gRPC, OpenAI and KServe translate their messages and call this; none of them touches the engine.
Work on text runs in threads, so that no request delays another's tokens. Never parses a wire format.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from enum import StrEnum
from typing import Any

from jaxinfer.engine import Engine
from jaxinfer.errors import InvalidRequest, JaxinferError, Overloaded, Unavailable
from jaxinfer.inputs import Prompt
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import RequestOutput, SamplingParams
from serving.calls import Call, Record
from serving.config import ServerConfig
from serving.errors import BadField, NotFound, Precondition, Wire, wire

MAX_TOKEN_CHARS = 256  # more characters a token than this: surely too long, whatever the tokenizer
LONG_TEXT = 1 << 17  # characters; reading them takes so long that short texts go another way


class Phase(StrEnum):
    STARTING = "starting"  # loading or compiling
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    STOPPED = "stopped"
    STALLED = "stalled"  # the engine loop stands still (the watchdog saw it)


class Service:
    """The engine and what the faces share. Lives in one event loop.

    Args:
        config: of the server. engine: None until `attach`: faces may listen while the model loads.
    """

    def __init__(self, config: ServerConfig, engine: Engine | None = None) -> None:
        self.config = config
        self.started = time.time()
        self.phase = Phase.STARTING
        self.on_phase: list[Callable[[Phase], None]] = []
        self.on_finish: list[Callable[[Record], None]] = []  # once for each Call that was admitted
        self.on_reject: list[Callable[[Wire], None]] = []  # once for each that was not
        self.running: dict[str, Record] = {}
        self.arriving_bytes = 0  # of HTTP bodies that are being read
        self.last_receive = 0.0  # time.time() of the last Call
        self.kv_hub: Any = None  # KvEventHub; None: KV events are off
        self.metrics: Any = None  # Metrics; None in tests of one face
        self.profiler: Any = None  # Profiler; None: profiling is off
        self._engine = engine
        self._template: ChatTemplate | None = None
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="jaxinfer-text")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="jaxinfer-long-text")
        self._ids = itertools.count()
        self._prefix = uuid.uuid4().hex[:12]
        if engine is not None:
            self.attach(engine)

    # --- life -----------------------------------------------------------------------------------

    def attach(self, engine: Engine) -> None:
        """The engine is ready: take requests."""
        from jaxinfer.loading import chat_template

        self._engine = engine
        source = self.config.chat_template
        loaded = engine.model
        self._template = (
            loaded.template if source is None else chat_template(source, loaded.tokenizer)
        )
        self.set_phase(Phase.READY)

    def set_phase(self, phase: Phase) -> None:
        """Enter a phase and tell who wants to know (health services)."""
        if phase is not self.phase:
            self.phase = phase
            for observe in self.on_phase:
                observe(phase)

    @property
    def engine(self) -> Engine:
        """The engine. Raises Unavailable while the model loads."""
        if self._engine is None:
            raise Unavailable("the model is loading; try again when /ready answers 200")
        return self._engine

    @property
    def loaded(self) -> bool:
        return self._engine is not None

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY

    async def drain(self) -> bool:
        """Refuse new calls, let running ones finish (shutdown_timeout); True if all did."""
        self.set_phase(Phase.DRAINING)
        return self._engine is None or await self._engine.drain(self.config.shutdown_timeout)

    def close(self) -> None:
        """Stop the engine thread; streams that still run end with "abort"."""
        self.set_phase(Phase.STOPPED)
        if self._engine is not None:
            self._engine.close()
        for pool in (self._threads, self._long_texts):
            pool.shutdown(wait=False, cancel_futures=True)

    # --- model ----------------------------------------------------------------------------------

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first is the one that is reported."""
        if self.config.served_model_name:
            return self.config.served_model_name
        return (self._engine.model.name,) if self._engine else (self.config.model,)

    def check_model(self, name: str | None) -> str:
        """The name to report for a requested one (None: the default). Raises NotFound."""
        if name is None or name == "":
            return self.model_names[0]
        if name not in self.model_names:
            raise NotFound(
                f"model={name!r:.100} does not exist; this server has {', '.join(self.model_names)}"
            )
        return name

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.model.tokenizer is None:
            raise Precondition("the model has no tokenizer; send token ids")
        return self.engine.model.tokenizer

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            self.engine  # noqa: B018  # says that it is loading
            raise InvalidRequest(
                "the model has no chat template; start the server with --chat-template FILE, or "
                "use /v1/completions"
            )
        return self._template

    # --- prompts --------------------------------------------------------------------------------

    async def in_thread[T](self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run CPU work beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def prompt(self, value: Any, add_special_tokens: bool = True) -> Prompt:
        """A checked prompt from text, token ids or a mapping (see InputProcessor.prompt)."""
        if isinstance(value, str):
            self.check_length("prompt", len(value))
        read = self.engine.inputs.prompt
        if isinstance(value, str) and len(value) > LONG_TEXT:  # the short ones don't wait for it
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._long_texts, read, value, add_special_tokens)
        return await self.in_thread(read, value, add_special_tokens)

    async def chat_prompt(
        self,
        messages: Any,
        tools: Any = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> Prompt:
        """Messages through the chat template, tokenized (see InputProcessor.chat)."""
        return await self.in_thread(
            self.engine.inputs.chat,
            self.template,
            messages,
            tools=tools,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            keep=keep,
        )

    def check_length(self, field: str, characters: int) -> None:
        """Refuse at once what no tokenizer makes short enough. Raises BadField."""
        longest = self.engine.core.max_model_len * MAX_TOKEN_CHARS
        if characters > longest:
            raise BadField(
                field, f"{field} has {characters} characters; at most {longest} are allowed"
            )

    # --- generation -----------------------------------------------------------------------------

    def new_id(self, prefix: str = "req") -> str:
        """A request id that nobody else has."""
        return f"{prefix}-{self._prefix}{next(self._ids):08x}"

    async def generate(self, call: Call) -> AsyncGenerator[RequestOutput]:
        """Run a call; yields deltas (RequestState.delta), the last one is `finished`.

        Close the iterator (aclosing) to abort. Raises InvalidRequest, CapacityError, Overloaded or
        Unavailable before the first item; a request that fails later ends with finish_reason "error".
        """
        try:
            self._admit(call)
        except JaxinferError as error:
            self.reject(error)
            raise
        record = self.running[call.request_id] = Record(
            call, call.arrival, len(call.prompt.token_ids)
        )
        try:
            async with aclosing(self._start(call)) as outputs:
                async for output in outputs:
                    record.take(output)
                    record.handed = time.monotonic()
                    yield output
                    record.handed = None
            record.finished = time.monotonic()
        except JaxinferError as error:  # refused by the engine: nothing has run
            self.reject(error)
            raise
        except (GeneratorExit, asyncio.CancelledError):  # the client left
            record.finished = time.monotonic()
            raise
        except Exception:  # a fault of ours: it counts, or its tokens would vanish from the metrics
            record.reason, record.finished = "error", time.monotonic()
            raise
        finally:
            del self.running[call.request_id]
            if record.finished is not None:
                for observe in self.on_finish:
                    observe(record)

    def _admit(self, call: Call) -> None:
        """Raise unless the call may start now."""
        if self.phase in (Phase.DRAINING, Phase.STOPPED):
            raise Unavailable("the server is shutting down and takes no new requests")
        if self.phase is Phase.STALLED:
            raise Unavailable("the engine stands still; try again when /ready answers 200")
        self.last_receive = time.time()
        limits = self.config.limits
        if len(call.request_id) > limits.request_id_chars:
            raise BadField(
                "request_id",
                f"request_id has {len(call.request_id)} characters; at most "
                f"{limits.request_id_chars} are allowed",
            )
        if call.request_id in self.running:
            raise BadField(
                "request_id", f"request_id={call.request_id!r} is already running; choose another"
            )
        self._check_params(call.params)
        requests, tokens = self.waiting()
        if requests >= limits.queued_requests:
            raise Overloaded(
                f"{requests} requests are waiting, the limit is {limits.queued_requests}; try again later"
            )
        if tokens and tokens + len(call.prompt.token_ids) > limits.queued_tokens:
            raise Overloaded(
                f"{tokens} prompt tokens are waiting, the limit is {limits.queued_tokens}; try again later"
            )

    def _check_params(self, params: SamplingParams) -> None:
        """Limits of this server, below those of SamplingParams itself."""
        limits, most = self.config.limits, self.config.max_logprobs
        stops = params.stop_strings
        if len(stops) > limits.stop_strings:
            raise BadField(
                "stop", f"stop has {len(stops)} strings; at most {limits.stop_strings} are allowed"
            )
        longest = max((len(s) for s in stops), default=0)
        if longest > limits.stop_chars:
            raise BadField(
                "stop",
                f"stop has a string of {longest} characters; at most {limits.stop_chars} are allowed",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > most:
                raise BadField(name, f"{name}={value} is out of range [0, {most}]")

    def _start(self, call: Call) -> AsyncGenerator[RequestOutput]:
        return self.engine.generate(
            call.prompt,
            call.params,
            call.request_id,
            priority=call.priority,
            timeout=call.timeout,
            cache_salt=call.cache_salt,
            use_prefix_cache=call.use_prefix_cache,
            deltas=True,
        )

    def reject(self, error: BaseException) -> None:
        """Count a request that was refused; faces report what they refuse themselves."""
        for observe in self.on_reject:
            observe(wire(error))

    def waiting(self) -> tuple[int, int]:
        """(calls without a first token, their prompt tokens)."""
        waits = [r.prompt_tokens for r in self.running.values() if r.first_token is None]
        return len(waits), sum(waits)

    async def abort(self, request_id: str) -> bool:
        """End a running call: its stream ends with finish_reason "abort". False if it isn't running."""
        return self._engine is not None and await self._engine.abort(request_id)

    async def abort_all(self) -> None:
        """End every running call."""
        for name in list(self.running):
            await self.abort(name)

    async def abort_unread(self) -> None:
        """End calls whose client has not read for limits.idle_seconds: they hold pages for nobody."""
        late = time.monotonic() - self.config.limits.idle_seconds
        for name, record in list(self.running.items()):
            if record.handed is not None and record.handed < late:
                await self.abort(name)
