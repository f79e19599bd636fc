"""``bench/waiting_queue.py`` measures what it says: decode steps of full batches, while others wait."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "waiting_queue.py"
SMALL = ["--waiting-len", "128", "--batch", "2", "--steps", "8", "--rounds", "2"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=300)


def test_steps_are_measured_with_a_queue_and_without(tmp_path):
    done = run(*SMALL, "--waiting", "50", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == json.loads(done.stdout)
    for why in ("slots", "pages"):
        assert set(found[why]["step_ms"]) == {"0", "50"}
        assert all(cpu > 0 for cpu in found[why]["cpu_ms"].values())
        ratio = found[why]["cpu_ratio"]
        assert ratio["least"] <= ratio["median"] <= ratio["most"]


def test_prompts_that_would_not_wait_are_refused():
    done = run(*SMALL, "--waiting", "5", "--waiting-len", "16")
    assert done.returncode and "a waiting prompt would find pages; raise --waiting-len" in done.stderr
