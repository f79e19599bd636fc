"""One streamed request of a serving bench: sent, read chunk by chunk, and timed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from jaxserve.bench.serve_workload import Prompt

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
NO_TOKENS = "answered without a token"
BROKEN = "stream broken off"


@dataclass(frozen=True)
class Target:
    """Where requests go and what they carry.

    Attributes:
        url: base URL without ``/v1``.
        endpoint: ``completions`` or ``chat``.
        headers: sent with every request.
        extra: more fields of every body.
    """

    url: str
    model: str
    endpoint: str = "completions"
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The JSON of a request."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": prompt.max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            body["prompt"] = prompt.content
        return body | self.extra


@dataclass
class Answer:
    """What became of one request. Times are ``time.perf_counter`` seconds.

    Attributes:
        sent_s: when it was sent.
        arrivals: when each chunk with text came, in order; chunks that came together have almost the same time.
        ended_s: when the last chunk of output came; for a failure, when that was noticed.
        prompt_tokens: by the server's usage; else by the tokenizer; 0 if neither knows.
        output_tokens: by the server's usage; else chunks with text.
        counted: whether ``output_tokens`` is the server's.
        accepted, rejected: drafts of speculation, where the server's usage tells.
        error: kind of failure, None for a success. ``detail`` says more.
    """

    sent_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    accepted: int | None = None
    rejected: int | None = None
    arrivals: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending to the first chunk with text."""
        return self.arrivals[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last chunk of output."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, (E2E - TTFT) / (n - 1); None for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls_s(self) -> list[float]:
        """Gaps between chunks with text."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def ask(session: aiohttp.ClientSession, target: Target, prompt: Prompt) -> Answer:
    """Sends one request and reads its stream. Never raises for what a server or a network can do."""
    answer = Answer(time.perf_counter(), prompt.num_tokens or 0)
    data = orjson.dumps(target.body(prompt))
    answer.sent_s = time.perf_counter()
    try:
        async with session.post(target.url + ENDPOINTS[target.endpoint], data=data, headers=target.headers) as response:
            if response.status != 200:
                answer.error, answer.detail = f"HTTP {response.status}", message_of(await response.read())
            else:
                await _read(response, answer)
    except TimeoutError:
        answer.error, answer.detail = "timeout", "no complete answer in the time of --timeout"
    except aiohttp.ClientConnectorError as error:
        answer.error, answer.detail = "no connection", str(error)
    except (aiohttp.ClientError, OSError) as error:
        answer.error, answer.detail = BROKEN, f"{type(error).__name__}: {error}"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        answer.error, answer.detail = "not the OpenAI API", f"{type(error).__name__}: {error}"
    if answer.error is not None or answer.ended_s == 0.0:
        answer.ended_s = time.perf_counter()
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    rest = b""
    async for part in response.content.iter_any():
        now = time.perf_counter()
        rest += part
        if b"\n" not in part:
            continue
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # comments and blank lines of the event stream
            data = line[5:].strip()
            if data == b"[DONE]":
                if not answer.arrivals and answer.output_tokens == 0:
                    answer.error = NO_TOKENS
                elif not answer.arrivals:  # tokens without text: special ones, or bytes of one character
                    answer.arrivals.append(answer.ended_s)
                if not answer.counted:
                    answer.output_tokens = len(answer.arrivals)
                return
            _take(orjson.loads(data), now, answer)
            if answer.error is not None:
                return
    answer.error, answer.detail = BROKEN, "the stream ended without [DONE]"


def _take(chunk: dict[str, Any], now: float, answer: Answer) -> None:
    if "error" in chunk:
        answer.error, answer.detail = "error in the stream", message_of(orjson.dumps(chunk))
        return
    for choice in chunk["choices"]:
        text = choice["text"] if "text" in choice else _said(choice["delta"])
        if text:
            answer.arrivals.append(now)
        if text or choice.get("finish_reason"):
            answer.ended_s = now
    usage = chunk.get("usage")
    if usage:
        answer.counted = True
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage.get("completion_tokens_details") or {}
        answer.accepted = details.get("accepted_prediction_tokens")
        answer.rejected = details.get("rejected_prediction_tokens")


def _said(delta: dict[str, Any]) -> str:
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def message_of(body: bytes) -> str:
    """What an error body says, shortened."""
    try:
        error = orjson.loads(body)
        error = error.get("error", error)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = body.decode("utf-8", "replace")
    return " ".join(text.split())[:300]


def session(timeout_s: float) -> aiohttp.ClientSession:
    """A client without a limit of its own on connections.

    Args:
        timeout_s: most seconds for one whole request.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    json_body = {"Content-Type": "application/json"}
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s), headers=json_body,
                                 read_bufsize=2**16)  # fmt: skip


async def gather(tasks: list[asyncio.Task[Answer]]) -> list[Answer]:
    """All answers; whatever interrupts the wait ends the requests."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
