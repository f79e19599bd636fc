"""Processes that measure on request, one JSON object per line: each engine keeps its thread pools to itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
QUIET_S = 0.5  # between two measurements, so that the last one's threads have stopped spinning


class Worker:
    """A measuring process.

    Args:
        script: file in this folder whose ``main`` calls ``answer``.
        settings: handed to it as JSON.
        python: the interpreter that runs it.
    """

    def __init__(self, script: str, settings: dict[str, Any], python: str = sys.executable):
        self.name = script
        command = [python, str(HERE / script), json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.opened = self._read()

    def ask(self, **question: Any) -> dict[str, Any]:
        """Sends a question and waits for the answer."""
        time.sleep(QUIET_S)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; its error is above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def answer(open_: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[..., dict[str, Any]]]]) -> None:
    """The other side: opens with the settings, then answers questions until there are no more.

    What libraries print goes to standard error; standard output carries answers alone.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    opened, reply = open_(json.loads(sys.argv[1]))
    print(json.dumps(opened), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(reply(**json.loads(line))), file=answers, flush=True)
