"""One server process of a tiny checkpoint: from its start through mixed traffic and leaving clients to a hard end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soak
from live_server import connect, eventually, http_post, read_all

from jaxserve.bench.serve_process import ServerUnderTest
from jaxserve.server.listen import listen

CHECKPOINT = Path(__file__).parent.parent / "fixtures" / "gqa"
SOAK_S = 15
LENGTH = 240
# pages for four requests of LENGTH and nothing else
FLAGS = ("--context-length", "256", "--max-running-requests", "4", "--page-size", "8", "--num-pages", "132",
         "--chunked-prefill-size", "32", "--prefill-token-buckets", "32", "--decode-batch-buckets", "4")  # fmt: skip


class Served:
    """The process, and what was seen while it started: (seconds, /health, /health/ready, seconds /health took)."""

    def __init__(self, server: ServerUnderTest):
        self.process, self.url = server.process, server.url
        self.port = int(server.url.rsplit(":", 1)[1])
        self.start: list[tuple[int, int, float]] = []

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    def watch_start(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            began = time.monotonic()
            health, took = self.status("/health"), time.monotonic() - began
            self.start.append((health, self.status("/health/ready"), took))
            if self.start[-1][1] == 200:
                return
            time.sleep(0.02)
        raise AssertionError("not ready in two minutes")

    def post(self, **fields: Any) -> dict[str, Any]:
        body = json.dumps({"prompt": "Hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0} | fields)
        with urllib.request.urlopen(self.url + "/v1/completions", body.encode(), timeout=60) as response:
            return json.load(response)

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + "/get_server_info", timeout=10) as response:
            return json.load(response)["state"]

    def idle(self) -> bool:
        state = self.state()
        return (
            state["running"] == state["waiting"] == 0
            and state["pages_free"] + state.get("pages_evictable", 0) == state["pages_total"]
        )

    def metric(self, name: str, label: str = "") -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"jaxserve:{name}") and label in line)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with ServerUnderTest(str(CHECKPOINT), FLAGS) as server:
        served = Served(server)
        served.watch_start()
        yield served


def test_ready_means_ready_and_health_answers_while_compiling(served: Served) -> None:
    """O-36 (c)."""
    first = time.monotonic()
    served.post()
    first = time.monotonic() - first
    later = []
    for _ in range(5):
        began = time.monotonic()
        served.post()
        later.append(time.monotonic() - began)
    assert {health for health, _, _ in served.start} == {200}
    assert [ready for _, ready, _ in served.start] == [503] * (len(served.start) - 1) + [200]
    assert len(served.start) > 5  # it was asked while it loaded
    assert statistics.median(took for _, _, took in served.start) < 0.2
    assert first < 5 * statistics.median(later) + 0.2  # a compile would take longer than that


@pytest.mark.parametrize("when", ["whole", "stream", "queued", "before reading"])
def test_clients_that_leave_give_everything_back(served: Served, when: str) -> None:
    """O-19: 50 clients in all leave, the pool has room for four."""
    asked = LENGTH - 8
    body = {"prompt": "Hi", "max_tokens": asked, "ignore_eos": True, "stream": when in ("stream", "before reading")}
    if when == "before reading":
        body["max_tokens"] = 2
    data = http_post("/v1/completions", json.dumps(body).encode())
    assert eventually(served.idle, 10)
    aborted = served.metric("request_success_total", 'finished_reason="abort"')
    rng = random.Random(when)
    with contextlib.ExitStack() as holders:
        if when == "queued":  # four others have all slots
            for _ in range(4):
                holder = holders.enter_context(connect(served.port))
                holder.sendall(http_post("/v1/completions", json.dumps(body | {"stream": True}).encode()))
                assert holder.recv(100)
        for _ in range(13):
            connection = connect(served.port)
            connection.sendall(data)
            if when == "stream":
                assert connection.recv(100)
            else:
                time.sleep(rng.random() * 0.02)
            connection.close()
    assert eventually(served.idle, 2)  # within two seconds
    generated = served.metric("generation_tokens_total")
    if when != "before reading":
        assert served.metric("request_success_total", 'finished_reason="abort"') > aborted
    assert len(served.post()["choices"]) == 1  # alive
    assert served.metric("generation_tokens_total") == generated + 8  # and nobody else was still generating


def test_mixed_traffic(served: Served) -> None:
    """Some seconds of what ``make soak`` does for twenty minutes."""
    pid, url = served.process.pid, served.url
    found = asyncio.run(soak.soak(url, pid, SOAK_S, clients=6, seed=3))
    assert found["problems"] == []
    assert found["counts"]["outputs"] > 100 and found["counts"]["left"] > 10


def test_mixed_traffic_finds_what_is_wrong() -> None:
    """The judge of the soak has teeth: each of its rules refuses something."""
    run = soak.Soak("http://x", 128, 1)
    run.counts.update({"outputs": 10, "tokens": 50, "left": 2, "left tokens": 20, "prompt tokens": 30})
    state = {"running": 0, "waiting": 0, "pages_free": 9, "pages_total": 9, "late_compiles": 0}
    good = {"jaxserve:request_success_total{}": 11.0, "jaxserve:generation_tokens_total{}": 60.0,
            "jaxserve:prompt_tokens_total{}": 34.0, 'jaxserve:http_requests_total{status="200"}': 12.0}  # fmt: skip
    assert soak.judge(run, state, good, 3.0) == []
    for change in ({"running": 1}, {"pages_free": 8}, {"late_compiles": 1}):
        assert len(soak.judge(run, state | change, good, 3.0)) == 1
    for name, value in (("request_success_total{}", 9.0), ("request_success_total{}", 13.0),
                        ("generation_tokens_total{}", 49.0), ("generation_tokens_total{}", 71.0),
                        ("prompt_tokens_total{}", 29.0), ('http_requests_total{status="500"}', 1.0),
                        ("late_compiles_total{}", 1.0)):  # fmt: skip
        assert len(soak.judge(run, state, good | {f"jaxserve:{name}": value}, 3.0)) == 1
    assert len(soak.judge(run, state, good, soak.GROWTH_MIB + 1)) == 1


def test_a_killed_server_ends_streams_and_frees_its_port(served: Served) -> None:
    """O-37, SIGKILL: one process is server and engine, so nothing of it is left. Last here: it is gone afterwards."""
    body = {"prompt": "Hi", "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
    streams = [connect(served.port) for _ in range(4)]
    for stream in streams:
        stream.sendall(http_post("/v1/completions", json.dumps(body).encode()))
        assert stream.recv(100)
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text()
    served.process.send_signal(signal.SIGKILL)
    assert served.process.wait(5) == -signal.SIGKILL
    for stream in streams:
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = read_all(stream)
        assert b"[DONE]" not in received and not received.endswith(b"0\r\n\r\n")  # broken, which clients notice
    assert children.strip() == ""  # nobody to be orphaned
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port))
    with listen("127.0.0.1", served.port):
        pass


def test_a_second_server_on_the_port_fails_before_it_loads() -> None:
    """O-37, port conflict, by the command itself."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "jaxserve", "serve", str(CHECKPOINT), "--port", str(port)]
        began = time.monotonic()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert ended.returncode == 1 and time.monotonic() - began < 10
        assert f"port {port}" in ended.stderr and "loading" not in ended.stdout and "Traceback" not in ended.stderr
