"""`jaxinfer chat`: a conversation with streamed answers. Ctrl-C stops the answer, not the conversation.

Reads lines from a terminal or from a pipe; with --json prints one JSON object a line and answer.
Called by cli.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.errors import InvalidRequest, JaxinferError
from jaxinfer.types import RequestOutput, SamplingParams
from serving.commands.generate import AsJson, Model, TemplateFile, read_text
from serving.options import ENGINE, SAMPLING, with_options

if TYPE_CHECKING:
    from jaxinfer.engine import Engine
    from jaxinfer.text.chat import ChatTemplate

DEFAULT_MAX_TOKENS = 512  # or what is left of the context, if that is less
# One answer, as text: these have no meaning here.
_NOT_HERE = {"n", "best_of", "logprobs", "prompt_logprobs", "detokenize"}
CHAT_SAMPLING = tuple(flag for flag in SAMPLING if flag.field not in _NOT_HERE)
HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit ends"


@with_options(sampling=CHAT_SAMPLING, engine=ENGINE)
def chat(
    model: Model,
    sampling: dict[str, Any],
    engine: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    chat_template: TemplateFile = None,
    as_json: AsJson = False,
) -> None:
    """Talk with a model."""
    SamplingParams(**sampling)  # wrong values are refused before the model is loaded
    source = None if chat_template is None else read_text("--chat-template", chat_template)

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
        _Conversation(running, template, params, as_json, system).run()


@dataclass(slots=True)
class _Conversation:
    engine: Engine
    template: ChatTemplate
    params: SamplingParams
    as_json: bool
    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Read lines until /exit or the end of input."""
        if sys.stdin.isatty() and not self.as_json:
            print(HELP)
        while (line := _read_line()) is not None:
            command, _, rest = line.partition(" ")
            if command == "/exit":
                return
            if command == "/reset":
                self.turns.clear()
            elif command == "/system":
                self.system = rest.strip() or None
            elif command.startswith("/"):
                print(f"{command} is unknown: {HELP}", file=sys.stderr)
            elif line.strip():
                self._turn(line)

    def _turn(self, text: str) -> None:
        """One question and its answer; an error or Ctrl-C ends the answer only."""
        self.turns.append({"role": "user", "content": text})
        seen: list[RequestOutput] = []
        try:
            asyncio.run(self._answer(seen))
        except KeyboardInterrupt:
            print(" [stopped]", file=sys.stderr)
        except JaxinferError as error:
            self.turns.pop()
            self._print_error(error)
            return
        answer = seen[-1].outputs[0].text if seen else ""
        self.turns.append({"role": "assistant", "content": answer})
        if self.as_json and seen:
            print(json.dumps(_turn_json(seen[-1]), ensure_ascii=False, allow_nan=False), flush=True)

    async def _answer(self, seen: list[RequestOutput]) -> None:
        head = [{"role": "system", "content": self.system}] if self.system else []
        text = self.template.render([*head, *self.turns], add_generation_prompt=True)
        ids = list(self.engine.inputs.prompt(text, add_special_tokens=False).token_ids)
        params, shown = self.params, 0
        room = self.engine.core.max_model_len - len(ids)
        if params.max_tokens is None and room > DEFAULT_MAX_TOKENS:
            params = replace(params, max_tokens=DEFAULT_MAX_TOKENS)
        async for output in self.engine.generate(ids, params):
            seen[:] = [output]
            answer = output.outputs[0].text
            if not self.as_json:
                print(answer[shown:], end="", flush=True)
            shown = len(answer)
        if not self.as_json:
            print()
        if seen and seen[-1].error is not None:
            print(f"jaxinfer: {seen[-1].error}", file=sys.stderr)

    def _print_error(self, error: JaxinferError) -> None:
        if self.as_json:
            value = {"error": {"type": type(error).__name__, "message": str(error)}}
            print(json.dumps(value, ensure_ascii=False), flush=True)
        else:
            print(f"jaxinfer: {error}", file=sys.stderr)


def _turn_json(output: RequestOutput) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "role": "assistant",
        "content": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": output.num_cached_tokens,
    }


def _read_line() -> str | None:
    """The next line, or None at the end; Ctrl-C at the prompt ends the conversation, too."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
