"""HTTP metrics, and ``GET /metrics`` for them and the engine's."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter()


class HttpMetrics:
    """Counters of one app, in a registry of their own. ``path`` is the route, not the URL, so its values are few."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "jaxserve:http_requests",
            "HTTP requests answered; status 499 means that the client left first.",
            ["method", "path", "status"],
            registry=self.registry,
        )
        self.open = Gauge("jaxserve:http_requests_open", "HTTP requests being answered.", registry=self.registry)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text; the engine's metrics appear once the model is loaded."""
    text = generate_latest(request.app.state.http_metrics.registry)
    engine = request.app.state.lifecycle.loaded_engine
    if engine is not None:
        text += generate_latest(engine.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
