"""What the compiler made of the step programs: no shared read after the marker, no copy of the pool, pool donated."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tiny import write_tiny

from jaxserve.attention.hybrid import HybridBackend
from jaxserve.attention.native import NativeBackend
from jaxserve.attention.xla import PlannedBackend, XlaBackend, XlaLiveBackend
from jaxserve.barrier.native import native_module
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.llm import LLM
from jaxserve.models.config import ModelConfig
from jaxserve.testing.scheduled_hlo import uses_after
from jaxserve.testing.step_programs import (
    aliased_outputs,
    compiled_text,
    copies_of_shape,
    donated_parameters,
    prep_program,
    step_program,
)

TABLES = [f"tables[{i}]" for i in range(7)]
SIZES = {
    ForwardMode.DECODE: {"batch": 4, "queries": 1},
    ForwardMode.TARGET_VERIFY: {"batch": 4, "queries": 5},
    ForwardMode.EXTEND: {"batch": 1, "queries": 32},
}
SNAPSHOT_BACKENDS = [XlaBackend(), NativeBackend(), HybridBackend(XlaBackend(), NativeBackend())]
MODES = [pytest.param(mode, id=mode.name.lower()) for mode in SIZES]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    native_module("cpu")
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    return ModelConfig.from_hf(raw, {}, source="test")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", SNAPSHOT_BACKENDS, ids=lambda b: b.name)
def test_shared_rows_are_read_by_the_snapshot_alone(config, backend, mode):
    text = compiled_text(*step_program(config, backend, mode, **SIZES[mode]))
    assert uses_after(text, TABLES, "jaxserve_snapshot", concurrent=True) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_prep_program_reads_shared_rows_in_its_snapshot_alone(mode):
    native_module("cpu")
    text = compiled_text(*prep_program(PlannedBackend(), mode, **SIZES[mode]), donate=())
    assert uses_after(text, TABLES, "jaxserve_snapshot", concurrent=True) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_planned_step_reads_no_shared_row(config, mode):
    """All its rows are operands of its own, so the end record may come before nothing shared."""
    text = compiled_text(*step_program(config, PlannedBackend(), mode, **SIZES[mode]))
    assert "jaxserve_snapshot" not in text
    assert uses_after(text, TABLES[1:], "jaxserve_record_end", concurrent=True) == []


def test_the_end_record_follows_live_reads(config):
    """xla-live reads in every layer, and says so by declaring POST_REPLAY."""
    text = compiled_text(*step_program(config, XlaLiveBackend(), ForwardMode.DECODE, batch=4))
    assert uses_after(text, TABLES, "jaxserve_record_end", concurrent=True) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", [*SNAPSHOT_BACKENDS, XlaLiveBackend(), PlannedBackend()], ids=lambda b: b.name)
def test_the_pool_is_donated_and_never_copied(config, backend, mode):
    function, arguments = step_program(config, backend, mode, **SIZES[mode])
    text = compiled_text(function, arguments)
    pool = arguments[1].data
    assert copies_of_shape(text, pool.shape) == []
    assert copies_of_shape(text, arguments[2].token_counts.shape) == []
    assert aliased_outputs(text) == list(donated_parameters(len(arguments[0])).values())  # the pool and the relay


def test_the_copy_detector_detects():
    def late_read(pool):
        return pool.at[0].set(1.0), pool  # the old value is still wanted, so it must be copied

    text = jax.jit(late_read, donate_argnums=0).lower(jax.ShapeDtypeStruct((8, 128), np.float32)).compile().as_text()
    assert copies_of_shape(text, (8, 128))


@pytest.mark.parametrize("backend", ["native", "xla", "xla-live", "planned"])
def test_the_pool_stays_at_one_address(tmp_path, backend):
    model = write_tiny(tmp_path / "tiny")
    with LLM(str(model), context_length=64, max_running_requests=2, chunked_prefill_size=16, attention_backend=backend,
             skip_warmup=True) as llm:  # fmt: skip
        runner = llm.engine.parts.worker.model_runner
        before = runner.pool.data.unsafe_buffer_pointer()
        llm.generate([[1, 2, 3], [4, 5, 6, 7]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        assert runner.pool.data.unsafe_buffer_pointer() == before
        tables = llm.engine.parts.rows.arrays()
        assert [t.unsafe_buffer_pointer() for t in tables] == [
            b.address for b in llm.engine.parts.rows._buffers.values()
        ]
