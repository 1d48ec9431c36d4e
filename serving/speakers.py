"""Who answers in `jaxinfer chat`: an engine in this process, an HTTP server, or a gRPC server.

Each turns the messages so far into a stream of Replies. Those for servers load no model and no JAX.
Called by commands/chat.py.
"""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxinfer.errors import InvalidRequest
from jaxinfer.types import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine import Engine
    from jaxinfer.text.chat import ChatTemplate
    from jaxinfer.text.tokenizer import Tokenizer
    from serving.client_grpc import AsyncGrpcClient

type Messages = Sequence[Mapping[str, str]]

DEFAULT_MAX_TOKENS = 512  # or what is left of the context, if that is less
# What a tokenizer's archive may bring; names outside are not unpacked.
ARCHIVE = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
MAX_FILE = 1 << 28  # bytes of one of them


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer so far; the last one of a stream is whole. Its names are those of --json."""

    content: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning: str = ""
    error: str | None = None


class Speaker(Protocol):
    """Answers a conversation."""

    def reply(self, messages: Messages) -> AsyncGenerator[Reply]:
        """The answer as it grows. Raises JaxinferError; closing the generator stops the answer."""
        ...


class EngineSpeaker:
    """A model in this process."""

    def __init__(self, engine: Engine, template: ChatTemplate, params: SamplingParams) -> None:
        self._engine, self._template, self._params = engine, template, params

    async def reply(self, messages: Messages) -> AsyncGenerator[Reply]:
        engine, params = self._engine, self._params
        ids = list(engine.inputs.chat(self._template, messages).token_ids)
        room = engine.core.max_model_len - len(ids)
        if params.max_tokens is None and room > DEFAULT_MAX_TOKENS:
            params = replace(params, max_tokens=DEFAULT_MAX_TOKENS)
        async with aclosing(engine.generate(ids, params)) as outputs:
            async for output in outputs:
                answer = output.outputs[0]
                yield Reply(
                    answer.text,
                    answer.finish_reason,
                    answer.stop_reason,
                    len(output.prompt_token_ids),
                    len(answer.token_ids),
                    output.num_cached_tokens,
                    error=output.error,
                )


@dataclass(frozen=True, slots=True)
class Address:
    """A server: its URL, a bearer token, and the file of the authority that signed its certificate."""

    url: str
    api_key: str | None = None
    ca_certs: str | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidRequest("--api-key has characters that no header may have")


class HttpSpeaker:
    """An OpenAI server. sampling: fields of the request that were asked for."""

    def __init__(self, address: Address, model: str | None, sampling: dict[str, Any]) -> None:
        self._address, self._model, self._sampling = address, model, sampling

    async def reply(self, messages: Messages) -> AsyncGenerator[Reply]:
        from serving.client import AsyncClient

        server = self._address
        async with AsyncClient(server.url, server.api_key, ca_certs=server.ca_certs) as client:
            client.model = self._model = self._model or (await client.models())[0]
            reply, options = Reply(), {"stream_options": {"include_usage": True}}
            stream = client.stream_chat(messages, **options, **self._sampling)
            async with aclosing(stream):
                async for answer in stream:
                    for choice in answer.choices:
                        reply = replace(
                            reply,
                            content=reply.content + choice.text,
                            reasoning=reply.reasoning + choice.reasoning,
                            finish_reason=choice.finish_reason or reply.finish_reason,
                            stop_reason=choice.stop_reason or reply.stop_reason,
                        )
                    if (usage := answer.usage) is not None:
                        reply = replace(
                            reply,
                            prompt_tokens=usage.prompt_tokens,
                            completion_tokens=usage.completion_tokens,
                            cached_tokens=usage.cached_tokens,
                        )
                    yield reply


class GrpcSpeaker:
    """A vllm.grpc.engine server: text and tokens are turned into each other here, with its tokenizer."""

    def __init__(self, address: Address, template: str | None, sampling: dict[str, Any]) -> None:
        self._address, self._source, self._sampling = address, template, sampling
        self._tools: tuple[Tokenizer, ChatTemplate, SamplingParams, frozenset[int]] | None = None

    async def reply(self, messages: Messages) -> AsyncGenerator[Reply]:
        from jaxinfer.text.output import OutputText
        from serving.client_grpc import AsyncGrpcClient

        server = self._address
        async with AsyncGrpcClient(server.url, server.api_key, ca_certs=server.ca_certs) as client:
            if self._tools is None:
                self._tools = await self._fetch(client)
            tokenizer, template, params, ends = self._tools
            ids = _prompt_ids(tokenizer, template, messages)
            written, reply = OutputText(tokenizer, params, ids), Reply()
            async with aclosing(client.generate(ids, params)) as stream:
                async for answer in stream:
                    (choice,), usage = answer.choices, answer.usage
                    assert usage is not None  # each message has it
                    last = bool(choice.token_ids) and choice.token_ids[-1] in ends
                    more = written.push(choice.token_ids, final_stop_token=last).text
                    if choice.finish_reason is not None:
                        more += written.finish().text
                    reply = Reply(
                        reply.content + more,
                        choice.finish_reason,
                        choice.stop_reason,
                        usage.prompt_tokens,
                        usage.completion_tokens,
                        usage.cached_tokens,
                    )
                    yield reply

    async def _fetch(
        self, client: AsyncGrpcClient
    ) -> tuple[Tokenizer, ChatTemplate, SamplingParams, frozenset[int]]:
        from jaxinfer.inputs import default_sampling_params

        info = await client.model_info()
        tokenizer, template = unpack(await client.tokenizer(), self._source)
        params = default_sampling_params(json.loads(info.default_sampling_params_json or "{}"))
        params = replace(params, **({"max_tokens": None} | self._sampling))
        ends = set() if params.ignore_eos else set(info.eos_token_ids)
        return tokenizer, template, params, frozenset(ends | set(params.stop_token_ids or ()))


def _prompt_ids(tokenizer: Tokenizer, template: ChatTemplate, messages: Messages) -> list[int]:
    """The prompt of a conversation, as InputProcessor.chat makes it."""
    from jaxinfer.text.guard import SpecialGuard

    return SpecialGuard(tokenizer).render(template.render, messages, add_generation_prompt=True)[1]


def unpack(archive: bytes, source: str | None) -> tuple[Tokenizer, ChatTemplate]:
    """Tokenizer and chat template of a GetTokenizer archive; `source` replaces the template."""
    from jaxinfer.text.chat import ChatTemplate
    from jaxinfer.text.tokenizer import Tokenizer
    from jaxinfer.weights.source import open_directory

    with tempfile.TemporaryDirectory(prefix="jaxinfer-") as name:
        folder = Path(name)
        (folder / "config.json").write_text("{}")  # one made from GGUF has none
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            for item in files.infolist():
                if item.filename in ARCHIVE and item.file_size <= MAX_FILE:
                    (folder / item.filename).write_bytes(files.read(item))
        tokenizer = Tokenizer.from_dir(folder)
        template = source or open_directory(folder).chat_template
    if template is None:
        raise InvalidRequest("the server's model has no chat template; give one: --chat-template")
    return tokenizer, ChatTemplate(template, **tokenizer.special_tokens)
