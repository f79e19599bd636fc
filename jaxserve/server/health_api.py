"""Is it alive, is it ready, what is it: ``/health``, ``/health/ready``, ``/version``, ``/get_server_info``."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.json_response import json_response
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.model_names import served_name
from jaxserve.server.version import version

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """Liveness: 200 also while loading or draining; 503 once only a restart can help."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    engine = lifecycle.loaded_engine
    dead = lifecycle.failure or (engine.state().get("dead") if engine is not None else None)
    if dead:
        return json_response({"status": "dead", "stage": lifecycle.stage, "reason": str(dead)}, 503)
    return json_response({"status": "ok", "stage": lifecycle.stage})


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """Readiness: 503 until a request sent now would be answered at normal speed."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    reason = lifecycle.why_not_ready()
    if reason is not None:
        return json_response({"status": "not ready", "stage": lifecycle.stage, "reason": reason}, 503)
    return json_response({"status": "ready", "stage": lifecycle.stage})


@router.get("/version")
async def get_version() -> Response:
    """Version of the package."""
    return json_response({"version": version()})


@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Engine settings and what the engine is doing now."""
    engine = request.app.state.lifecycle.engine()
    config = engine.config
    settings = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else {}  # type: ignore[arg-type]
    whole: dict[str, Any] = {
        "version": version(),
        "model": served_name(engine),
        "context_length": engine.context_length,
        "config": settings,
        "state": engine.state(),
    }
    return Response(orjson.dumps(whole, default=str), media_type="application/json")
