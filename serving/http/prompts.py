"""Prompts of the HTTP routes where they ask for more than Service.prompt gives: truncation.

Text work runs in the service's threads. Called by completions, chat and the token routes.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.errors import InvalidRequest
from jaxinfer.inputs import Prompt
from serving.errors import BadField
from serving.http.schemas import ChatFields
from serving.service import Service


async def text_prompt(
    service: Service, value: str | list[int], add_special_tokens: bool, truncate: int | None
) -> Prompt:
    """A prompt of text or token ids.

    Args:
        truncate: keep this many tokens at the end; -1: as many as the model's length. None: all.
    """
    if truncate is None:
        return await service.prompt(value, add_special_tokens)
    if isinstance(value, str):
        value = await encode(service, value, add_special_tokens)
    room = service.engine.core.max_model_len
    return await service.prompt(value[-room if truncate == -1 else -truncate :])


def with_breakpoints(prompt: Prompt, positions: list[int] | None) -> Prompt:
    """The prompt with the client's breakpoints. Raises BadField for one that is not in it."""
    if not positions:
        return prompt
    try:
        return prompt.with_breakpoints(positions)
    except InvalidRequest as error:
        raise BadField("breakpoints", str(error)) from None


async def encode(service: Service, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text that may be longer than the model's length, within bounds."""
    service.check_length("prompt", len(text))
    return await service.in_thread(service.tokenizer.encode, text, add_special_tokens)


async def chat_prompt(
    service: Service,
    body: ChatFields,
    *,
    tools: list[dict[str, Any]] | None,
    template_kwargs: dict[str, Any],
    truncate: int | None = None,
) -> Prompt:
    """The prompt of a conversation; its text is what the template made of it.

    Args:
        template_kwargs: all of them. truncate: as text_prompt.
    """
    service.check_length("messages", sum(_characters(m.get("content")) for m in body.messages))
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    return await service.chat_prompt(
        body.messages,
        tools or None,
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=template_kwargs,
        keep=truncate,
    )


def _characters(content: Any) -> int:
    """Length of a message's content; what is no text is refused later."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return sum(len(text) for text in texts if isinstance(text, str))
    return len(content) if isinstance(content, str) else 0
