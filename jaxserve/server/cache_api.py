"""``/flush_cache``: forget cached prefixes, under SGLang's name."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.json_response import json_response
from jaxserve.server.lifecycle import Lifecycle

router = APIRouter()


@router.post("/flush_cache")
@router.get("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Forgets cached prefixes. Refused with 503 while requests run or wait."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    num_pages = await lifecycle.engine().flush_cache()
    return json_response({"status": "ok", "freed_pages": num_pages})
