"""JSON answers, written by orjson: strict, no NaN or Infinity."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def json_response(value: Any, status: int = 200) -> Response:
    """A response holding a JSON value."""
    return Response(orjson.dumps(value), status, media_type="application/json")
