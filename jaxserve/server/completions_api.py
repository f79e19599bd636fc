"""``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.body import read_request
from jaxserve.server.completion_wire import DEFAULT_MAX_TOKENS, CompletionRequest
from jaxserve.server.disconnect import until_disconnect
from jaxserve.server.engine_protocol import TokenizerLike
from jaxserve.server.generation import Generation
from jaxserve.server.generation_wire import scheduling_of
from jaxserve.server.json_response import json_response
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.logprobs_wire import CompletionLogprobs
from jaxserve.server.model_names import check_model, served_name
from jaxserve.server.prompts import encode_prompts
from jaxserve.server.sse import DONE, SSEResponse, frame
from jaxserve.server.structure_wire import compile_grammar

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continues one or several prompts; streams with ``stream: true``."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    engine = lifecycle.engine()
    body = await read_request(request, CompletionRequest)
    check_model(engine, body.model)
    params = body.params()
    await compile_grammar(engine, params)
    prompts = await encode_prompts(engine, body.prompt, body.add_special_tokens is not False)
    head: dict[str, Any] = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served_name(engine),
    }
    generation = Generation(lifecycle, prompts, params, head["id"], DEFAULT_MAX_TOKENS, scheduling_of(body))
    if body.stream:
        return SSEResponse(_frames(generation, body, params, head, engine.tokenizer), generation)
    async with generation:
        return await until_disconnect(request.receive, _whole(generation, params, head, engine.tokenizer))


async def _whole(
    generation: Generation, params: SamplingParams, head: dict[str, Any], tokenizer: TokenizerLike
) -> Response:
    outputs = await generation.collect()
    choices = []
    for output in outputs:
        logprobs = None
        if output.logprobs is not None:
            logprobs = CompletionLogprobs(tokenizer, params.skip_special_tokens).take(output.logprobs)
        choice = {"index": output.index, "text": output.text, "logprobs": logprobs}
        choices.append(choice | {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason})
    return json_response(head | {"choices": choices, "usage": generation.usage()})


async def _frames(
    generation: Generation,
    body: CompletionRequest,
    params: SamplingParams,
    head: dict[str, Any],
    tokenizer: TokenizerLike,
) -> AsyncGenerator[bytes, None]:
    logprobs: dict[int, CompletionLogprobs] = {}
    async for choice, delta in generation.deltas():
        # a step whose text is held back (half a character, a possible stop string) has nothing to show
        if not (delta.text or delta.finish_reason or delta.logprobs or body.continuous_usage):
            continue
        one: dict[str, Any] = {"index": choice, "text": delta.text, "logprobs": None, "finish_reason": None}
        if params.logprobs is not None:
            if choice not in logprobs:
                logprobs[choice] = CompletionLogprobs(tokenizer, params.skip_special_tokens)
            one["logprobs"] = logprobs[choice].take(delta.logprobs)
        if delta.finish_reason is not None:
            one["finish_reason"] = delta.finish_reason
            one["stop_reason"] = delta.stop_reason
        whole = head | {"choices": [one]}
        if body.continuous_usage:
            whole["usage"] = generation.usage()
        elif body.include_usage:
            whole["usage"] = None  # the OpenAI API says so: null but in the last chunk
        yield frame(whole)
    if body.include_usage:
        yield frame(head | {"choices": [], "usage": generation.usage()})
    yield DONE
