"""A server in a process of its own, for as long as a bench needs it."""

from __future__ import annotations

import collections
import ctypes
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from jaxserve.bench.serve_load import BenchError

PR_SET_PDEATHSIG = 1  # Linux: what this process gets when its parent is gone
STOP_S = 15.0


class ServerUnderTest:
    """``jaxserve serve MODEL --port 0`` with more flags; use it as a context manager.

    Attributes:
        url: base URL. It answers; that it has loaded is for whoever asks to find out.

    Raises:
        BenchError: it ends before it listens.
    """

    def __init__(self, model: str, flags: Sequence[str] = (), say: Callable[[str], None] = lambda line: None):
        command = [sys.executable, "-m", "jaxserve", "serve", "--model", model, "--port", "0", *flags]
        self._last: collections.deque[str] = collections.deque(maxlen=20)
        self._say = say
        self._ready_or_gone = threading.Event()
        self._is_ready = False
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        errors="replace", preexec_fn=end_with_parent)  # fmt: skip
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._last.append(line.rstrip())
            if found := re.match(r"listening on (\S+),", line):
                self.url = found.group(1)
                break
        else:
            raise BenchError(f"the server ended with code {self.process.wait()}: " + " | ".join(self._last))
        self._reader = threading.Thread(target=self._read, daemon=True)  # a full pipe would stop the server
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._last.append(line.rstrip())
            if line.startswith("ready:"):
                self._is_ready = True
                self._ready_or_gone.set()
            if line.startswith("ready:") or "warning" in line.lower() or "error" in line.lower():
                self._say(line.rstrip())
        self._ready_or_gone.set()

    def until_ready(self) -> None:
        """Blocks until it has loaded. Raises BenchError if it ends before."""
        self._ready_or_gone.wait()
        if not self._is_ready:
            raise BenchError(f"the server ended with code {self.process.wait()}: {self.last_words}")

    @property
    def last_words(self) -> str:
        """The end of what it printed."""
        return " | ".join(line for line in self._last if line)

    def __enter__(self) -> ServerUnderTest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def end_with_parent() -> None:
    """A child's ``preexec_fn``: it gets a stop signal when this process is gone, however that came."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
