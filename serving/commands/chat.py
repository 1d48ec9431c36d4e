"""`jaxinfer chat`: a conversation with streamed answers. Ctrl-C stops the answer, not the conversation.

Reads lines from a terminal or from a pipe; with --json prints one JSON object a line and answer. With
--server no model is loaded. Called by cli.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.errors import InvalidRequest, JaxinferError
from jaxinfer.types import SamplingParams
from serving.commands.generate import AsJson, TemplateFile, read_text
from serving.options import ENGINE, SAMPLING, with_options
from serving.speakers import Address, EngineSpeaker, GrpcSpeaker, HttpSpeaker, Reply, Speaker

# One answer, as text: these have no meaning here.
_NOT_HERE = {"n", "best_of", "logprobs", "prompt_logprobs", "detokenize"}
CHAT_SAMPLING = tuple(flag for flag in SAMPLING if flag.field not in _NOT_HERE)
HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit ends"


@with_options(sampling=CHAT_SAMPLING, engine=ENGINE)
def chat(
    context: typer.Context,
    sampling: dict[str, Any],
    engine: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="as for generate; with --server one that it serves"),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="talk with this server: http(s)://... or grpc(s)://...")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="bearer token for --server; or JAXINFER_API_KEY")
    ] = None,
    ca_certs: Annotated[
        Path | None, typer.Option(help="authority that signed --server's certificate (PEM)")
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    chat_template: TemplateFile = None,
    as_json: AsJson = False,
) -> None:
    """Talk with a model, here or on a server."""
    SamplingParams(**sampling)  # wrong values are refused before the model is loaded
    source = None if chat_template is None else read_text("--chat-template", chat_template)
    if server is not None:
        if engine:
            flags = ", ".join(f.spelling for f in ENGINE if f.field in engine)
            raise InvalidRequest(f"{flags} is for a model here; the server has its own")
        key = api_key or context.meta["environment"].get("JAXINFER_API_KEY")
        authority = None if ca_certs is None else str(ca_certs)
        speaker = _remote(Address(server, key, authority), model, source, sampling)
        _Conversation(speaker, as_json, system).run()
        return
    for flag, value in (("--api-key", api_key), ("--ca-certs", ca_certs)):
        if value is not None:
            raise InvalidRequest(f"{flag} is for --server; give both or neither")
    if model is None:
        raise InvalidRequest("--model or --server is missing; give one of them")
    _talk_here(model, engine, source, sampling, as_json, system)


def _remote(
    address: Address, model: str | None, source: str | None, sampling: dict[str, Any]
) -> Speaker:
    url, authority = address.url, address.ca_certs
    if authority is not None:
        read_text("--ca-certs", Path(authority))  # now, not at the first question
    if url.startswith(("http://", "https://")):
        if source is not None:
            raise InvalidRequest("--chat-template is not sent to a server; it has its own")
        return HttpSpeaker(address, model, sampling)
    if url.startswith(("grpc://", "grpcs://")):
        if model is not None:
            raise InvalidRequest(f"--model={model!r} is not sent over gRPC: it serves one model")
        return GrpcSpeaker(address, source, sampling)
    raise InvalidRequest(f"--server={url!r} must be http(s)://HOST:PORT or grpc(s)://HOST:PORT")


def _talk_here(
    model: str,
    engine: dict[str, Any],
    source: str | None,
    sampling: dict[str, Any],
    as_json: bool,
    system: str | None,
) -> None:
    from jaxinfer.engine import Engine
    from jaxinfer.inputs import default_sampling_params
    from jaxinfer.loading import chat_template as make_template

    with closing(Engine(model, **engine)) as running:
        loaded = running.model
        template = loaded.template if source is None else make_template(source, loaded.tokenizer)
        if template is None:
            raise InvalidRequest(
                f"model={model!r} has no chat template; give one with --chat-template"
            )
        params = default_sampling_params(loaded.generation_config)
        params = replace(params, **({"max_tokens": None} | sampling))
        _Conversation(EngineSpeaker(running, template, params), as_json, system).run()


@dataclass(slots=True)
class _Conversation:
    speaker: Speaker
    as_json: bool
    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)
    failed: bool = False

    def run(self) -> None:
        """Read lines until /exit or the end of input; typer.Exit(1) if a pipe's question failed."""
        if sys.stdin.isatty() and not self.as_json:
            print(HELP)
        while (line := _read_line()) is not None:
            command, _, rest = line.partition(" ")
            if command == "/exit":
                break
            if command == "/reset":
                self.turns.clear()
            elif command == "/system":
                self.system = rest.strip() or None
            elif command.startswith("/"):
                print(f"{command} is unknown: {HELP}", file=sys.stderr)
            elif line.strip():
                self._turn(line)
        if self.failed and not sys.stdin.isatty():
            raise typer.Exit(1)

    def _turn(self, text: str) -> None:
        """One question and its answer; an error or Ctrl-C ends the answer only."""
        self.turns.append({"role": "user", "content": text})
        seen: list[Reply] = []
        try:
            asyncio.run(self._answer(seen))
        except KeyboardInterrupt:
            print(" [stopped]", file=sys.stderr)
        except JaxinferError as error:
            self.turns.pop()
            self.failed = True
            self._print_error(error)
            return
        answer = seen[-1].content if seen else ""
        self.turns.append({"role": "assistant", "content": answer})
        if self.as_json and seen:
            print(json.dumps(_turn_json(seen[-1]), ensure_ascii=False, allow_nan=False), flush=True)

    async def _answer(self, seen: list[Reply]) -> None:
        head = [{"role": "system", "content": self.system}] if self.system else []
        last = Reply()
        async with aclosing(self.speaker.reply([*head, *self.turns])) as replies:
            async for reply in replies:
                seen[:] = [reply]
                if not self.as_json:  # reasoning is no part of the answer
                    thought = reply.reasoning[len(last.reasoning) :]
                    if reply.reasoning and reply.content and not last.content:
                        thought += "\n"
                    print(thought, end="", flush=True, file=sys.stderr)
                    print(reply.content[len(last.content) :], end="", flush=True)
                last = reply
        if not self.as_json:
            print()
        if last.error is not None:
            self.failed = True
            print(f"jaxinfer: {last.error}", file=sys.stderr)

    def _print_error(self, error: JaxinferError) -> None:
        if self.as_json:
            value = {"error": {"type": type(error).__name__, "message": str(error)}}
            print(json.dumps(value, ensure_ascii=False), flush=True)
        else:
            print(f"jaxinfer: {error}", file=sys.stderr)


def _turn_json(reply: Reply) -> dict[str, Any]:
    value = {"role": "assistant", **asdict(reply)}
    return {k: v for k, v in value.items() if k not in ("reasoning", "error") or v}


def _read_line() -> str | None:
    """The next line, or None at the end; Ctrl-C at the prompt ends the conversation, too."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
