"""Captured decode and verify steps on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_engine import generate, losses
from test_fake_decoder import CASES, MODELS, captured_program, check, model_of, run_by_xla, step_of

from jaxserve.barrier.native import native_module
from jaxserve.bench.models import TINY_QWEN3, write_model
from jaxserve.core.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.models.draft import FINAL
from jaxserve.runner.captured_steps import CapturedSteps

pytestmark = pytest.mark.gpu

# Each compiles three programs; the others differ in what the fake device has shown.
ON_A_CARD = ("biases", "windows, one token each", "several splits", "tree, qwen3")


@pytest.mark.parametrize("case", ON_A_CARD)
def test_captured_steps_agree_with_the_flax_model(case):
    """The graph is captured at the second run of each; the results of all three are compared."""
    name, lengths, queries, tree = CASES[case]
    config = MODELS[name]
    points = (0, FINAL)
    step, tokens, positions = step_of(config, lengths, queries, tree, jnp.bfloat16)
    wide, _, _ = step_of(config, lengths, queries, tree, jnp.float32)
    loaded, exact = model_of(config, jnp.bfloat16), model_of(config, jnp.float32)
    with jax.default_matmul_precision("highest"):
        references = [
            run_by_xla(loaded, step, tokens, positions, points), run_by_xla(exact, wide, tokens, positions, points),
        ]  # fmt: skip
    captured = CapturedSteps(native_module("gpu"))
    try:
        program = captured_program(captured, loaded, step, points)
        found = [program(loaded.leaves, step.pool.data, tokens, positions) for _ in range(3)]
        for one in found:
            check(one, *references)
        counts = captured.counts()
        assert counts is not None and (counts.captured, counts.moved, counts.replayed) == (1, 0, 2)
        assert captured.replay_ms(len(lengths), queries) > 0  # type: ignore[operator]
    finally:
        captured.close()


def test_captured_steps_serve(tmp_path):
    """Greedy tokens of an engine, drafts and their verification among them, are the likeliest but for rounding."""
    folder = write_model(tmp_path / "tiny", TINY_QWEN3, 128)
    prompts = np.random.default_rng(3).integers(0, 256, (4, 20)).tolist()
    stalls = native_module("gpu").hold_points  # between the marker and the graph: rows are rewritten meanwhile
    ngram = {"speculative_algorithm": "NGRAM", "speculative_adaptive": False, "speculative_num_draft_tokens": 4}
    for settings, stall_us in (({}, 3000), (ngram, 0)):
        engine = Engine(
            EngineConfig(
                model=str(folder), load_format="dummy", num_pages=64, decode_batch_buckets=(4,),
                max_running_requests=4, chunked_prefill_size=32, grammar_backend="none", compilation_cache_dir="",
                graph_backend="cuda-graph", skip_warmup=True, **settings,
            )
        )  # fmt: skip
        try:
            if stall_us:
                stalls.delay("replay.before", stall_us)
            tokens = generate(engine, prompts, 48)
            counts = engine.parts.worker.model_runner.captured.counts()
            assert counts.replayed > 5 and counts.moved == 0
            lost = losses(engine.parts.model, prompts, tokens)
        finally:
            stalls.clear()
            engine.close()
        assert max(lost) < 0.03 and sum(loss == 0 for loss in lost) > 0.85 * len(lost)
