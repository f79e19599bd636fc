"""An engine whose markers are those for graphs, on the fake CUDA runtime: the host does its part of the protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from jaxserve.bench.models import MODELS, write_model
from jaxserve.bench.stepping import run_greedily
from jaxserve.core.config import EngineConfig
from jaxserve.engine.engine import Engine

HERE = Path(__file__).parent


def test_steps_with_markers_for_graphs_are_fenced_by_them(loaded, tmp_path):
    """Every generation that a fence or a launch waits for is found: the rows reach the programs, and tokens are those
    of an ordinary engine. That events bind to the right launch of a real graph is for a card to show."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "graph_engine.py"), str(tmp_path / "fake")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=HERE)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
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
