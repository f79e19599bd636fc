"""Errors as clients see them: always ``{"error": {"message", "type", "param", "code"}}``, never HTML."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core.errors import CapacityError, EngineDead, InvalidRequest, JaxserveError

log = logging.getLogger("jaxserve.server")

RESTART_S = 10  # when to retry where only a restart can help
ErrorBody = dict[str, dict[str, str | None]]


class NotServing(JaxserveError):
    """The server is up but cannot answer yet (loading) or any more (shutting down, failed); HTTP 503."""

    def __init__(self, message: str, *, code: str, retry_after_s: int = 1):
        super().__init__(message)
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s


class GenerationFailed(JaxserveError):
    """The engine gave up on a request that it had accepted; HTTP 500, or an error frame within a stream."""


def error_type(status: int) -> str:
    """OpenAI's ``type`` for an HTTP status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "service_unavailable_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> ErrorBody:
    """The JSON body of an error."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, ErrorBody, dict[str, str]]:
    """Status, body and extra headers for an exception. Unexpected ones are logged and keep their text to themselves."""
    if isinstance(error, InvalidRequest):
        return error.status, error_body(error.message, error.status, param=error.param, code=error.code), {}
    if isinstance(error, (CapacityError, NotServing)):
        status = error.status if isinstance(error, CapacityError) else 503
        code = "server_overloaded" if isinstance(error, CapacityError) else error.code
        return status, error_body(error.message, status, code=code), {"retry-after": str(error.retry_after_s)}
    if isinstance(error, EngineDead):
        message = f"the engine has stopped: {error}; restart the server"
        return 503, error_body(message, 503, code="engine_dead"), {"retry-after": str(RESTART_S)}
    if isinstance(error, GenerationFailed):
        return 500, error_body(str(error), 500, code="generation_failed"), {}
    if isinstance(error, HTTPException):
        return error.status_code, error_body(str(error.detail), error.status_code), dict(error.headers or {})
    log.error("unexpected error while serving a request", exc_info=error)
    return 500, error_body("internal error; the server log has the details", 500, code="internal_error"), {}


def error_response(error: Exception) -> Response:
    """The HTTP response for an exception."""
    status, body, headers = describe(error)
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def handle_known(request: Request, error: Exception) -> Response:
    """FastAPI handler for errors raised on purpose."""
    return error_response(error)


async def handle_http(request: Request, error: Exception) -> Response:
    """FastAPI handler for unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    code: str | None = None
    message = str(error.detail)
    if error.status_code == 404:
        code, message = "not_found", f"no such path: {request.method} {request.url.path}; /docs lists what there is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        code, message = "method_not_allowed", f"{request.url.path} wants {allowed}, got {request.method}"
    body: dict[str, Any] = error_body(message, error.status_code, code=code)
    return Response(orjson.dumps(body), error.status_code, dict(error.headers or {}), media_type="application/json")
