"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.engine_protocol import EngineLike
from jaxserve.server.json_response import json_response
from jaxserve.server.model_names import accepted_names, check_model, served_name

router = APIRouter()
_STARTED = int(time.time())


def _entry(engine: EngineLike, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "jaxserve",
        "root": engine.model_name,
        "max_model_len": engine.context_length,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every name the model answers to; the first is the one responses carry."""
    engine = request.app.state.lifecycle.engine()
    return json_response({"object": "list", "data": [_entry(engine, name) for name in accepted_names(engine)]})


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> Response:
    """One model; names may contain slashes."""
    engine = request.app.state.lifecycle.engine()
    check_model(engine, model)
    return json_response(_entry(engine, model))


@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """The model in SGLang's shape."""
    engine = request.app.state.lifecycle.engine()
    path = getattr(engine.config, "model", engine.model_name)
    return json_response({"model_path": path, "served_model_name": served_name(engine), "is_generation": True})
