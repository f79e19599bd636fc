"""A real server on a loopback port, in a thread or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from jaxserve.server.app import create_app
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.listen import listen
from jaxserve.server.settings import ServerSettings

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@contextlib.contextmanager
def live(engine: Any, **settings: Any) -> Iterator[int]:
    """Serves ``engine`` from a thread; gives the port."""
    listener = listen("127.0.0.1", 0)
    app = create_app(Lifecycle(engine), ServerSettings(**settings))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    port = listener.getsockname()[1]
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(5)


def eventually(holds: Callable[[], bool], timeout_s: float = 2.0) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def connect(port: int) -> socket.socket:
    """A TCP connection that does not hang a test."""
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def http_post(path: str, body: bytes, *headers: str) -> bytes:
    """The bytes of a POST request."""
    head = [f"POST {path} HTTP/1.1", "Host: server", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    received = b""
    while True:
        part = connection.recv(65536)
        if not part:
            return received
        received += part


class Process:
    """``serve_scripted.py`` as a child; ``expect`` reads its output line by line."""

    def __init__(
        self,
        port: int = 0,
        load_s: float = 0.0,
        step_s: float = 0.0,
        drain_s: float = 5.0,
        hangup: signal.Handlers = signal.SIG_DFL,  # set, as the tests themselves may run under nohup
    ):
        command = [sys.executable, str(HERE / "serve_scripted.py"), str(port), str(load_s), str(step_s), str(drain_s)]
        env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
        self.child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.child.kill()
        self.child.communicate()

    def expect(self, start: str) -> str:
        """The rest of the next output line, which must start with ``start``."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line.startswith(start), line + (self.child.stderr.read() if not line and self.child.stderr else "")
        return line[len(start) :].strip()

    def exit_code(self, timeout_s: float) -> int:
        """Waits for the exit."""
        return self.child.wait(timeout_s)
