"""What happens around every request: a request id, counting, the last resort for errors; and the API key."""

from __future__ import annotations

import hmac
import re
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.core.errors import InvalidRequest
from jaxserve.server.errors import error_response
from jaxserve.server.log_format import log_request
from jaxserve.server.metrics import HttpMetrics
from jaxserve.server.playground import page as playground
from jaxserve.timeline.recorder import RequestSpan

# Written to logs and sent back, so nothing but plain characters.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Front:
    """The outermost layer: gives each request an id (its ``x-request-id``, or a new one), which the answer has, too;
    counts and logs it; turns a crash into a JSON 500."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, start = 499, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self._metrics.open.inc()
        span = RequestSpan(scope["method"], scope["path"], request_id)
        try:
            with span:
                await self._app(scope, receive, send_with_id)
        except (ClientDisconnect, ConnectionError):
            status = 499  # the client left; there is nobody to answer
        except Exception as error:
            response = error_response(error)  # logs it
            if status != 499:
                raise  # mid-answer: let the server cut the connection, so that the client sees it is incomplete
            await response(scope, receive, send_with_id)
        finally:
            self._metrics.open.dec()
            span.note(status=status)
            path = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.requests.labels(scope["method"], path, str(status)).inc()
            log_request(request_id, scope["method"], scope["path"], status, time.perf_counter() - start)


class ApiKey:
    """Wants ``Authorization: Bearer KEY`` on everything but ``OPEN``."""

    OPEN = frozenset({"/", "/health", "/health/ready", "/metrics", "/version"})
    OPEN_PREFIX = playground.PREFIX  # the page asks for the key itself

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self._app = app
        self._keys = [key.encode() for key in keys]

    def _is_open(self, path: str) -> bool:
        return path in self.OPEN or path.startswith(self.OPEN_PREFIX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # compare with every key, each in constant time, so that timing tells nothing
            matches = [hmac.compare_digest(key.strip().encode("utf-8", "replace"), known) for known in self._keys]
            if scheme.lower() != "bearer" or not any(matches):
                problem = "wrong API key" if key else "no API key; send the header 'Authorization: Bearer KEY'"
                response = error_response(InvalidRequest(problem, code="invalid_api_key", status=401))
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
