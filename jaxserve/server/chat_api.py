"""``POST /v1/chat/completions``."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import CompletionOutput, OutputDelta
from jaxserve.server.best_of import best_outputs
from jaxserve.server.body import read_request
from jaxserve.server.chat_output import ChatOutput, OutputForm
from jaxserve.server.chat_wire import ChatCompletionRequest
from jaxserve.server.disconnect import until_disconnect
from jaxserve.server.engine_protocol import TokenizerLike
from jaxserve.server.generation import Generation, names_of
from jaxserve.server.generation_wire import scheduling_of
from jaxserve.server.json_response import json_response
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.logprobs_wire import chat_logprobs, prompt_logprobs
from jaxserve.server.model_names import check_model, served_name
from jaxserve.server.prompts import encode_messages, truncated
from jaxserve.server.settings import ServerSettings
from jaxserve.server.sse import DONE, SSEResponse, frame
from jaxserve.server.structure_wire import compile_grammar
from jaxserve.server.token_details import token_details

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Continues a conversation; streams with ``stream: true``."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    engine = lifecycle.engine()
    body = await read_request(request, ChatCompletionRequest)
    check_model(engine, body.model)
    settings: ServerSettings = request.app.state.settings
    use, params = body.tool_use(), body.params()
    form = OutputForm.of(settings, use, body.separate_reasoning is not False, params)
    options = body.template_options(settings, use)
    params = dataclasses.replace(params, shown_special_ids=form.shown_ids(engine.tokenizer))
    if (strict := use.strict_form(settings.tool_call_parser)) is not None:
        params = dataclasses.replace(params, structured_outputs=strict)
    await compile_grammar(engine, params)
    prompt = await encode_messages(engine, body.messages, options)
    [prompt] = truncated(engine, [prompt], body.truncate_prompt_tokens)
    form = dataclasses.replace(form, prompt_end=form.prompt_end_of(prompt, engine.tokenizer))
    head: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": served_name(engine),
    }
    scheduling = scheduling_of(body)
    generation = Generation(
        lifecycle, [prompt], params, head["id"], names=names_of(request, body.rid), scheduling=scheduling
    )
    if body.stream:
        return SSEResponse(_frames(generation, body, form, head, engine.tokenizer), generation)
    async with generation:
        return await until_disconnect(request.receive, _whole(generation, body, form, head, engine.tokenizer))


async def _whole(
    generation: Generation,
    body: ChatCompletionRequest,
    form: OutputForm,
    head: dict[str, Any],
    tokenizer: TokenizerLike,
) -> Response:
    outputs = await generation.collect()
    known = outputs[0].prompt_logprobs
    best = best_outputs(outputs, len(outputs), body.num_returned)
    whole = head | {"choices": [_choice(output, body, form, tokenizer) for output in best], "usage": generation.usage()}
    if body.prompt_logprobs is not None and known is not None:
        whole["prompt_logprobs"] = prompt_logprobs(tokenizer, known, body.prompt_logprobs)
    return json_response(whole)


def _choice(
    output: CompletionOutput, body: ChatCompletionRequest, form: OutputForm, tokenizer: TokenizerLike
) -> dict[str, Any]:
    message, reason = ChatOutput(form).message(output.text, output.finish_reason)
    choice = {
        "index": output.index,
        "message": message,
        "logprobs": chat_logprobs(tokenizer, output.logprobs or []) if body.logprobs else None,
        "finish_reason": reason,
        "stop_reason": output.stop_reason,
    }
    if body.return_token_details:
        choice["token_details"] = token_details(tokenizer, output)
    return choice


async def _frames(
    generation: Generation,
    body: ChatCompletionRequest,
    form: OutputForm,
    head: dict[str, Any],
    tokenizer: TokenizerLike,
) -> AsyncGenerator[bytes, None]:
    outputs: dict[int, ChatOutput] = {}

    def chunk(
        choice: int, delta: dict[str, Any], source: OutputDelta | None = None, reason: str | None = None
    ) -> bytes:
        one: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        if source is not None:
            if body.logprobs:
                one["logprobs"] = chat_logprobs(tokenizer, source.logprobs)
            if reason is not None:
                one["finish_reason"] = reason
                one["stop_reason"] = source.stop_reason
            if body.return_token_details:
                one["token_details"] = token_details(tokenizer, source)
        whole = head | {"choices": [one]}
        if body.continuous_usage:
            whole["usage"] = generation.usage()
        elif body.include_usage:
            whole["usage"] = None  # the OpenAI API says so: null but in the last chunk
        return frame(whole)

    async for choice, delta in generation.deltas():
        if choice not in outputs:
            outputs[choice] = ChatOutput(form)
            yield chunk(choice, {"role": "assistant", "content": ""})
        shown, reason = outputs[choice].take(delta.text, delta.finish_reason)
        # a step whose text is held back (half a character, a possible stop string or call) has nothing to show
        if shown or reason or delta.logprobs or body.return_token_details or body.continuous_usage:
            yield chunk(choice, shown, delta, reason)
    if body.include_usage:
        yield frame(head | {"choices": [], "usage": generation.usage()})
    yield DONE
