"""The engine's own decode and verify programs, compiled for an H100 without one."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxserve.attention.base import AttentionBackend
from jaxserve.attention.paged_cuda import PagedCudaBackend
from jaxserve.attention.xla import XlaBackend
from jaxserve.barrier.native import native_module
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.models.config import ModelConfig
from jaxserve.testing.deviceless import compile_for_h100
from jaxserve.testing.scheduled_hlo import uses_after
from jaxserve.testing.step_programs import copies_of_shape, step_program

pytestmark = pytest.mark.h100

TABLES = [f"tables[{i}]" for i in range(5)]


def llama() -> ModelConfig:
    """Two layers in the proportions of an 8B Llama."""
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 1024,
        "intermediate_size": 3584, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 1024, "tie_word_embeddings": False, "rope_theta": 500000.0,
    }  # fmt: skip
    return ModelConfig.from_hf(raw, {}, source="test")


@pytest.mark.parametrize(
    ("mode", "queries"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 4)], ids=["decode", "verify"]
)
@pytest.mark.parametrize("backend", [XlaBackend(), PagedCudaBackend("xla")], ids=lambda backend: backend.name)
def test_engine_programs_read_shared_rows_before_the_marker(
    cuda_module, mode: ForwardMode, queries: int, backend: AttentionBackend
):
    native_module("CUDA")
    function, arguments = step_program(
        llama(), backend, mode, batch=8, queries=queries, context_length=512, dtype=jnp.bfloat16
    )
    text = compile_for_h100(function, *arguments, donate=(1, 2)).as_text()
    assert 'custom_call_target="jaxserve_snapshot"' in text
    assert " conditional(" not in text  # the host would wait for its predicate, see ``runner.either``
    kernels = text.count('custom_call_target="jaxserve_paged_attention_bf16"')
    assert kernels == (llama().num_layers if backend.name == "paged-cuda" else 0)
    assert uses_after(text, TABLES, "jaxserve_snapshot", concurrent=True) == []
    assert copies_of_shape(text, arguments[1].data.shape) == []
