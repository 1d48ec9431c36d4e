"""`jaxinfer generate`: complete or answer prompts, as text or as a JSON list with one object a prompt.

Without --json, stdout carries the answers and nothing else unless it is a terminal. Called by cli.py.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.errors import InvalidRequest
from jaxinfer.types import RequestOutput, SamplingParams
from serving.options import ENGINE, SAMPLING, parse_ids, with_options
from serving.present import output_json, print_json

DEFAULT_MAX_TOKENS = 128

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="a directory, a .gguf file, a Hub id or the alias smollm2-135m"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
TemplateFile = Annotated[
    Path | None, typer.Option("--chat-template", help="file that replaces the chat template")
]


@with_options(sampling=SAMPLING, engine=ENGINE)
def generate(
    model: Model,
    sampling: dict[str, Any],
    engine: dict[str, Any],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="repeatable")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="file whose text is a prompt; repeatable; - is stdin")
    ] = None,
    prompt_token_ids: Annotated[
        list[str] | None, typer.Option(help="a prompt as ids: 1,2,3; repeatable")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="use the chat template")] = False,
    system: Annotated[str | None, typer.Option(help="system message (with --chat)")] = None,
    chat_template: TemplateFile = None,
    as_json: AsJson = False,
) -> int:
    """Complete prompts, or answer them with --chat. Exit code 1 if a request failed."""
    texts = [*(prompt or []), *(read_text("--prompt-file", path) for path in prompt_file or [])]
    ids = [parse_ids("--prompt-token-ids", text) for text in prompt_token_ids or []]
    _check_prompts(texts, ids, chat, system, chat_template)
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling and not as_json:
            raise InvalidRequest(f"{name}={sampling[name]} is only shown with --json")
    SamplingParams(**sampling)  # wrong values are refused before the model is loaded
    template = None if chat_template is None else read_text("--chat-template", chat_template)

    from jaxinfer.llm import LLM

    start = time.perf_counter()
    llm = LLM(model, chat_template=template, **engine)
    load_s = time.perf_counter() - start
    params = replace(
        llm.get_default_sampling_params(), **{"max_tokens": DEFAULT_MAX_TOKENS} | sampling
    )
    if chat:
        head = [] if system is None else [{"role": "system", "content": system}]
        prompts = [llm.chat_prompt([*head, {"role": "user", "content": t}]) for t in texts]
    else:
        prompts = [llm.prompt(p) for p in [*texts, *ids]]
    chosen = [params] * len(prompts)
    if "max_tokens" not in sampling:
        room = [llm.max_model_len - len(p.token_ids) for p in prompts]
        chosen = [params if n >= DEFAULT_MAX_TOKENS else _up_to_the_end(params) for n in room]
    outputs = llm.generate(prompts, chosen)
    if as_json:
        print_json([output_json(output, params, load_s) for output in outputs])
    else:
        for shown, output in zip([*texts, *ids], outputs, strict=True):
            _print_text(shown, output, params.detokenize)
    return 1 if any(output.error for output in outputs) else 0


def _up_to_the_end(params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=None)


def read_text(name: str, path: Path) -> str:
    """Text of a file, or of stdin for "-"; InvalidRequest if it cannot be read."""
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{name}={str(path)!r} cannot be read: {error}") from error


def _check_prompts(
    texts: list[str], ids: list[list[int]], chat: bool, system: str | None, template: Path | None
) -> None:
    if not texts and not ids:
        raise InvalidRequest("no prompt: give --prompt, --prompt-file or --prompt-token-ids")
    if chat and ids:
        raise InvalidRequest(
            "--prompt-token-ids cannot be used with --chat, which makes the ids itself"
        )
    if not chat and system is not None:
        raise InvalidRequest(f"--system={system!r} needs --chat")
    if not chat and template is not None:
        raise InvalidRequest(f"--chat-template={str(template)!r} needs --chat")


def _print_text(prompt: str | list[int], output: RequestOutput, detokenize: bool) -> None:
    """The answers alone for scripts; on a terminal with the prompt, dimmed, above them."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        Console().print(Text(str(prompt), style="dim"))
    for completion in output.outputs:
        print(completion.text if detokenize else completion.token_ids)
    if output.error is not None:
        print(f"jaxinfer: {output.error}", file=sys.stderr)
