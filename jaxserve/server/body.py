"""Reading a request body: size limit, strict JSON, then a strict wire model."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import Request

from jaxserve.core.errors import InvalidRequest
from jaxserve.server.wire import WireModel

Model = TypeVar("Model", bound=WireModel)

# A client that is still sending when the answer comes and the connection closes sees a reset instead of the answer.
# So a body that is too long is read a little further and thrown away.
DISCARD_BYTES = 8 << 20


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        InvalidRequest: 413 when it is longer than ``max_bytes``.
    """
    chunks: list[bytes] = []
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received <= max_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
            if received > max_bytes + DISCARD_BYTES:
                break
    if received > max_bytes:
        message = f"request body must be at most {max_bytes} bytes; send less or raise --max-body-bytes"
        raise InvalidRequest(message, code="request_too_large", status=413)
    return b"".join(chunks)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        InvalidRequest: not UTF-8, not JSON (NaN, trailing commas and lone surrogates are not), or not an object.
    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        name = {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}.get(type(fields), "a number")
        raise InvalidRequest(f"the request body must be a JSON object, got {name}", code="invalid_json")
    return fields


def parse_fields(model: type[Model], fields: dict[str, Any]) -> Model:
    """Checks fields against a wire model.

    Raises:
        InvalidRequest: an unknown field, one that is not supported, or a value of the wrong type or range.
    """
    try:
        return model.model_validate(model.without_unsupported(fields))
    except ValidationError as error:
        raise _translate(model, error) from None


async def read_request(request: Request, model: type[Model]) -> Model:
    """Reads, parses and checks the body of a request.

    Raises:
        InvalidRequest: see ``read_body``, ``parse_json`` and ``parse_fields``.
    """
    return parse_fields(model, parse_json(await read_body(request, request.app.state.settings.max_body_bytes)))


def _translate(model: type[WireModel], error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    location = [part for part in first["loc"] if isinstance(part, (str, int))]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if first["type"] == "extra_forbidden":
        known = model.known_fields() if len(location) == 1 else []
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return InvalidRequest(f"unknown field {name!r}{hint}", param=name, code="unknown_field")
    if first["type"] == "missing":
        return InvalidRequest(f"{name} is required", param=name, code="missing_field")
    if first["type"] == "value_error":  # raised by our own validators, which say what was wanted
        wanted = str(first["ctx"]["error"])
    else:
        wanted = first["msg"].replace("Input should be", "must be", 1)
    return InvalidRequest(f"{name} {wanted}, got {_shorten(first['input'])}", param=name, code="invalid_value")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
