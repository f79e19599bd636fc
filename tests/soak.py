"""Mixed traffic on a real server for as long as wanted, and what must hold when it ends.

    python tests/soak.py --minutes 20 --model default

Every answer is checked as it comes. At the end all pages and slots must be free, memory must not have grown beyond a
bound, nothing may have been compiled late, no 5xx may have been sent, and the counters must fit what clients saw.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from jaxserve.bench.serve_client import message_of
from jaxserve.bench.serve_process import ServerUnderTest

SCHEMA = {
    "type": "object", "properties": {"name": {"enum": ["look_up", "stop"]}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"], "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"prompt": "Hi", "temperature": -1}, {"prompt": "Hi", "max_tokens": -1}, {"prompt": "Hi", "no_such_field": 1},
    {"prompt": ""}, {"max_tokens": 3}, {"prompt": "Hi", "max_tokens": 10**6}, {"prompt": [10**9]},
    {"prompt": "Hi", "n": 0}, {"prompt": "Hi", "stop": 5},
]  # fmt: skip
GROWTH_MIB = 32  # of resident memory, from a third of the time to its end; it was below 5 in all runs so far


class Soak:
    """The clients of one run.

    Attributes:
        counts: requests by kind; and ``tokens``, ``prompt tokens``, ``outputs`` of complete answers; ``left``: requests
            whose client went away, and ``left tokens``, the most they can have made.
        problems: what should not have been.
    """

    def __init__(self, url: str, context: int, seed: int, think_s: float = 0.0):
        self.url, self._context, self._rng, self._think_s = url, context, random.Random(seed), think_s
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self._first_answer: str | None = None

    async def run(self, seconds: float, clients: int) -> None:
        """``clients`` at once, each sending one thing after the other."""
        deadline = time.monotonic() + seconds
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.completion, self.completion, self.chat_stream, self.chat_stream, self.several, self.tool_like,
            self.long_prompt, self.leave_in_stream, self.leave_at_once, self.bad, self.controls, self.known_answer,
        ]  # fmt: skip
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as self._http:

            async def client() -> None:
                while time.monotonic() < deadline:
                    kind = self._rng.choice(kinds)
                    self.counts[kind.__name__] += 1
                    await asyncio.sleep(self._rng.random() * 2 * self._think_s)
                    try:
                        await kind()
                    except Exception as error:
                        self.problems.append(f"{kind.__name__}: {type(error).__name__}: {error}")

            await asyncio.gather(*(client() for _ in range(clients)))

    def text(self, longest: int = 40) -> str:
        return "".join(self._rng.choices("abcdefgh ijkl éß漢🙂\n", k=self._rng.randint(1, longest)))

    async def answer(self, path: str, **body: Any) -> dict[str, Any]:
        """A whole answer, checked."""
        async with self._http.post(self.url + path, json=body) as response:
            raw = await response.read()
        if response.status != 200:
            raise AssertionError(f"{path} {response.status}: {message_of(raw)} for {json.dumps(body)[:200]}")
        found = json.loads(raw)
        usage, n = found["usage"], body.get("n", 1)
        self._complete(usage, n)
        if len(found["choices"]) != n or not n <= usage["completion_tokens"] <= n * body["max_tokens"]:
            raise AssertionError(f"{path}: {len(found['choices'])} choices of {n}, usage {usage} for {body}")
        return found

    def _complete(self, usage: dict[str, int], n: int) -> None:
        self.counts["tokens"] += usage["completion_tokens"]
        self.counts["prompt tokens"] += usage["prompt_tokens"]
        self.counts["outputs"] += n

    async def events(self, path: str, **body: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream; it must end with ``[DONE]``."""
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.post(self.url + path, json=body) as response:
            if response.status != 200:
                raise AssertionError(f"{path} {response.status}: {message_of(await response.read())}")
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise AssertionError(f"error in the stream: {event}")
                    yield event
        raise AssertionError("a stream ended without [DONE]")

    # -- kinds of traffic ----------------------------------------------------------------------------------------------

    async def completion(self) -> None:
        ask = {"prompt": self.text(), "max_tokens": self._rng.randint(1, 24), "temperature": self._rng.random()}
        await self.answer("/v1/completions", **ask)

    async def chat_stream(self) -> None:
        messages = [{"role": "user", "content": self.text(20)}]
        if self._rng.random() < 0.5:
            messages += [{"role": "assistant", "content": self.text(9)}, {"role": "user", "content": self.text(9)}]
        usage = None
        async for event in self.events("/v1/chat/completions", messages=messages, max_tokens=16, stop=["zq"]):
            usage = event.get("usage") or usage
        assert usage is not None, "no usage"
        self._complete(usage, 1)

    async def several(self) -> None:
        await self.answer("/v1/completions", prompt=self.text(), n=3, max_tokens=8, seed=self._rng.randrange(2**31))

    async def tool_like(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "call", "schema": SCHEMA}}
        body = {"messages": [{"role": "user", "content": self.text(20)}], "response_format": form, "max_tokens": 60}
        choice = (await self.answer("/v1/chat/completions", temperature=1, **body))["choices"][0]
        call = json.loads(choice["message"]["content"])
        assert call["name"] in ("look_up", "stop") and isinstance(call["sure"], bool), call

    async def long_prompt(self) -> None:
        length = self._rng.randint(self._context // 2, self._context - 4)
        await self.answer("/v1/completions", prompt=[self._rng.randrange(32, 127) for _ in range(length)], max_tokens=3)

    async def leave_in_stream(self) -> None:
        wanted, limit = self._rng.randint(1, 5), self._context // 2
        self.counts["left"] += 1
        self.counts["left tokens"] += limit
        async for _ in self.events("/v1/completions", prompt="Hi", max_tokens=limit, ignore_eos=True):
            wanted -= 1
            if wanted == 0:
                return  # closes the connection

    async def leave_at_once(self) -> None:
        limit = self._context // 2
        self.counts["left"] += 1
        self.counts["left tokens"] += limit
        body = {"prompt": "Hi", "max_tokens": limit, "ignore_eos": True}
        try:
            await asyncio.wait_for(self._post(body), self._rng.random() * 0.02)
        except TimeoutError:
            return

    async def _post(self, body: dict[str, Any]) -> int:
        async with self._http.post(self.url + "/v1/completions", json=body) as response:
            await response.read()
            return response.status

    async def bad(self) -> None:
        body = self._rng.choice(BAD)
        status = await self._post(body)
        assert status == 400, f"{status} for {body}"

    async def controls(self) -> None:
        body = {"prompt": self.text(), "max_tokens": 8, "logprobs": 2, "frequency_penalty": 1.0, "top_k": 7}
        body |= {"top_p": 0.9, "min_tokens": 3, "logit_bias": {"40": 3}, "seed": 5, "temperature": 0.8}
        logprobs = (await self.answer("/v1/completions", **body))["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]), logprobs

    async def known_answer(self) -> None:
        """One request always has the same answer, whatever else runs."""
        body = {"prompt": "The keeper of the light", "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        text = (await self.answer("/v1/completions", **body))["choices"][0]["text"]
        self._first_answer = self._first_answer or text
        assert text == self._first_answer, f"{text!r}, was {self._first_answer!r}"


class Watched:
    """What the server says of itself."""

    def __init__(self, url: str, pid: int):
        self._url, self._pid = url, pid

    async def get(self, path: str) -> bytes:
        async with aiohttp.ClientSession() as http, http.get(self._url + path) as response:
            return await response.read()

    async def state(self) -> dict[str, Any]:
        return json.loads(await self.get("/get_server_info"))["state"]

    async def metrics(self) -> dict[str, float]:
        """Name with labels -> value."""
        text = (await self.get("/metrics")).decode()
        return {m[1]: float(m[2]) for m in re.finditer(r"^([a-z_:]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


def total(metrics: dict[str, float], name: str, label: str = "") -> float:
    """Sum over all series of a metric whose labels contain ``label``."""
    return sum(v for k, v in metrics.items() if k.split("{")[0] == f"jaxserve:{name}" and label in k)


async def soak(url: str, pid: int, seconds: float, clients: int, seed: int, think_s: float = 0.0) -> dict[str, Any]:
    """Runs the traffic; returns what was found, ``problems`` first."""
    watched = Watched(url, pid)
    while b'"ready"' not in await watched.get("/health/ready"):
        await asyncio.sleep(0.1)
    before = await watched.metrics()  # asking whether it was ready has made 503s
    info = json.loads(await watched.get("/get_server_info"))
    run = Soak(url, info["context_length"], seed, think_s)
    await run.run(seconds / 3, clients)
    early = watched.rss_mib()
    await run.run(seconds * 2 / 3, clients)
    deadline = time.monotonic() + 10
    while (state := await watched.state())["running"] + state["waiting"] and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    late, metrics = watched.rss_mib(), await watched.metrics()
    metrics = {name: value - before.get(name, 0.0) for name, value in metrics.items()}
    return {"problems": [*run.problems, *judge(run, state, metrics, late - early)], "counts": dict(run.counts),
            "rss_mib": {"at a third": early, "at the end": late}, "seconds": seconds, "clients": clients,
            "finished": {k: v for k, v in metrics.items() if "request_success_total" in k}}  # fmt: skip


def judge(run: Soak, state: dict[str, Any], metrics: dict[str, float], growth_mib: float) -> list[str]:
    """What does not hold."""
    counts = run.counts
    ended, tokens = total(metrics, "request_success_total"), total(metrics, "generation_tokens_total")
    checks = {
        "sequences are left": state["running"] == state["waiting"] == 0,
        "pages are left": state["pages_free"] + state.get("pages_evictable", 0) == state["pages_total"],
        "programs were compiled late": state["late_compiles"] == total(metrics, "late_compiles_total") == 0,
        "5xx were sent": total(metrics, "http_requests_total", 'status="5') == 0,
        "memory grew": growth_mib <= GROWTH_MIB,
        "outputs do not add up": counts["outputs"] <= ended <= counts["outputs"] + counts["left"],
        "tokens do not add up": counts["tokens"] <= tokens <= counts["tokens"] + counts["left tokens"],
        "prompts do not add up": total(metrics, "prompt_tokens_total") >= counts["prompt tokens"],
        "nothing was left half done": counts["left"] > 0,
        "requests are open": total(metrics, "http_requests_open") <= 1,  # the one that asks
    }
    numbers = f"{state}, growth {growth_mib:.0f} MiB, ended {ended:.0f}, tokens {tokens:.0f}, {dict(counts)}"
    return [f"{what}: {numbers}" for what, holds in checks.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--model", default="default")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds a client pauses before a request")
    arguments, flags = parser.parse_known_args()
    flags = flags or ["--context-length", "256", "--max-running-requests", "8", "--num-pages", "96"]
    with ServerUnderTest(arguments.model, flags, lambda line: print(line, file=sys.stderr)) as server:
        seconds = 60 * arguments.minutes
        found = asyncio.run(
            soak(server.url, server.process.pid, seconds, arguments.clients, arguments.seed, arguments.think)
        )
    print(json.dumps(found | {"problems": found["problems"][:20]}, indent=1))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
