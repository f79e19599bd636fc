"""``GET /timeline/live``: the steps as they happen, as server-sent events. Nothing is recorded while nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.errors import CapacityError
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.sse import SSEResponse, frame

router = APIRouter()
EVERY_S = 0.25
BEAT_EVERY = 8  # frames between two that are sent although nothing happened
MAX_WATCHERS = 4  # each costs up to 20 ms of the interpreter per frame


@router.get("/timeline/live")
async def live(request: Request) -> Response:
    """Frames ``{"now_ms", "steps": [...]}`` until the client leaves or the server stops; see docs/playground.md."""
    state = request.app.state
    lifecycle: Lifecycle = state.lifecycle
    lifecycle.engine()  # only a server that serves has something to show
    num_watchers = getattr(state, "num_watchers", 0)
    if num_watchers >= MAX_WATCHERS:
        raise CapacityError(f"{num_watchers} clients watch the timeline, which is the limit; close one", status=429)

    @contextlib.asynccontextmanager
    async def watching() -> AsyncIterator[None]:
        state.num_watchers = getattr(state, "num_watchers", 0) + 1
        try:
            yield
        finally:
            state.num_watchers -= 1

    return SSEResponse(_frames(lifecycle), watching())


async def _frames(lifecycle: Lifecycle) -> AsyncGenerator[bytes, None]:
    from jaxserve.timeline.live import Watch  # imports jax

    zero_ns = time.perf_counter_ns()
    watch = Watch(zero_ns)
    try:
        for number in range(1 << 60):
            steps = await asyncio.to_thread(watch.take)
            if steps or number % BEAT_EVERY == 0:
                now_ms = (time.perf_counter_ns() - zero_ns) / 1e6
                yield frame({"now_ms": round(now_ms, 3), "steps": [step._asdict() for step in steps]})
            await asyncio.sleep(EVERY_S)
            if lifecycle.stage != "ready":
                return
    finally:
        watch.close()
