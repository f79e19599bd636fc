"""An engine whose markers are those for graphs, on the fake CUDA runtime: the host does its part of the protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.models import MODELS, write_model
from jaxserve.bench.stepping import run_greedily
from jaxserve.core.config import EngineConfig
from jaxserve.engine.engine import Engine

HERE = Path(__file__).parent


def run_engine(folder: Path, graph_backend: str) -> dict[str, Any]:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "graph_engine.py"), str(folder), graph_backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=HERE)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_captured_steps_decode_and_verify(loaded, tmp_path):
    """Scheduler, barrier and speculation over steps that our extension captures and replays; every token is the
    likeliest but for rounding, given all before it."""
    found = run_engine(tmp_path / "fake", "cuda-graph")
    assert max(map(max, found["losses"])) < 0.03
    assert sum(loss == 0 for run in found["losses"] for loss in run) > 85  # of 96: few are ties
    assert len({token for one in found["tokens"] for token in one}) > 8  # not one token for ever
    assert found["fences"]["fine:marker"] >= 4 and found["fences"]["coarse:ngram"] >= 10
    first, second = found["captured"]
    assert first["uncaptured"] == 3 >= first["captured"] >= 2  # one decode program, two that verify
    assert second["replayed"] >= first["replayed"] + 8
    assert (second["moved"], second["uncaptured"]) == (0, 3)
    assert found["live"]["CapturedSteps"] == 0


def test_steps_with_markers_for_graphs_are_fenced_by_them(loaded, tmp_path):
    """Every generation that a fence or a launch waits for is found: the rows reach the programs, and tokens are those
    of an ordinary engine. That events bind to the right launch of a real graph is for a card to show."""
    found = run_engine(tmp_path / "fake", "xla-cmdbuf")
    assert found["inside"] == {"EXTEND": 1, "DECODE": 1}
    assert found["fences"]["fine:marker"] > 20

    folder = write_model(tmp_path / "plain", MODELS["tiny"], 64)
    engine = Engine(
        EngineConfig(
            model=str(folder), load_format="dummy", dtype="bfloat16", attention_backend="xla", num_pages=32,
            skip_warmup=True, max_running_requests=2, decode_batch_buckets=(2,), chunked_prefill_size=16,
            grammar_backend="none",
        )
    )  # fmt: skip
    try:
        prompts = np.random.default_rng(2).integers(0, 256, (2, 16)).tolist()
        assert found["tokens"] == run_greedily(engine, prompts, 24).tokens
    finally:
        engine.close()
