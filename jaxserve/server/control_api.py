"""``/health_generate`` and ``POST /abort_request``: SGLang's names."""

from __future__ import annotations

import asyncio
import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.body import read_request
from jaxserve.server.errors import NotServing
from jaxserve.server.generation import Generation
from jaxserve.server.json_response import json_response
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.wire import WireModel

router = APIRouter()
HEALTH_TIMEOUT_S = 20.0  # SGLang's


class AbortRequest(WireModel):
    """``rid``: of the request to end; or ``abort_all``."""

    rid: str | None = None
    abort_all: bool | None = None


@router.head("/health_generate", include_in_schema=False)
@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 once the engine has made a token for this very request; 503 if it has not within 20 seconds."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    generation = Generation(lifecycle, [[0]], params, f"health-{uuid.uuid4().hex}")
    async with generation:
        try:
            await asyncio.wait_for(generation.collect(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            message = f"no token within {HEALTH_TIMEOUT_S:.0f} s; the engine is overloaded or hangs"
            raise NotServing(message, code="no_token") from None
    return json_response({"status": "ok"})


@router.post("/abort_request")
async def abort_request(request: Request) -> Response:
    """Ends requests: their clients get what there is, with finish reason ``abort``. Says how many there were."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    lifecycle.engine()
    body = await read_request(request, AbortRequest)
    if not body.abort_all and not body.rid:
        raise InvalidRequest("send rid, or abort_all: true", param="rid", code="missing_field")
    ending = [each for each in lifecycle.active if body.abort_all or body.rid in each.names]
    for generation in ending:
        generation.abort()
    return json_response({"aborted": len(ending)})
