"""Sends a workload to a server at a rate, or as fast as a limit on concurrency allows."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxserve.bench.serve_client import Answer, Target, ask, gather, message_of, session
from jaxserve.bench.serve_workload import Prompt
from jaxserve.core.errors import ConfigError, JaxserveError

FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")  # SGLang's, vLLM's


class BenchError(JaxserveError):
    """Nothing could be measured: no server, a refusal, or no request that succeeded."""


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    Attributes:
        request_rate: requests a second on average, ``inf`` for all at once.
        burstiness: shape of the gamma distribution of pauses: 1 is a Poisson process, less comes in bursts, more is
            steadier.
        max_concurrency: most requests open at a time; further ones wait in the client, and are timed from when they
            are sent.
        warmups: requests before the measurement, sent one after the other and not counted.
        timeout_s: most seconds for one request.
        ready_timeout_s: how long a server may go on loading.
        flush_cache: empty the server's prefix cache after the warm-ups.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    warmups: int = 1
    timeout_s: float = 3600.0
    ready_timeout_s: float = 600.0
    flush_cache: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("--request-rate", self.request_rate, self.request_rate > 0, "more than 0, or inf"),
            ("--burstiness", self.burstiness, 0 < self.burstiness < math.inf, "more than 0"),
            ("--max-concurrency", self.max_concurrency, self.max_concurrency is None or self.max_concurrency > 0,
             "at least 1"),
            ("--warmups", self.warmups, self.warmups >= 0, "0 or more"),
            ("--timeout", self.timeout_s, self.timeout_s > 0, "more than 0"),
        )  # fmt: skip
        for flag, value, good, wanted in checks:
            if not good:
                raise ConfigError(f"{flag} must be {wanted}, got {value}")

    def arrivals(self, count: int) -> list[float]:
        """Seconds after the start at which each request is due."""
        if math.isinf(self.request_rate):
            return [0.0] * count
        rng = random.Random(self.seed)
        scale = 1.0 / (self.request_rate * self.burstiness)
        due = [0.0]
        for _ in range(count - 1):
            due.append(due[-1] + rng.gammavariate(self.burstiness, scale))
        return due[:count]


@dataclass(frozen=True)
class Measured:
    """What a run saw.

    Attributes:
        duration_s: from the first request's sending to the last one's end.
        client_cpu_s: processor time of this process meanwhile; it may compete with the server for cores.
        late_s: the furthest a request was sent behind its time without a limit on concurrency to blame.
    """

    answers: list[Answer]
    duration_s: float
    client_cpu_s: float
    late_s: float


async def measure(target: Target, prompts: Sequence[Prompt], load: Load, say: Callable[[str], None]) -> Measured:
    """Warms the server up, sends all prompts, and waits for their ends.

    Raises:
        BenchError: the server refuses a warm-up request, or has no prefix cache to flush.
    """
    async with session(load.timeout_s) as client:
        for number in range(load.warmups):
            answer = await ask(client, target, prompts[number % len(prompts)])
            if answer.error is not None:
                raise BenchError(f"the warm-up request failed: {answer.error}: {answer.detail}")
        if load.flush_cache:
            await _flush(client, target)
        say(f"sending {len(prompts)} requests")
        gate = asyncio.Semaphore(load.max_concurrency or len(prompts) or 1)
        late = 0.0
        done = 0
        cpu, start = time.process_time(), time.perf_counter()

        async def one(prompt: Prompt) -> Answer:
            nonlocal done
            async with gate:
                answer = await ask(client, target, prompt)
            done += 1
            if done % max(1, len(prompts) // 10) == 0:
                say(f"{done} of {len(prompts)} done after {time.perf_counter() - start:.1f} s")
            return answer

        tasks = []
        for prompt, due in zip(prompts, load.arrivals(len(prompts)), strict=True):
            if due:
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                late = max(late, time.perf_counter() - start - due)
            tasks.append(asyncio.create_task(one(prompt)))
        answers = await gather(tasks)
        cpu = time.process_time() - cpu
    first, last = min((a.sent_s for a in answers), default=start), max((a.ended_s for a in answers), default=start)
    return Measured(answers, last - first, cpu, late)


async def _flush(client: aiohttp.ClientSession, target: Target) -> None:
    seen = []
    for path in FLUSH_PATHS:
        async with client.post(target.url + path, headers=target.headers) as response:
            if response.status < 300:
                return
            seen.append(f"{path}: {response.status}")
    raise BenchError(f"--flush-cache: the server has no way to empty its prefix cache ({', '.join(seen)})")


async def find_model(url: str, headers: dict[str, str], load: Load, say: Callable[[str], None]) -> tuple[str, Any]:
    """(name of the first model a server lists, its longest context or None); waits while it loads.

    Raises:
        BenchError: nothing answers, or not with a list of models.
    """
    deadline = time.monotonic() + load.ready_timeout_s
    waiting = False
    async with session(min(60.0, load.timeout_s)) as client:
        while True:
            status, body = await _models(client, url, headers)
            if status != 503 or time.monotonic() > deadline:
                break
            if not waiting:
                say(f"{url} is loading; waiting")
            waiting = True
            await asyncio.sleep(0.5)
    if status in (401, 403):
        raise BenchError(f"{url} wants an API key ({message_of(body)}); give it with --api-key or JAXSERVE_API_KEY")
    if status != 200:
        raise BenchError(f"{url}/v1/models answered {status} ({message_of(body)}); if it is not there, give --model")
    try:
        import orjson

        first = orjson.loads(body)["data"][0]
        return str(first["id"]), first.get("max_model_len")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BenchError(f"{url}/v1/models did not list a model; is that an OpenAI-compatible server?") from None


async def _models(client: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    try:
        async with client.get(f"{url}/v1/models", headers=headers) as response:
            return response.status, await response.read()
    except aiohttp.ClientConnectorError as error:
        raise BenchError(f"nothing answers at {url} ({error.os_error.strerror or error}); start a server there, "
                         "give --base-url, or let --start MODEL start one") from None  # fmt: skip
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BenchError(f"{url} does not answer HTTP: {type(error).__name__}: {error}") from None
