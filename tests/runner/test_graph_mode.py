"""How programs reach a GPU: which settings mean what, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxserve.attention.hybrid import HybridBackend
from jaxserve.attention.paged_cuda import PagedCudaBackend
from jaxserve.attention.registry import make_backend
from jaxserve.attention.xla import PlannedBackend, XlaBackend, XlaLiveBackend
from jaxserve.barrier import ops
from jaxserve.bench.models import MODELS, write_model
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.engine.engine import Engine
from jaxserve.models.captured import can_be_captured
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.qwen3 import Qwen3ForCausalLM
from jaxserve.runner.graph_mode import GraphMode, make_graph_mode
from jaxserve.runner.program_cache import ProgramCache

LLAMA = ModelConfig("LlamaForCausalLM", 256, 64, 128, 1, 4, 2, 64)
CAPTURED = {"graph_backend": "cuda-graph", "backend": PagedCudaBackend()}


def mode_of(platform: str, backend=None, model=LLAMA, **settings) -> GraphMode:
    return make_graph_mode(EngineConfig(**settings), platform, backend or XlaBackend(), 7, model)


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
@pytest.mark.parametrize("name", ["auto", "xla-cmdbuf"])
def test_graphs_are_left_to_xla_with_the_markers_outside(platform, name):
    graph = mode_of(platform, graph_backend=name)
    assert (graph.name, graph.channel) == ("xla-cmdbuf", None)
    assert graph.options == {"xla_enable_command_buffers_during_profiling": True}  # a profile shows what runs without
    assert not any(graph.holds_markers(mode) for mode in ForwardMode)


def test_xla_turns_command_buffers_off():
    assert mode_of("gpu", graph_backend="xla").options == {"xla_gpu_enable_command_buffer": ""}


@pytest.mark.parametrize("name", ["auto", "xla", "xla-cmdbuf", "cuda-graph"])
def test_on_the_cpu_every_mode_is_jit(name):
    assert mode_of("cpu", graph_backend=name) == GraphMode("jit")


@pytest.mark.parametrize("backend", [PagedCudaBackend(), HybridBackend(XlaBackend(), PagedCudaBackend())])
@pytest.mark.parametrize("model", [LLAMA, replace(LLAMA, architecture="Qwen3ForCausalLM")])
def test_captured_steps_need_no_graphs_of_xla(backend, model):
    graph = mode_of("gpu", backend, model, graph_backend="cuda-graph")
    assert graph.captures
    assert graph.options == {"xla_gpu_enable_command_buffer": ""}
    assert not any(graph.holds_markers(mode) for mode in ForwardMode)


def test_a_model_that_inherits_from_one_that_can_be_captured_is_not():
    """What it changes would be left out of the captured step."""

    class Louder(LlamaForCausalLM):
        def logits(self, hidden):
            return 2 * super().logits(hidden)

    assert can_be_captured(LlamaForCausalLM)
    assert can_be_captured(Qwen3ForCausalLM)
    assert not can_be_captured(Louder)


def test_the_attention_backend_of_captured_steps_is_chosen_for_them():
    config = EngineConfig(graph_backend="cuda-graph")
    assert make_backend(config, "gpu", "bfloat16").name == "paged-cuda"
    assert make_backend(config, "cpu", "bfloat16").name == "xla"


def test_markers_inside_are_those_of_decode_and_verify():
    graph = mode_of("gpu", graph_snapshot="inside")
    assert graph.channel == 7
    assert {mode for mode in ForwardMode if graph.holds_markers(mode)} == {
        ForwardMode.DECODE, ForwardMode.TARGET_VERIFY,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("platform", "settings", "message"),
    [
        ("gpu", {"graph_backend": "cuda-graph"}, "hold the kernel of paged-cuda, and the attention backend is 'xla'"),
        ("gpu", {**CAPTURED, "model": replace(LLAMA, head_dim=80)}, "head dimensions 64, 96, 128, 192, 256, not 80"),
        ("gpu", {**CAPTURED, "model": replace(LLAMA, hidden_size=60)}, "a multiple of 8, got 60; choose xla or xla-"),
        (
            "gpu",
            {**CAPTURED, "model": replace(LLAMA, architecture="MiMoV2FlashForCausalLM")},
            "no decoder_parts of its",
        ),
        ("gpu", {**CAPTURED, "backend": HybridBackend(PagedCudaBackend(), XlaBackend())}, "backend is 'xla'"),
        ("gpu", {**CAPTURED, "graph_snapshot": "inside"}, "with cuda-graph XLA makes no graphs"),
        ("cpu", {"graph_snapshot": "inside"}, "needs CUDA graphs, and this is cpu"),
        ("gpu", {"graph_snapshot": "inside", "graph_backend": "xla"}, "needs --graph-backend xla-cmdbuf"),
        ("gpu", {"graph_snapshot": "inside", "shared_read_marker": False}, "needs the read-done marker"),
        ("gpu", {"graph_snapshot": "inside", "backend": XlaLiveBackend()}, "'xla-live' is not one"),
        ("gpu", {"graph_snapshot": "inside", "backend": PlannedBackend()}, "'planned' is not one"),
    ],
)
def test_what_cannot_work_is_refused(platform, settings, message):
    with pytest.raises(ConfigError, match=message):
        mode_of(platform, **settings)


@pytest.mark.parametrize("settings", [{"graph_backend": "graphs"}, {"graph_snapshot": "beside"}])
def test_unknown_names_are_refused_by_the_configuration(settings):
    with pytest.raises(ConfigError, match="must be"):
        EngineConfig(**settings)


def test_an_engine_refuses_before_it_loads_anything(tmp_path):
    said: list[str] = []
    folder = write_model(tmp_path / "tiny", MODELS["tiny"], 64)
    with pytest.raises(ConfigError, match="needs CUDA graphs, and this is cpu"):
        Engine(EngineConfig(model=str(folder), graph_snapshot="inside"), progress=said.append)
    assert said == []


def program(table):
    ticket = jnp.zeros(16, jnp.uint32)
    ids, (copy,) = ops.snapshot(ticket, jnp.zeros(2, jnp.int32), [table], num_rows=2, widths=[3])
    return copy, ids, ops.record_end(ticket, copy)


def lowered_text() -> str:
    jitted = jax.jit(lambda table: program(table))  # a function of its own: traces are remembered by function
    return jitted.trace(jax.ShapeDtypeStruct((4, 3), jnp.int32)).lower(lowering_platforms=("cuda",)).as_text()


def test_markers_traced_for_graphs_name_their_channel():
    with ops.markers_in_graph(12):
        text = lowered_text()
    assert "@jaxserve_snapshot_graph(" in text
    assert "@jaxserve_record_end_graph(" in text
    assert text.count("channel = 12 : i64") == 2
    assert "read_done = false" in text
    assert "_graph" not in lowered_text()  # and only inside of the context


def test_a_program_cache_compiles_with_the_options_it_is_given():
    class Key:
        label = "any"

        class shape:
            mode, batch, queries = ForwardMode.DECODE, 1, 1

    cache = ProgramCache(
        "step", lambda key: lambda x: x + 1, lambda key: (jax.ShapeDtypeStruct((2,), jnp.float32),), ("x",), (), print,
        graph=GraphMode("xla", {"no_such_option": "1"}),
    )  # fmt: skip
    with pytest.raises(Exception, match="no_such_option"):
        cache.get(Key())  # type: ignore[arg-type]
