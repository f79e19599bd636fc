"""``POST /v1/completions``."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Many
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.request import CompletionOutput, OutputDelta, TokenLogprob
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.best_of import best_outputs
from jaxserve.server.body import read_request
from jaxserve.server.completion_wire import DEFAULT_MAX_TOKENS, CompletionRequest
from jaxserve.server.disconnect import until_disconnect
from jaxserve.server.engine_protocol import TokenizerLike
from jaxserve.server.generation import Generation, names_of
from jaxserve.server.generation_wire import scheduling_of
from jaxserve.server.json_response import json_response
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.logprobs_wire import CompletionLogprobs, joined, prompt_logprobs
from jaxserve.server.model_names import check_model, served_name
from jaxserve.server.prompts import encode_prompts, truncated
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
    prompts = truncated(engine, prompts, body.truncate_prompt_tokens)
    head: dict[str, Any] = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served_name(engine),
    }
    generation = Generation(
        lifecycle, prompts, params, head["id"], DEFAULT_MAX_TOKENS, scheduling_of(body),
        prompt_only=body.only_echoes, names=names_of(request, body.rid),
    )  # fmt: skip
    writer = _Writer(body, params, prompts, engine.tokenizer)
    if body.stream:
        return SSEResponse(_frames(generation, body, writer, head), generation)
    async with generation:
        return await until_disconnect(request.receive, _whole(generation, writer, head))


class _Writer:
    """Puts choices into the shape of the API."""

    def __init__(
        self, body: CompletionRequest, params: SamplingParams, prompts: list[list[int]], tokenizer: TokenizerLike
    ):
        self._body = body
        self._params = params
        self._prompts = prompts
        self._tokenizer = tokenizer
        self.num_best, self.num_returned = params.n, body.num_returned

    def echo(self, prompt: int) -> str:
        """What is shown of a prompt: the text as it was sent, if it was a text and all of it counts."""
        if not self._body.echo:
            return ""
        given = self._body.prompt[prompt]
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        return self._tokenizer.decode(self._prompts[prompt], self._params.skip_special_tokens)

    def logprobs(self, prompt: int, of_prompt: Many[TokenLogprob | None] | None) -> tuple[CompletionLogprobs, Any]:
        """The writer of an output's log-probabilities, and those of its echoed prompt."""
        writer = CompletionLogprobs(self._tokenizer, self._params.skip_special_tokens)
        if self._body.echo_logprobs is None:
            return writer, None
        assert of_prompt is not None
        return writer, writer.take_prompt(self._prompts[prompt], of_prompt, self._body.echo_logprobs)

    def choice(self, output: CompletionOutput, of_prompt: list[TokenLogprob | None] | None) -> dict[str, Any]:
        """A finished choice; ``of_prompt``: log-probabilities of its prompt, if they are known."""
        prompt = output.index // self.num_returned
        shown = None
        if self._body.logprobs is not None and output.logprobs is not None:
            writer, shown = self.logprobs(prompt, of_prompt)
            own = writer.take(output.logprobs)
            shown = own if shown is None else joined(shown, own)
        choice = {"index": output.index, "text": self.echo(prompt) + output.text, "logprobs": shown}
        choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if self._body.prompt_logprobs is not None and of_prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, of_prompt, self._body.prompt_logprobs)
        return choice


async def _whole(generation: Generation, writer: _Writer, head: dict[str, Any]) -> Response:
    outputs = await generation.collect()
    of_prompts = [output.prompt_logprobs for output in outputs[:: writer.num_best]]
    best = best_outputs(outputs, writer.num_best, writer.num_returned)
    choices = [writer.choice(output, of_prompts[output.index // writer.num_returned]) for output in best]
    return json_response(head | {"choices": choices, "usage": generation.usage()})


async def _frames(
    generation: Generation, body: CompletionRequest, writer: _Writer, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    logprobs: dict[int, CompletionLogprobs] = {}
    begun: set[int] = set()
    async for choice, delta in _after_prompt(generation, body, writer):
        prompt, echoed, text = choice // writer.num_returned, None, delta.text
        if choice not in begun:
            begun.add(choice)
            text = writer.echo(prompt) + text
            if body.logprobs is not None:
                logprobs[choice], echoed = writer.logprobs(prompt, delta.prompt_logprobs)
        # a step whose text is held back (half a character, a possible stop string) has nothing to show
        if not (text or echoed or delta.finish_reason or delta.logprobs or body.continuous_usage):
            continue
        one: dict[str, Any] = {"index": choice, "text": text, "logprobs": None, "finish_reason": None}
        if body.logprobs is not None:
            own = logprobs[choice].take(delta.logprobs)
            one["logprobs"] = own if echoed is None else joined(echoed, own)
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


async def _after_prompt(
    generation: Generation, body: CompletionRequest, writer: _Writer
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Deltas; where log-probabilities of the prompt are to be echoed, the first delta of every choice has them.

    The engine tells them with the first output of a prompt; those of its other outputs that come earlier wait.
    """
    known: dict[int, tuple[TokenLogprob | None, ...]] = {}
    waiting: dict[int, list[tuple[int, OutputDelta]]] = {}
    async with contextlib.aclosing(generation.deltas()) as deltas:
        async for choice, delta in deltas:
            prompt = choice // writer.num_returned
            if body.echo_logprobs is None:
                yield choice, delta
                continue
            if delta.prompt_logprobs is not None:
                known[prompt] = delta.prompt_logprobs
            waiting.setdefault(prompt, []).append((choice, delta))
            if prompt in known:
                for at, one in waiting.pop(prompt):
                    yield at, dataclasses.replace(one, prompt_logprobs=known[prompt])
