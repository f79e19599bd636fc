"""A server whose answers come at planted times: to check what measures it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxserve.bench import serve_client, serve_load

TAKEN_WITHIN_S = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class PlantedClock:
    """The clock of a bench, which goes on only when the server says so: however busy the machine, times are exact.

    ``parties`` requests are answered in step: time passes when all of them have come so far, and when the client has
    taken every event that was sent to it. There must be a multiple of so many requests, and no warm-up.
    """

    def __init__(self, parties: int):
        self._parties = parties
        self._now = 1000.0
        self._sent = self._taken = 0
        self._together: asyncio.Barrier | None = None

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The bench reads this clock from now on."""
        take = serve_client._take

        def taken(*arguments: Any) -> None:
            take(*arguments)
            self._taken += 1

        monkeypatch.setattr(serve_client, "_take", taken)
        for module in (serve_client, serve_load):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        """Seconds."""
        return self._now

    monotonic = process_time = perf_counter

    def event_sent(self) -> None:
        """The server has sent an event that the client is to take."""
        self._sent += 1

    async def pass_time(self, seconds: float) -> None:
        """For each of the requests that are answered in step."""
        self._together = self._together or asyncio.Barrier(self._parties)
        async with asyncio.timeout(TAKEN_WITHIN_S):
            turn = await self._together.wait()
            while self._taken < self._sent:
                await asyncio.sleep(0.001)
            await self._together.wait()
            if turn == 0:
                self._now += seconds
            await self._together.wait()


@dataclass
class Planted:
    """How every answer goes.

    Attributes:
        first_s, gap_s: from request to first chunk, and between chunks.
        per_chunk: tokens that one chunk carries.
        usage: whether the last chunk has it; ``accepted`` drafts go into it.
        statuses: of the requests in turn, 200 for a stream; the last one repeats.
        breaks_after: the connection closes after so many chunks.
        error_after: an error frame after so many chunks.
        usage_s: from the last chunk to usage and end of the stream.
        clock: by which times pass; None for the real one.
        open, most_open, bodies: what was seen.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    per_chunk: int = 1
    usage: bool = True
    accepted: int | None = None
    statuses: tuple[int, ...] = (200,)
    breaks_after: int | None = None
    error_after: int | None = None
    models: bytes = b'{"data":[{"id":"planted"}]}'
    models_status: int = 200
    usage_s: float = 0.0
    clock: PlantedClock | None = None
    open: int = 0
    most_open: int = 0
    bodies: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(h.split(":")[1]) for h in head.split("\r\n") if h.startswith("content-length")), 0)
        body = await reader.readexactly(length)
        self.paths.append(head.split()[1])
        if head.startswith("get"):
            self._whole(writer, self.models_status, self.models)
        elif "/v1/" not in head.split()[1]:
            self._whole(writer, 404, b"{}")
        else:
            self.bodies.append(json.loads(body))
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            await self._generate(writer, self.bodies[-1], self.statuses[min(len(self.bodies), len(self.statuses)) - 1])
            self.open -= 1
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body)

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any], status: int) -> None:
        if status != 200:
            self._whole(writer, status, b'{"error":{"message":"planted refusal"}}')
            return
        writer.write(OK)
        chat = "messages" in body
        if chat:  # the role alone is no token
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        tokens = body["max_tokens"]
        for number in range(0, tokens, self.per_chunk):
            await self._pass_time(self.gap_s if number else self.first_s)
            if self.breaks_after == number:
                return
            if self.error_after == number:
                self._event(writer, {"error": {"message": "planted failure"}})
                return
            text = "x" * min(self.per_chunk, tokens - number)
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            choice["finish_reason"] = "length" if number + self.per_chunk >= tokens else None
            self._event(writer, {"choices": [choice]})
            await writer.drain()
        await self._pass_time(self.usage_s)
        if self.usage:
            usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": tokens}
            if self.accepted is not None:
                usage["completion_tokens_details"] = {
                    "accepted_prediction_tokens": self.accepted, "rejected_prediction_tokens": self.accepted,
                }  # fmt: skip
            self._event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")

    async def _pass_time(self, seconds: float) -> None:
        if self.clock is None:
            await asyncio.sleep(seconds)
        else:
            await self.clock.pass_time(seconds)

    def _event(self, writer: asyncio.StreamWriter, chunk: Any) -> None:
        if self.clock is not None:
            self.clock.event_sent()
        writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@contextlib.contextmanager
def planted(plan: Planted) -> Iterator[str]:
    """Serves it from a thread; gives the URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(plan.answer, "127.0.0.1", 0), loop).result(5)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
