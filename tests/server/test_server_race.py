"""A race found while serving ends the process with the report, whatever the clients are told."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = (
    "serve tests/fixtures/gqa --port 0 --race-check --disable-war-barrier --allow-unsafe --skip-warmup --page-size 4 "
    "--context-length 128 --prefill-token-buckets 16 --decode-batch-buckets 4 --max-running-requests 4"
)


def test_serve_dies_with_the_report():
    server = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", *COMMAND.split(), "--compilation-cache-dir", ""],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("ready: ")).split(" at ")[1].strip()
        body = json.dumps({"model": "default", "prompt": "Hello", "max_tokens": 60, "ignore_eos": True}).encode()
        with contextlib.suppress(OSError):  # a 503, or the end of the connection
            urllib.request.urlopen(f"{url}/completions", body, timeout=60).read()
        _, errors = server.communicate(timeout=60)
    finally:
        server.kill()
    assert server.returncode == 1
    assert "the race check is on" in errors
    assert "jaxserve serve: error: race on lengths row 0 (column 0)\n  write  by the schedule stream, " in errors
    assert "nothing orders them: the schedule stream had waited for nothing" in errors
