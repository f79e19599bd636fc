"""Adds request bodies to ``/openapi.json``: the endpoints read them by hand, so FastAPI does not know them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from jaxserve.server.chat_wire import ChatCompletionRequest
from jaxserve.server.completion_wire import CompletionRequest
from jaxserve.server.control_api import AbortRequest
from jaxserve.server.embeddings_api import EmbeddingRequest
from jaxserve.server.generate_api import GenerateRequest
from jaxserve.server.profile_api import ProfileRequest
from jaxserve.server.tokens_api import DetokenizeRequest, TokenizeRequest
from jaxserve.server.wire import WireModel

BODIES: dict[str, type[WireModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/generate": GenerateRequest,
    "/abort_request": AbortRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/start_profile": ProfileRequest,
}

MAY_BE_EMPTY = ("/start_profile",)


def describe_bodies(app: FastAPI) -> None:
    """Makes ``app.openapi()`` include the bodies; built when first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            template = "#/components/schemas/{model}"
            refs, definitions = models_json_schema([(m, "validation") for m in BODIES.values()], ref_template=template)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            for path, model in BODIES.items():
                content = {"application/json": {"schema": refs[(model, "validation")]}}
                required = path not in MAY_BE_EMPTY
                schema["paths"][path]["post"]["requestBody"] = {"required": required, "content": content}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
