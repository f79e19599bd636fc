"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
import uuid
from typing import Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.body import read_request
from jaxserve.server.completion_wire import Prompts, check_prompts
from jaxserve.server.disconnect import until_disconnect
from jaxserve.server.generation import Generation
from jaxserve.server.json_response import json_response
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.model_names import check_model, served_name
from jaxserve.server.prompts import encode_prompts, truncated
from jaxserve.server.settings import ServerSettings
from jaxserve.server.wire import WireModel

router = APIRouter()
MOST_INPUTS = 2048  # OpenAI's


class EmbeddingRequest(WireModel):
    """``input``: a text, a list of texts, token ids, or a list of those."""

    harmless: ClassVar[tuple[str, ...]] = ("user",)

    model: str | None = None
    input: Any = Field(json_schema_extra={"type": ["string", "array"]})
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    add_special_tokens: bool | None = None

    @field_validator("input")
    @classmethod
    def _check_input(cls, value: Any) -> Prompts:
        inputs = check_prompts(value)
        if len(inputs) > MOST_INPUTS:
            raise ValueError(f"must be {MOST_INPUTS} texts at most, not {len(inputs)}")
        return inputs


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """One unit vector for each input, made of the model's final hidden states."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    settings: ServerSettings = request.app.state.settings
    engine = lifecycle.engine()
    body = await read_request(request, EmbeddingRequest)
    check_model(engine, body.model)
    if settings.embedding_pooling is None:
        message = (
            "this server makes no embeddings; start it with --is-embedding, best with a model that was trained for them"
        )
        raise InvalidRequest(message, code="no_embeddings")
    size = engine.embedding_size
    if body.dimensions not in (None, size):
        message = f"dimensions must be {size}, what this model has, got {body.dimensions}; leave it out"
        raise InvalidRequest(message, param="dimensions", code="invalid_value")
    try:
        prompts = await encode_prompts(engine, body.input, body.add_special_tokens is not False)
        prompts = truncated(engine, prompts, body.truncate_prompt_tokens)
    except InvalidRequest as error:
        if error.param != "prompt":
            raise
        raise InvalidRequest(error.message.replace("prompt", "input", 1), param="input", code=error.code) from None
    params = SamplingParams(max_tokens=1, temperature=0.0, pooling=settings.embedding_pooling)
    work = _vectors(lifecycle, prompts, params, request.state.request_id)
    vectors = await until_disconnect(request.receive, work)
    as_base64 = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if as_base64 else vector.tolist()}
        for index, vector in enumerate(vectors)
    ]
    count = sum(len(prompt) for prompt in prompts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "data": data, "model": served_name(engine), "usage": usage})


async def _vectors(
    lifecycle: Lifecycle, prompts: list[list[int]], params: SamplingParams, request_id: str
) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    # Not all at once: a long list would fill the queue that others wait in.
    step = max(1, getattr(lifecycle.engine().config, "max_running_requests", 1))
    for first in range(0, len(prompts), step):
        some = prompts[first : first + step]
        names = frozenset({request_id})
        generation = Generation(lifecycle, some, params, f"embd-{uuid.uuid4().hex}", prompt_only=True, names=names)
        async with generation:
            for output in await generation.collect():
                if output.embedding is None:
                    raise InvalidRequest("the request was aborted", code="aborted")
                found.append(_unit(output.embedding))
    return found


def _unit(vector: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(vector))
    return np.asarray(vector / length if length > 0 else vector, np.float32)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
