"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import CompletionOutput, OutputDelta
from jaxserve.server.body import read_request
from jaxserve.server.chat_wire import ChatCompletionRequest
from jaxserve.server.disconnect import until_disconnect
from jaxserve.server.engine_protocol import TokenizerLike
from jaxserve.server.generation import Generation
from jaxserve.server.json_response import json_response
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.logprobs_wire import chat_logprobs
from jaxserve.server.model_names import check_model, served_name
from jaxserve.server.prompts import encode_messages
from jaxserve.server.sse import DONE, SSEResponse, frame
from jaxserve.server.structure_wire import compile_grammar

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Continues a conversation; streams with ``stream: true``."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    engine = lifecycle.engine()
    body = await read_request(request, ChatCompletionRequest)
    check_model(engine, body.model)
    params = body.params()
    await compile_grammar(engine, params)
    prompt = await encode_messages(engine, body.messages, body.add_generation_prompt is not False)
    head: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": served_name(engine),
    }
    generation = Generation(lifecycle, [prompt], params, head["id"])
    if body.stream:
        return SSEResponse(_frames(generation, body, head, engine.tokenizer), generation)
    async with generation:
        return await until_disconnect(request.receive, _whole(generation, head, engine.tokenizer))


async def _whole(generation: Generation, head: dict[str, Any], tokenizer: TokenizerLike) -> Response:
    outputs = await generation.collect()
    choices = [_choice(output, tokenizer) for output in outputs]
    return json_response(head | {"choices": choices, "usage": generation.usage()})


def _choice(output: CompletionOutput, tokenizer: TokenizerLike) -> dict[str, Any]:
    return {
        "index": output.index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": None if output.logprobs is None else chat_logprobs(tokenizer, output.logprobs),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


async def _frames(
    generation: Generation, body: ChatCompletionRequest, head: dict[str, Any], tokenizer: TokenizerLike
) -> AsyncGenerator[bytes, None]:
    greeted: set[int] = set()

    def chunk(choice: int, delta: dict[str, Any], source: OutputDelta | None = None) -> bytes:
        one: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        if source is not None:
            if body.logprobs:
                one["logprobs"] = chat_logprobs(tokenizer, source.logprobs)
            if source.finish_reason is not None:
                one["finish_reason"] = source.finish_reason
                one["stop_reason"] = source.stop_reason
        whole = head | {"choices": [one]}
        if body.continuous_usage:
            whole["usage"] = generation.usage()
        elif body.include_usage:
            whole["usage"] = None  # the OpenAI API says so: null but in the last chunk
        return frame(whole)

    async for choice, delta in generation.deltas():
        if choice not in greeted:
            greeted.add(choice)
            yield chunk(choice, {"role": "assistant", "content": ""})
        # a step whose text is held back (half a character, a possible stop string) has nothing to show
        if delta.text or delta.finish_reason or delta.logprobs or body.continuous_usage:
            yield chunk(choice, {"content": delta.text} if delta.text else {}, delta)
    if body.include_usage:
        yield frame(head | {"choices": [], "usage": generation.usage()})
    yield DONE
