"""From text to token ids without holding up the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from jaxserve.core.errors import InvalidRequest
from jaxserve.server.completion_wire import Prompts
from jaxserve.server.engine_protocol import EngineLike

# Tokenizing about this many characters takes a few milliseconds; longer texts go to a thread.
INLINE_CHARACTERS = 8192


async def encode_prompts(engine: EngineLike, prompts: Prompts, add_special_tokens: bool = True) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        InvalidRequest: a prompt without tokens (an empty text, when the tokenizer adds no BOS).
    """

    def encode() -> list[list[int]]:
        tokenizer = engine.tokenizer
        return [tokenizer.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]

    num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    encoded = encode() if num_characters <= INLINE_CHARACTERS else await asyncio.to_thread(encode)
    for position, ids in enumerate(encoded):
        if not ids:
            where = f"prompt[{position}]" if len(encoded) > 1 else "prompt"
            message = f"{where} must have at least one token, got {prompts[position]!r}"
            raise InvalidRequest(message, param="prompt", code="empty_prompt")
    return encoded


def truncated(engine: EngineLike, prompts: list[list[int]], limit: int | None) -> list[list[int]]:
    """The last ``limit`` tokens of each prompt; -1: as many as leave room for one more in the context; None: all.

    Raises:
        InvalidRequest: a limit that leaves nothing, or that no prompt may have.
    """
    if limit is None:
        return prompts
    most = engine.context_length - 1
    if limit == 0 or limit > most:
        message = f"truncate_prompt_tokens must be in [1, {most}], or -1 for {most}, got {limit}"
        raise InvalidRequest(message, param="truncate_prompt_tokens", code="invalid_value")
    return [prompt[-(most if limit < 0 else limit) :] for prompt in prompts]


async def encode_messages(engine: EngineLike, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    """Token ids of a conversation under a chat template; ``options`` as those of ``encode_chat``.

    Raises:
        InvalidRequest: no template, or one that refuses the conversation.
    """

    def encode() -> list[int]:
        return engine.encode_chat(messages, **options)

    # A template of unknown origin may take its time.
    short = sum(len(message["content"]) for message in messages) <= INLINE_CHARACTERS
    if short and not options.keys() & {"template", "tools"}:
        return encode()
    return await asyncio.to_thread(encode)
