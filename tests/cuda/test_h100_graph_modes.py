"""What the graph modes make of an engine's decode program, compiled for an H100 without one."""

from __future__ import annotations

import importlib.util
import mmap
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from test_h100_engine_programs import TABLES, llama

from jaxserve.attention.paged_cuda import PagedCudaBackend
from jaxserve.barrier.native import native_module
from jaxserve.bench.graph_calls import DRIVER_LAUNCHES, GRAPH_LAUNCHED, GRAPH_MADE, GRAPH_UPDATED
from jaxserve.core.config import EngineConfig
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.captured_steps import CapturedSteps
from jaxserve.runner.graph_mode import make_graph_mode
from jaxserve.testing.deviceless import compile_for_h100
from jaxserve.testing.hlo_text import parse_module
from jaxserve.testing.scheduled_hlo import uses_after
from jaxserve.testing.step_programs import copies_of_shape, step_program
from jaxserve.testing.thunk_sequence import SEQUENCE, GraphUse, graph_use, read_thunks

pytestmark = pytest.mark.h100


def compiled(folder: Path, **settings) -> tuple[str, GraphUse | None, tuple]:
    """(HLO, what runs in graphs, arguments) of a greedy decode program; None: XLA looked for no graphs.

    In a program that draws, the loops of the sampler's filters cut the graph.
    """
    native_module("CUDA")
    backend = PagedCudaBackend("xla")
    graph = make_graph_mode(EngineConfig(**settings), "cuda", backend, 3, llama())
    function, arguments = step_program(
        llama(), backend, ForwardMode.DECODE, batch=8, context_length=512, dtype=jnp.bfloat16, is_greedy=True,
        captured=CapturedSteps(None) if graph.captures else None,
    )  # fmt: skip
    with graph.tracing(ForwardMode.DECODE):
        done = compile_for_h100(
            function, *arguments, donate=(1, 2), options={"xla_dump_to": str(folder), **graph.options}
        )
    text = done.as_text()
    if not list(folder.glob(f"*{SEQUENCE}")):
        return text, None, arguments
    return text, graph_use(read_thunks(folder, parse_module(text))), arguments


def test_xla_makes_no_graphs(cuda_module, tmp_path):
    text, use, _ = compiled(tmp_path, graph_backend="xla")
    assert 'custom_call_target="jaxserve_paged_attention_bf16"' in text
    assert use is None
    assert list(tmp_path.glob("*after_optimizations.txt"))  # it was dumped all the same


def test_a_captured_step_takes_weights_and_pool_where_they_are(cuda_module, tmp_path):
    """It is one call between the snapshot and the sampler, and no weight is copied on its way into it."""
    text, use, arguments = compiled(tmp_path, graph_backend="cuda-graph")
    assert use is None
    calls = re.findall(r'custom_call_target="(jaxserve_\w+)"', text)
    assert calls == ["jaxserve_snapshot", "jaxserve_captured_step", "jaxserve_record_end"]
    assert uses_after(text, TABLES, "jaxserve_snapshot", concurrent=True) == []
    assert copies_of_shape(text, arguments[1].data.shape) == []
    [line] = [line for line in text.splitlines() if "jaxserve_captured_step" in line]
    names = re.findall(r"%[\w.-]+", line[line.index("custom-call(") : line.index("), custom_call_target")])
    assert len(names) == 12 + 8 * llama().num_layers
    [*_, pool, embedding, norms, _, lm_head] = names[:12]
    layers = [names[i : i + 4] for i in range(12, len(names), 8)]
    parameters = set(re.findall(r"(%[\w.-]+) = \S+ parameter\(", text))
    passed = [pool, embedding, norms, lm_head, *(name for layer in layers for name in layer)]
    assert [name for name in passed if name not in parameters] == []


def test_with_the_snapshot_outside_the_model_is_one_graph_and_the_kernel_is_in_it(cuda_module, tmp_path):
    _, use, _ = compiled(tmp_path, graph_backend="xla-cmdbuf")
    assert use is not None
    assert use.order[:2] == ("jaxserve_snapshot", f"graph({use.graphs[0]})")
    assert use.calls_inside.count("jaxserve_paged_attention_bf16") == llama().num_layers


def test_with_the_snapshot_inside_no_marker_splits_the_graph(cuda_module, tmp_path):
    text, use, arguments = compiled(tmp_path, graph_backend="xla-cmdbuf", graph_snapshot="inside")
    assert use is not None
    assert {"jaxserve_snapshot_graph", "jaxserve_record_end_graph"} <= set(use.calls_inside)
    assert not [name for name in use.order if name.startswith("jaxserve_")]
    # Inside a graph XLA chains its commands one by one, so the schedule is the order.
    assert uses_after(text, TABLES, "jaxserve_snapshot_graph", concurrent=True) == []
    assert copies_of_shape(text, arguments[1].data.shape) == []


def test_xla_notes_what_it_does_with_graphs_by_the_names_we_count():
    """They are literals of the plugin; were they renamed, updates would be reported as none."""
    [package] = importlib.util.find_spec("jax_plugins.xla_cuda13").submodule_search_locations
    [plugin] = Path(package).glob("xla_cuda_plugin*.so")
    with plugin.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for name in (GRAPH_MADE, GRAPH_UPDATED, GRAPH_LAUNCHED, *DRIVER_LAUNCHES):
            assert content.find(name.encode()) >= 0, name
        assert content.find(b"command_buffer::misspelt") < 0
