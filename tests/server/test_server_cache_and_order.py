"""The prefix cache, salts, priorities, full queues and hanging steps, as clients see them: real engine, real server."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import HERE, eventually, live
from real_server import Served, serving

from jaxserve.core.config import EngineConfig

CHECKPOINT = Path(__file__).parent.parent / "fixtures" / "gqa"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MOST_OPEN = 6  # four run, two wait


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(str(CHECKPOINT), schedule_policy="priority", max_queued_requests=MOST_OPEN - 4) as served:
        yield served


@pytest.fixture
def empty(served: Served) -> Served:
    """The server with nothing in its cache."""
    assert eventually(served.idle, 10)
    assert httpx.post(served.url + "/flush_cache").status_code == 200
    return served


def cached(served: Served, path: str = TEXT, prompt: str = "Once upon a time there was a miller", **fields: Any) -> int:
    """Cached tokens of one request."""
    content = {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
    usage = served.post(path, max_tokens=3, temperature=0, **content, **fields)["usage"]
    assert eventually(served.idle, 10)  # what it leaves is cached when its end is committed
    return usage["prompt_tokens_details"]["cached_tokens"]


@contextlib.contextmanager
def waiting(served: Served, bodies: list[dict[str, Any]]) -> Iterator[list[httpx.Response]]:
    """Requests that arrived in this order and wait, while nothing is computed. Behind it they have been answered, and
    the list has the answers, as they were sent."""
    engine = served.engine._engine
    plan, answers, threads = engine._plan, [httpx.Response(0)] * len(bodies), []

    def ask(number: int) -> None:
        body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True} | bodies[number]
        answers[number] = httpx.post(served.url + TEXT, json=body, timeout=60)

    engine._plan = lambda: time.sleep(0.002)
    try:
        for number in range(len(bodies)):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            assert eventually(lambda: len(engine.open_requests) == len(threads), 10)
        yield answers
    finally:
        engine._plan = plan
        for thread in threads:
            thread.join(60)


def metric(served: Served, name: str) -> float:
    lines = httpx.get(served.url + "/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith(f"jaxserve:{name}{{")]
    return float(line.split()[-1])


# -- cache -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_flushed_cache_has_nothing_for_anybody(empty: Served, path: str) -> None:
    assert cached(empty, path) == 0 < cached(empty, path)
    answer = httpx.post(empty.url + "/flush_cache").json()
    assert answer["status"] == "ok" and answer["freed_pages"] > 0
    assert cached(empty, path) == 0 < cached(empty, path)
    assert httpx.get(empty.url + "/flush_cache").json()["freed_pages"] > 0  # SGLang's clients use both methods
    assert httpx.post(empty.url + "/flush_cache").json()["freed_pages"] == 0


def test_the_cache_is_not_flushed_while_a_request_waits(empty: Served) -> None:
    assert cached(empty) == 0 < (before := cached(empty))
    with waiting(empty, [{}]) as answers:
        refused = httpx.post(empty.url + "/flush_cache")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_overloaded"
    assert "while requests run" in refused.json()["error"]["message"] and refused.headers["retry-after"] == "1"
    assert answers[0].status_code == 200 and cached(empty) == before


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_salts_part_what_is_cached(empty: Served, path: str) -> None:
    """O-23, over HTTP: a, a, b, none, none; a salt of nothing is no salt and is refused."""
    found = [cached(empty, path, **({"cache_salt": salt} if salt else {})) for salt in ("a", "a", "b", None, None)]
    assert [tokens > 0 for tokens in found] == [False, True, False, False, True]
    status, body = empty.post_raw(path, b'{"prompt": "x", "messages": [], "cache_salt": ""}')
    assert status == 400 and body["error"]["param"]


def test_metrics_say_what_usage_says(empty: Served) -> None:
    """Queries and hits are the prompt and cached tokens of all usages; the rate is their quotient since the start."""
    hits, queries = metric(empty, "prefix_cache_hits_total"), metric(empty, "prefix_cache_queries_total")
    prompt = found = 0
    for text in ("Once upon a time there was a miller", "Once upon a time there was a baker", "Another", "x" * 90):
        for _ in range(2):
            usage = empty.post(TEXT, prompt=text, max_tokens=2)["usage"]
            prompt, found = prompt + usage["prompt_tokens"], found + usage["prompt_tokens_details"]["cached_tokens"]
            assert eventually(empty.idle, 10)
    assert 0 < found < prompt
    assert metric(empty, "prefix_cache_queries_total") == queries + prompt
    assert metric(empty, "prefix_cache_hits_total") == hits + found
    assert metric(empty, "cache_hit_rate") == pytest.approx((hits + found) / (queries + prompt))


# -- order -------------------------------------------------------------------------------------------------------------


def test_the_lowest_priority_number_is_answered_first(empty: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equals in order of arrival; none is 0. All are equally long, so they end in the order they begin."""
    scheduler = empty.engine._engine.scheduler
    ended, finish = [], scheduler.finish

    def recorded(sequence: Any, reason: Any) -> None:
        ended.append((sequence.request.priority, sequence.arrival))
        finish(sequence, reason)

    monkeypatch.setattr(scheduler, "finish", recorded)
    with waiting(empty, [{"priority": p} for p in (5, None, 9, -7, 5, -8)]) as answers:
        pass
    assert [answer.status_code for answer in answers] == [200] * MOST_OPEN
    assert [priority for priority, _ in ended] == [-8, -7, 0, 5, 5, 9] and ended == sorted(ended)


def test_a_full_queue_is_a_429_that_says_when_to_retry(empty: Served) -> None:
    with waiting(empty, [{}] * MOST_OPEN) as answers:
        full = httpx.post(empty.url + TEXT, json={"prompt": "Hi"})
        many = httpx.post(empty.url + TEXT, json={"prompt": ["a", "b"]})
        stream = httpx.post(empty.url + TEXT, json={"prompt": "Hi", "stream": True})
    for refused in (full, many, stream):
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "--max-queued-requests" in refused.json()["error"]["message"]
    assert [answer.status_code for answer in answers] == [200] * MOST_OPEN and cached(empty) == 0


# -- a step that does not come back ------------------------------------------------------------------------------------


def test_a_step_that_hangs_is_an_error_for_everybody() -> None:
    """Those who wait get it, later requests are refused, and health says that it is over."""
    from jaxserve.engine.async_engine import AsyncEngine

    few: dict[str, Any] = {"num_pages": 64, "skip_warmup": True, "watchdog_timeout_s": 0.4}
    engine, go_on = AsyncEngine.from_config(EngineConfig(model=str(CHECKPOINT), **few)), threading.Event()
    engine._engine.step = lambda: go_on.wait(60) and []  # type: ignore[method-assign]
    why, answers = "a step has not come back within 0.4 s (--watchdog-timeout)", dict[bool, httpx.Response]()
    with live(engine) as port:
        url = f"http://127.0.0.1:{port}"

        def ask(stream: bool) -> None:
            answers[stream] = httpx.post(url + TEXT, json={"prompt": "Hi", "stream": stream}, timeout=30)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: len(engine._streams) == 2, 10)
        assert httpx.get(url + "/health").status_code == 200
        asyncio.run(engine.start())  # takes both, and its first step hangs
        for thread in threads:
            thread.join(30)
        for refused in (*answers.values(), httpx.post(url + TEXT, json={"prompt": "Hi"})):
            assert refused.status_code == 503 and refused.headers["retry-after"] == "10"
            assert refused.json()["error"] == {
                "message": f"the engine has stopped: {why}; restart the server", "type": "service_unavailable_error",
                "param": None, "code": "engine_dead",
            }  # fmt: skip
        for path in ("/health", "/health/ready"):
            answer = httpx.get(url + path)
            assert answer.status_code == 503 and why in answer.json()["reason"]
        assert httpx.post(url + "/flush_cache").status_code == 503
        go_on.set()
        asyncio.run(engine.stop(0))


def test_a_step_that_hangs_ends_the_process_with_code_1() -> None:
    """Exit codes: docs/server.md. The client that waits gets its error before."""
    command = [sys.executable, str(HERE / "serve_hanging.py"), str(CHECKPOINT), "--watchdog-timeout", "0.5"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        ready = next(line for line in iter(child.stdout.readline, "") if line.startswith("ready:"))
        answer = httpx.post(ready.split()[-1] + "/completions", json={"prompt": "Hi"}, timeout=30)
        assert answer.status_code == 503 and "--watchdog-timeout" in answer.json()["error"]["message"]
        _, problem = child.communicate(timeout=30)
        assert child.returncode == 1
        assert "error: a step has not come back within 0.5 s" in problem and "Traceback" not in problem
    finally:
        child.kill()
        child.communicate()
