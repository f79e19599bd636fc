"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.errors import InvalidRequest
from jaxserve.server.body import read_request
from jaxserve.server.chat_wire import check_messages, template_options
from jaxserve.server.json_response import json_response
from jaxserve.server.logprobs_wire import token_name
from jaxserve.server.model_names import check_model
from jaxserve.server.prompts import encode_messages
from jaxserve.server.tools_wire import check_tools
from jaxserve.server.wire import WireModel

router = APIRouter()


class TokenizeRequest(WireModel):
    """Either ``prompt`` or ``messages``."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"chat_template": ()}

    model: str | None = None
    prompt: str | None = None
    messages: Any = Field(None, json_schema_extra={"type": "array", "items": {"type": "object"}})
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = Field(None, json_schema_extra={"type": ["array", "null"], "items": {"type": "object"}})

    _check_tools = field_validator("tools")(check_tools)

    @field_validator("messages")
    @classmethod
    def _check_messages(cls, value: Any) -> list[dict[str, Any]] | None:
        return None if value is None else check_messages(value)


class DetokenizeRequest(WireModel):
    """``tokens`` back to text."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a conversation."""
    engine = request.app.state.lifecycle.engine()
    body = await read_request(request, TokenizeRequest)
    check_model(engine, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt", code="invalid_value")
    if body.messages is not None:
        options = template_options(
            request.app.state.settings,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            variables=body.chat_template_kwargs,
        )
        ids = await encode_messages(engine, body.messages, options)
    else:
        ids = await asyncio.to_thread(engine.tokenizer.encode, body.prompt, body.add_special_tokens is not False)
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": engine.context_length}
    if body.return_token_strs:
        answer["token_strs"] = [token_name(engine.tokenizer, token_id)[0] for token_id in ids]
    return json_response(answer)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Text of token ids; special tokens are kept unless ``skip_special_tokens`` is true."""
    engine = request.app.state.lifecycle.engine()
    body = await read_request(request, DetokenizeRequest)
    check_model(engine, body.model)
    vocab_size = engine.tokenizer.vocab_size
    outside = next((token_id for token_id in body.tokens if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        message = f"tokens must be ids in [0, {vocab_size - 1}], got {outside}"
        raise InvalidRequest(message, param="tokens", code="invalid_value")
    text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
    return json_response({"prompt": text})
