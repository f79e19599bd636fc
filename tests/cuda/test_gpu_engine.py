"""The kernel, the backends and an engine on a GPU."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from test_fake_attention import CASES, Case, problem, reference

from jaxserve.attention.base import AttentionBackend
from jaxserve.attention.paged_cuda import PagedCudaBackend, has_cudnn, prompt_attention
from jaxserve.attention.xla import XlaBackend
from jaxserve.barrier.native import native_module
from jaxserve.bench.models import TINY_QWEN3, write_model
from jaxserve.bench.stepping import run_greedily
from jaxserve.core.config import EngineConfig
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.engine.engine import Engine
from jaxserve.testing import backend_conformance

pytestmark = pytest.mark.gpu
LONG = Case((4096, 1, 777), queries=4, heads=32, kv_heads=8, dim=128)


@pytest.mark.parametrize("case", [*CASES.values(), LONG], ids=[*CASES, "long"])
def test_the_kernel_agrees_with_the_gather_backend(monkeypatch, case: Case):
    native_module("gpu")
    if case.splits is not None:
        monkeypatch.setattr("jaxserve.attention.paged_cuda.num_splits", lambda *_: case.splits)
    step, *projections = problem(case)
    out = np.asarray(PagedCudaBackend("xla").attend(step, 1, *projections), np.float32)
    np.testing.assert_allclose(out, reference(step, *projections), rtol=0.01, atol=0.01)


@pytest.mark.skipif(not has_cudnn(), reason="no cuDNN")
@pytest.mark.parametrize("window", [None, 7])
def test_prompts_by_cudnn_agree_with_the_gather_backend(window):
    case = Case((192,), queries=64, heads=8, dim=128, window=window)
    step, q, k, v, _ = problem(case, mode=ForwardMode.EXTEND)
    out = prompt_attention(step, 1, q, k, v, implementation="cudnn")
    expected = XlaBackend().attend(step, 1, q, k, v)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.02)


@pytest.mark.parametrize("backend", [XlaBackend(), PagedCudaBackend()], ids=lambda backend: backend.name)
def test_backends_keep_the_contract(backend: AttentionBackend):
    backend_conformance(backend, page_sizes=(16, 32), dtype=jnp.bfloat16, tolerance=0.05, head_dim=64)


WAYS = {
    "coarse": {"force_coarse_war_barrier": True},
    "fine": {},
    "one by one": {"disable_overlap_schedule": True},
    "no graphs": {"graph_backend": "xla"},
    "marker in the graph": {"graph_snapshot": "inside"},
}


@pytest.mark.parametrize("backend", ["xla", "paged-cuda"])
def test_tokens_are_the_same_however_a_step_is_fenced_and_launched(tmp_path, backend):
    folder = write_model(tmp_path / "tiny", TINY_QWEN3, 128)
    prompts = np.random.default_rng(3).integers(0, 256, (4, 20)).tolist()
    found = {}
    for name, settings in WAYS.items():
        engine = Engine(
            EngineConfig(
                model=str(folder), load_format="dummy", num_pages=64, decode_batch_buckets=(4,),
                max_running_requests=4, attention_backend=backend, chunked_prefill_size=32, grammar_backend="none",
                compilation_cache_dir="", **settings,
            )
        )  # fmt: skip
        try:
            found[name] = [run_greedily(engine, prompts, 48).tokens for _ in range(2)]
        finally:
            engine.close()
    assert len({token for one in found["coarse"][0] for token in one}) > 8  # not one token for ever
    for name, runs in found.items():
        assert runs == [found["coarse"][0]] * 2, name
