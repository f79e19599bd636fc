"""The real engine behind the real server, in a thread of this process."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from live_server import connect, http_post, read_all

from jaxserve.core.config import EngineConfig
from jaxserve.server.launch import ServerProcess
from jaxserve.server.settings import ServerSettings


class Refused(Exception):
    """An HTTP error: its status and the error of its body."""

    def __init__(self, status: int, error: dict[str, Any]):
        super().__init__(f"{status}: {error}")
        self.status, self.error = status, error


class Served:
    """The running server: its engine and its address."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.url = ""

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def post_raw(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON body, whatever they are."""
        request = urllib.request.Request(self.url + path, body)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read(), parse_constant=_refuse)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read(), parse_constant=_refuse)

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        """The answer. Raises Refused."""
        status, body = self.post_raw(path, json.dumps(fields).encode())
        if status != 200:
            raise Refused(status, body["error"])
        return body

    def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that ends as it should."""
        with connect(self.port) as connection:
            connection.settimeout(60)
            connection.sendall(http_post(path, json.dumps(fields | {"stream": True}).encode(), "Connection: close"))
            events = [line for line in read_all(connection).split(b"\r\n") if line.startswith(b"data: ")]
        assert events.pop().strip() == b"data: [DONE]"
        return [json.loads(event[6:], parse_constant=_refuse) for event in events]

    def idle(self) -> bool:
        state = self.engine.state()
        return state["running"] == state["waiting"] == 0


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@contextlib.contextmanager
def serving(model: str, settings: ServerSettings | None = None, **engine: Any) -> Iterator[Served]:
    """Serves a small model with few programs, compiled when they are first used."""
    from jaxserve.engine.async_engine import AsyncEngine

    few: dict[str, Any] = {
        "page_size": 4, "num_pages": 512, "max_running_requests": 4, "chunked_prefill_size": 64,
        "prefill_token_buckets": (64,), "decode_batch_buckets": (4,), "skip_warmup": True,
    }  # fmt: skip
    config = EngineConfig(model=model, **few | engine)
    served, is_ready = Served(), threading.Event()

    def on_ready(engine: Any, url: str) -> None:
        served.engine, served.url = engine, url
        is_ready.set()

    process = ServerProcess(lambda: AsyncEngine.from_config(config), settings or ServerSettings(port=0), on_ready)
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    assert is_ready.wait(120)
    yield served
    process.stop()
    thread.join(10)
    assert not thread.is_alive()
