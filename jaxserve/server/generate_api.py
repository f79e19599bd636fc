"""``POST /generate``: the smallest useful part of SGLang's own API."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.request import CompletionOutput
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.speculation_counts import SpeculationCounts
from jaxserve.core.structured_outputs import StructuredOutputs
from jaxserve.server.body import parse_fields, read_request
from jaxserve.server.completion_wire import check_prompts
from jaxserve.server.disconnect import until_disconnect
from jaxserve.server.generation import Generation, names_of
from jaxserve.server.generation_wire import SCHEDULING, GenerationRequest, scheduling_of
from jaxserve.server.json_response import json_response
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.logprobs_wire import sglang_logprobs
from jaxserve.server.prompts import encode_prompts
from jaxserve.server.sse import DONE, SSEResponse, frame
from jaxserve.server.structure_wire import compile_grammar
from jaxserve.server.wire import WireModel

router = APIRouter()
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
# fields of the other endpoints that say nothing about sampling, or not to this one
NOT_SAMPLING = (
    "model", "rid", "stream", "stream_options", "best_of", "prompt_logprobs", "truncate_prompt_tokens",
)  # fmt: skip
FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


class GenerateRequest(WireModel):
    """Either ``text`` or ``input_ids``, one or a list; ``sampling_params`` with SGLang's names."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "image_data": (),
        "input_embeds": (),
        "lora_path": (),
        "return_hidden_states": (False,),
    }
    harmless: ClassVar[tuple[str, ...]] = ("log_metrics",)

    text: Any = Field(None, json_schema_extra={"type": ["string", "array"]})
    input_ids: Any = Field(None, json_schema_extra={"type": "array"})
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    logprob_start_len: int | None = Field(None, ge=-1, le=0)  # 0: of the prompt, too
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1)
    rid: str | None = None  # what /abort_request may call it

    @field_validator("text", "input_ids")
    @classmethod
    def _check(cls, value: Any) -> Any:
        if value is not None:
            check_prompts(value)
        return value

    def with_logprobs(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with the log-probabilities it asks for.

        Raises:
            InvalidRequest: how many makes no sense.
        """
        if not self.return_logprob:
            if self.top_logprobs_num or self.logprob_start_len == 0:
                raise InvalidRequest(
                    "top_logprobs_num and logprob_start_len need return_logprob: true; send it, too",
                    param="return_logprob", code="invalid_value",
                )  # fmt: skip
            return params
        count = self.top_logprobs_num or 0
        of_prompt = count if self.logprob_start_len == 0 else None
        try:
            return dataclasses.replace(params, logprobs=count, prompt_logprobs=of_prompt)
        except InvalidRequest as error:
            message = error.message.replace(error.param or "", "top_logprobs_num", 1)
            raise InvalidRequest(message, param="top_logprobs_num", code=error.code) from None


def sglang_params(fields: dict[str, Any]) -> SamplingParams:
    """Sampling parameters from SGLang's names.

    Raises:
        InvalidRequest: an unknown or unsupported field, or a value out of range.
    """
    renamed = {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "no_stop_trim": "include_stop_str_in_output",
    }
    for theirs in (*NOT_SAMPLING, *SCHEDULING, *renamed.values()):
        if theirs in fields:
            message = f"unknown field {theirs!r} in sampling_params"
            raise InvalidRequest(message, param=f"sampling_params.{theirs}", code="unknown_field")
    given = [name for name in FORMS if fields.get(name) is not None]
    if len(given) > 1:
        message = f"{given[0]} and {given[1]} both say what the output must look like; send one of them"
        raise InvalidRequest(message, param=f"sampling_params.{given[1]}", code="invalid_value")
    ours = {renamed.get(name, name): value for name, value in fields.items() if name not in FORMS}
    if given:
        form = {FORMS[given[0]]: fields[given[0]]}
        ours["structured_outputs"] = StructuredOutputs.of(form, param=f"sampling_params.{given[0]}")
    try:
        request = parse_fields(GenerationRequest, ours)
        return request.sampling_params(max_tokens=request.max_tokens)
    except InvalidRequest as error:
        if given and error.param == f"sampling_params.{given[0]}":
            raise
        theirs = next((sg for sg, own in renamed.items() if own == error.param), error.param or "")
        message = error.message.replace(error.param or theirs, theirs, 1)
        raise InvalidRequest(message, param=f"sampling_params.{theirs}", code=error.code) from None


def speculation_info(counts: SpeculationCounts) -> dict[str, Any]:
    """What speculation did for an output, under SGLang's names."""
    return {
        "spec_verify_ct": counts.num_rows,
        "spec_num_correct_drafts": counts.num_accepted,
        "spec_num_proposed_drafts": counts.num_drafted,
        "spec_accept_rate": counts.acceptance_rate,
        "spec_accept_length": counts.mean_accepted_length,
        "spec_correct_drafts_histogram": list(counts.rows_by_accepted),
    }


@router.post("/generate")
async def generate(request: Request) -> Response:
    """Continues prompts; an object for one prompt, a list for several prompts or ``n`` > 1."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    engine = lifecycle.engine()
    body = await read_request(request, GenerateRequest)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("send either text or input_ids", param="text", code="invalid_value")
    given = body.text if body.text is not None else body.input_ids
    params = body.with_logprobs(sglang_params(body.sampling_params or {}))
    await compile_grammar(engine, params)
    prompts = await encode_prompts(engine, check_prompts(given))
    single = params.n == 1 and (isinstance(given, str) or isinstance(given[0], int))
    response_id = uuid.uuid4().hex
    generation = Generation(
        lifecycle, prompts, params, response_id, DEFAULT_MAX_NEW_TOKENS, scheduling_of(body),
        names=names_of(request, body.rid),
    )  # fmt: skip

    def shape(output: CompletionOutput) -> dict[str, Any]:
        reason: dict[str, Any] | None = None
        if output.finish_reason is not None:
            reason = {"type": output.finish_reason}
            if output.stop_reason is not None:
                reason["matched"] = output.stop_reason
        meta = {
            "id": response_id,
            "finish_reason": reason,
            "prompt_tokens": len(prompts[output.index // params.n]),
            "completion_tokens": len(output.token_ids),
        }
        if output.cached_tokens is not None:
            meta["cached_tokens"] = output.cached_tokens
        if body.return_logprob:
            with_text = bool(body.return_text_in_logprobs)
            meta |= sglang_logprobs(engine.tokenizer, output, prompts[output.index // params.n], with_text)
        if output.speculation is not None:
            meta |= speculation_info(output.speculation)
        shaped = {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}
        return shaped if single else shaped | {"index": output.index}

    async def whole() -> Response:
        outputs = [shape(output) for output in await generation.collect()]
        return json_response(outputs[0] if single else outputs)

    async def frames() -> AsyncGenerator[bytes, None]:
        # each frame carries the whole text so far, as SGLang's do
        outputs = [CompletionOutput(index, logprobs=[]) for index in range(generation.num_choices)]
        async for choice, delta in generation.deltas():
            outputs[choice].append(delta)
            yield frame(shape(outputs[choice]))
        yield DONE

    if body.stream:
        return SSEResponse(frames(), generation)
    async with generation:
        return await until_disconnect(request.receive, whole())
