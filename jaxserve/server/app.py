"""The ASGI application: routes, error shapes and middleware put together."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from jaxserve.core.errors import JaxserveError
from jaxserve.server import (
    cache_api,
    chat_api,
    completions_api,
    control_api,
    embeddings_api,
    generate_api,
    health_api,
    metrics,
    models_api,
    tokens_api,
)
from jaxserve.server.errors import handle_http, handle_known
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.middleware import ApiKey, Front
from jaxserve.server.openapi import describe_bodies
from jaxserve.server.playground import live, page
from jaxserve.server.profile_api import add_profiling
from jaxserve.server.settings import ServerSettings
from jaxserve.server.version import version


def create_app(lifecycle: Lifecycle, settings: ServerSettings | None = None) -> FastAPI:
    """An app that answers with the engine of ``lifecycle``, and with 503 while that has none."""
    settings = settings or ServerSettings()
    # redirect_slashes off: a POST with a stray slash should say 404 instead of being redirected without its body
    app = FastAPI(title="jaxserve", version=version(), redirect_slashes=False)
    app.state.lifecycle = lifecycle
    app.state.settings = settings
    app.state.http_metrics = metrics.HttpMetrics()
    openai_apis = (chat_api, completions_api, embeddings_api, models_api)
    sglang_apis = (generate_api, control_api, cache_api)
    for api in (*openai_apis, *sglang_apis, tokens_api, health_api, metrics, page, live):
        app.include_router(api.router)
    add_profiling(app, settings.profile_dir)
    app.add_exception_handler(JaxserveError, handle_known)
    app.add_exception_handler(HTTPException, handle_http)
    # added last = outermost; CORS is outside the key so that a page can read a 401
    if settings.api_keys:
        app.add_middleware(ApiKey, keys=settings.api_keys)
    if settings.cors_origins:
        origins = list(settings.cors_origins)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    app.add_middleware(Front, metrics=app.state.http_metrics)
    describe_bodies(app)
    return app
