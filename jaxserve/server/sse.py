"""Server-sent events: one ``data:`` frame per chunk, an error frame when a stream fails, nothing after it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxserve.server.disconnect import until_disconnect
from jaxserve.server.errors import describe, error_response

DONE = b"data: [DONE]\n\n"


def frame(chunk: Any) -> bytes:
    """One event holding a JSON value."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


class SSEResponse(StreamingResponse):
    """Streams the frames of a generation; leaves the generation, and so aborts it, when the client goes away.

    The status line waits for the first frame, so that an error before it is an ordinary HTTP error. A later error
    becomes one ``data: {"error": ...}`` frame, after which the stream ends without ``[DONE]``.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], generation: contextlib.AbstractAsyncContextManager[Any]):
        # no buffering by proxies: each token should arrive when it is made
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(frames, headers=headers, media_type="text/event-stream")
        self._frames = frames
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # entered here, not in the frames: a generator that is closed before its first frame runs none of its code
        async with self._generation:
            await until_disconnect(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for data in frames:
                    if not started:
                        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                        await send(start)
                        started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except (ClientDisconnect, ConnectionError):  # the connection broke while sending; there is nobody to tell
            raise
        except Exception as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return
            body = frame(describe(error)[1])
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
