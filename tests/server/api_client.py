"""Calling an app within the process: one call, one answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from jaxserve.server.app import create_app
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


class Api:
    """An app around an engine (None: still loading)."""

    def __init__(self, engine: Any = None, **settings: Any):
        self.engine = engine
        self.lifecycle = Lifecycle(engine)
        self.app = create_app(self.lifecycle, ServerSettings(**settings))

    def call(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **request)

        return asyncio.run(go())

    def get(self, path: str, **request: Any) -> httpx.Response:
        return self.call("GET", path, **request)

    def post(self, path: str, body: Any = None, **request: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return self.call("POST", path, content=body, **request)
        return self.call("POST", path, json=body, **request)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", CHAT | fields)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "Hi"} | fields)


def events(response: httpx.Response) -> list[Any]:
    """The JSON events of a stream; ``"[DONE]"`` stays a string. Fails on anything that is not an event."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:], parse_constant=_refuse) for frame in frames]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """Checks the OpenAI error shape; returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    if param is not None:
        assert body["error"]["param"] == param, body
    if code is not None:
        assert body["error"]["code"] == code, body
    return body["error"]["message"]
