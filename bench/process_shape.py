"""What HTTP costs the step loop: the time of decode steps without clients, and with clients in another process.

    python bench/process_shape.py --model default --clients 8 32

Rounds take turns within one process. Without clients the step thread runs the same sequences with nobody to hand tokens
to. Clients read bytes and do nothing with them, so that they cost as little as clients can.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.server.launch import ServerProcess
from jaxserve.server.settings import ServerSettings

PROMPT = "The keeper of the lighthouse"


def drain(port: int, clients: int, tokens: int, stream: bool) -> None:
    """The client process: sends all requests, reads until the server closes."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(clients):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + data)
        selector.register(connection, selectors.EVENT_READ)
    received = 0
    while selector.get_map():
        for key, _ in selector.select():
            part = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            received += len(part)
            if not part:
                selector.unregister(key.fileobj)
    print(json.dumps({"bytes": received, "cpu_s": time.process_time()}))


class Steps:
    """Ends of the engine's steps, with the number of deltas of each."""

    def __init__(self, engine: Any):
        self.seen: list[tuple[float, int]] = []
        self._step = engine.step
        engine.step = self

    def __call__(self) -> Any:
        deltas = self._step()
        self.seen.append((time.perf_counter(), len(deltas)))
        return deltas

    def periods_ms(self, batch: int) -> list[float]:
        """Times between steps that each made ``batch`` tokens."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return [1e3 * (end - start) for (start, a), (end, b) in pairs if a == b == batch]


class Experiment:
    """Runs rounds beside a served engine."""

    def __init__(self, engine: AsyncEngine, port: int, tokens: int):
        self._engine, self._port, self._tokens = engine, port, tokens
        self._steps = Steps(engine._engine)
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)

    def alone(self, batch: int) -> dict[str, float]:
        """Sequences without clients, on the step thread."""
        done = threading.Event()
        params = SamplingParams(max_tokens=self._tokens, ignore_eos=True, temperature=0.0)
        ids = tuple(self._engine.tokenizer.encode(PROMPT))

        def go() -> None:
            inner = self._engine._engine
            for number in range(batch):
                inner.add(Request(f"alone-{number}", ids, params, PROMPT))
            while inner.has_work:
                inner.step()
            done.set()

        return self._measured(batch, lambda: (self._engine._commands.put(go), done.wait()))

    def served(self, batch: int, stream: bool = True) -> dict[str, float]:
        """As many clients."""
        command = [sys.executable, __file__, "--drain", str(self._port), "--clients", str(batch), "--tokens",
                   str(self._tokens), *([] if stream else ["--whole"])]  # fmt: skip
        return self._measured(batch, lambda: subprocess.run(command, check=True, capture_output=True))

    def _measured(self, batch: int, work: Any) -> dict[str, float]:
        self._steps.seen.clear()
        cpu = time.clock_gettime(self._clock)
        work()
        cpu = time.clock_gettime(self._clock) - cpu
        periods = sorted(self._steps.periods_ms(batch))
        found = {"median_ms": statistics.median(periods), "mean_ms": statistics.fmean(periods)}
        found |= {"p95_ms": periods[int(0.95 * len(periods))], "steps": float(len(periods))}
        return found | {"loop_us_a_token": 1e6 * cpu / batch / self._tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drain", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drain:
        drain(arguments.drain, arguments.clients[0], arguments.tokens, not arguments.whole)
        return
    most = max(arguments.clients)
    config = EngineConfig(model=arguments.model, context_length=256, max_running_requests=most,
                          decode_batch_buckets=tuple(arguments.clients), skip_warmup=True)  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {}

    def measure(engine: Any, url: str) -> None:
        experiment = Experiment(engine, int(url.rsplit(":", 1)[1]), arguments.tokens)
        for batch in arguments.clients:
            experiment.served(batch)  # warms everything up
            for _ in range(arguments.rounds):
                for name, way in (("alone", experiment.alone), ("streams", experiment.served),
                                  ("whole answers", lambda n: experiment.served(n, stream=False))):  # fmt: skip
                    found.setdefault(f"{batch} {name}", []).append(way(batch))
        server.stop()

    def on_ready(engine: Any, url: str) -> None:
        threading.Thread(target=measure, args=(engine, url), daemon=True).start()

    server = ServerProcess(lambda: AsyncEngine.from_config(config), ServerSettings(port=0), on_ready)
    server.run()
    for name, rounds in found.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        print(f"{name:<20}" + "  ".join(f"{key} {value:8.2f}" for key, value in middle.items()))


if __name__ == "__main__":
    main()
