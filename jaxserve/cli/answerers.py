"""Who answers in ``jaxserve chat``: a model in this process, or a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any, Protocol

from jaxserve.cli.loading import say_loading
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, InvalidRequest, JaxserveError
from jaxserve.core.sampling_params import SamplingParams

Messages = list[dict[str, str]]


class Answerer(Protocol):
    """Answers a conversation piece by piece. Closing the generator stops the work behind it."""

    name: str

    def answer(self, messages: Messages) -> Generator[str, None, None]: ...

    def close(self) -> None: ...


class LocalAnswerer:
    """A model loaded into this process.

    Raises:
        ModelLoadError: from the constructor.
    """

    def __init__(self, config: EngineConfig, fields: dict[str, Any], trace: Path | None = None):
        import dataclasses

        from jaxserve.engine.llm import LLM

        self._params = SamplingParams(**({"max_tokens": None} | fields))
        say_loading(config)
        self._llm: Any = LLM(trace=trace, **dataclasses.asdict(config))
        self.name = config.served_model_name or config.model

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        deltas = self._llm.chat_stream(messages, self._params)
        try:
            for delta in deltas:
                if delta.finish_reason == "error":
                    raise JaxserveError(delta.error or "generation failed")
                yield delta.text
        finally:
            close = getattr(deltas, "close", None)
            if close is not None:
                close()

    def close(self) -> None:
        self._llm.close()


class RemoteAnswerer:
    """A server with the OpenAI API.

    Raises:
        ConfigError: the address is not one of HTTP.
        JaxserveError: from the constructor, when nothing answers at the address.
    """

    def __init__(self, url: str, fields: dict[str, Any], model: str | None = None, api_key: str | None = None):
        base = url.rstrip("/") if "://" in url else "http://" + url.rstrip("/")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, got {url!r}")
        self._base = base if base.endswith("/v1") else base + "/v1"
        self._fields = fields
        self._headers = {"Content-Type": "application/json"}
        key = api_key or os.environ.get("JAXSERVE_API_KEY")
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        with contextlib.closing(self._open("/models", None)) as response:
            try:
                served: str = json.load(response)["data"][0]["id"]
            except (ValueError, KeyError, IndexError, TypeError):
                raise JaxserveError(f"{self._base} answers, but not as the OpenAI API does; check --url") from None
        self.name = model or served

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        body = {"model": self.name, "messages": messages, "stream": True} | self._fields
        with contextlib.closing(self._open("/chat/completions", body)) as response:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return
                event = json.loads(line[6:])
                if "error" in event:
                    raise JaxserveError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
        raise JaxserveError("the server closed the connection in the middle of the answer")

    def close(self) -> None:
        pass

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._base + path, data, self._headers)
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            try:
                message = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = text[:200]
            if error.code == 400:
                raise InvalidRequest(message) from None
            raise JaxserveError(f"{self._base} answered {error.code}: {message}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error)
            raise JaxserveError(f"nothing answers at {self._base} ({reason}); is the server running?") from None
