"""Device memory holds the weights once and the pool as configured, before and after serving; nothing stays behind."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import pytest
from tiny import write_tiny

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.llm import LLM

SMALL_BYTES = 64 << 10  # relay, shared rows, results of the last step


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_weights_once_and_the_pool_as_configured(tmp_path):
    model = write_tiny(tmp_path / "tiny")
    before = live_bytes()
    with LLM(
        str(model), context_length=128, num_pages=500, page_size=8, max_running_requests=2, chunked_prefill_size=16,
        skip_warmup=True,
    ) as llm:  # fmt: skip
        runner = llm.engine.parts.worker.model_runner
        weights = sum(leaf.nbytes for leaf in runner.model.leaves)
        pool = runner.pool.data.nbytes
        assert (
            pool == 2 * 2 * 2 * 501 * 8 * 16 * 4
        )  # layers, K and V, heads, pages and the null page, tokens, dim, bytes
        assert abs(live_bytes() - before - weights - pool) < SMALL_BYTES
        llm.generate([[1, 2, 3], list(range(40))], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        assert abs(live_bytes() - before - weights - pool) < SMALL_BYTES
    del llm, runner


def num_mappings() -> int:
    gc.collect()
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux counts memory mappings")
def test_a_closed_engine_leaves_no_programs_behind(tmp_path):
    """Each takes dozens of memory mappings, and a process may have 65530."""
    model = write_tiny(tmp_path / "tiny")

    def mappings_after(is_open: bool) -> int:
        with LLM(
            str(model), context_length=64, max_running_requests=2, chunked_prefill_size=16, skip_warmup=True,
            speculative_algorithm="NGRAM",
        ) as llm:  # fmt: skip
            llm.generate([[1, 2, 3] * 8], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
            while_open = num_mappings()
        del llm
        return while_open if is_open else num_mappings()

    mappings_after(False)  # what stays for good is there now
    closed = mappings_after(False)
    needed = mappings_after(True) - closed
    assert needed > 50, "nothing is measured"
    for _ in range(3):
        assert mappings_after(False) < closed + needed / 2
