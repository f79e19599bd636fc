"""Programs compiled for an H100 without one: what would run there keeps every shared read before the marker."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.barrier.native import native_module
from jaxserve.barrier.ops import hold, record_end, snapshot
from jaxserve.testing.deviceless import compile_for_h100
from jaxserve.testing.scheduled_hlo import uses_after

pytestmark = pytest.mark.h100

BATCH, SLOTS, PAGES_PER_SLOT, PAGE_SIZE, PAGES = 8, 17, 32, 16, 64
LAYERS, HEADS, HEAD_DIM, VOCABULARY = 2, 4, 64, 512
MODEL_DIM = HEADS * HEAD_DIM
SHARED = ["slots", "block_tables", "lengths"]


def array(shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


SHAPES = (
    array((LAYERS, 2, PAGES * PAGE_SIZE, HEADS, HEAD_DIM), jnp.bfloat16),  # kv
    array((16,), jnp.uint32),  # ticket
    array((1, SLOTS - 1)),  # slots
    array((SLOTS, PAGES_PER_SLOT)),  # block_tables
    array((SLOTS, 1)),  # lengths
    array((BATCH,)),  # tokens
    array((VOCABULARY, MODEL_DIM), jnp.bfloat16),  # embedding
    array((LAYERS, MODEL_DIM, 4 * MODEL_DIM), jnp.bfloat16),  # weights
)


def decode(kv, tables, lengths, tokens, embedding, weights):
    """A decode step in small: gather pages by the block tables, attend, write the new KV, pick a token."""
    positions = jnp.arange(PAGES_PER_SLOT * PAGE_SIZE)
    kv_indices = tables[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    is_past = positions[None] < lengths
    x = embedding[tokens]
    for layer in range(LAYERS):
        projected = (x @ weights[layer]).reshape(BATCH, 4, HEADS, HEAD_DIM)
        query, key, value = projected[:, 0], projected[:, 1], projected[:, 2]
        written = jnp.take_along_axis(kv_indices, lengths, axis=1)[:, 0]
        kv = kv.at[layer, 0, written].set(key).at[layer, 1, written].set(value)
        scores = jnp.einsum("bhd,bthd->bht", query, kv[layer, 0][kv_indices]) + jnp.where(is_past, 0, -1e9)[:, None]
        mixed = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores), kv[layer, 1][kv_indices])
        x = x + jnp.tanh(mixed.reshape(BATCH, MODEL_DIM) + projected[:, 3].reshape(BATCH, MODEL_DIM))
    return kv, jnp.argmax(x @ embedding.T, axis=-1).astype(jnp.int32)


def step(kv, ticket, slots, block_tables, lengths, tokens, embedding, weights):
    _, (tables, past) = snapshot(
        ticket, slots, [block_tables, lengths], num_rows=BATCH, widths=[PAGES_PER_SLOT, 1]
    )  # fmt: skip
    kv, chosen = decode(kv, tables, past, tokens, embedding, weights)
    return kv, chosen, record_end(ticket, chosen)


def compiled_text(function, *, target: str = "jaxserve_snapshot") -> str:
    native_module("CUDA")
    text = compile_for_h100(function, *SHAPES, donate=(0,)).as_text()
    assert f'custom_call_target="{target}"' in text
    return text


def test_a_decode_step_reads_shared_rows_in_the_snapshot_only(cuda_module):
    text = compiled_text(step)
    assert uses_after(text, SHARED, "jaxserve_snapshot") == []
    # Stronger than one stream needs: not even an independent reader stands beside the snapshot.
    assert uses_after(text, SHARED, "jaxserve_snapshot", concurrent=True) == []


def test_the_end_record_is_scheduled_behind_every_shared_read(cuda_module):
    assert uses_after(compiled_text(step), SHARED, "jaxserve_record_end") == []


def graph_step(kv, ticket, slots, block_tables, lengths, tokens, embedding, weights):
    """The same step with the graph variants of the markers."""
    results = [array((BATCH,)), array((BATCH, PAGES_PER_SLOT)), array((BATCH, 1))]
    _, tables, past = jax.ffi.ffi_call("jaxserve_snapshot_graph", results, has_side_effect=True)(
        ticket, slots, block_tables, lengths, channel=np.int64(1)
    )
    kv, chosen = decode(kv, tables, past, tokens, embedding, weights)
    end = jax.ffi.ffi_call("jaxserve_record_end_graph", array((1,), jnp.uint32), has_side_effect=True)(
        ticket, chosen, channel=np.int64(1), read_done=False
    )
    return kv, chosen, end


def test_the_graph_variants_prove_themselves_too(cuda_module):
    text = compiled_text(graph_step, target="jaxserve_snapshot_graph")
    # Inside a graph only data flow orders: the stronger proof is the one that counts.
    assert uses_after(text, SHARED, "jaxserve_snapshot_graph", concurrent=True) == []
    assert uses_after(text, SHARED, "jaxserve_record_end_graph", concurrent=True) == []


def thunks(function, folder) -> list[tuple[bool, str]]:
    """(whether inside a command buffer, kind) of every thunk, in order of execution."""
    native_module("CUDA")
    compile_for_h100(function, *SHAPES, donate=(0,), options={"xla_dump_to": str(folder)})
    (dump,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
    found = [re.match(r"(\s*)\d+: (\w+)", line) for line in dump.read_text().splitlines()]
    return [(bool(match.group(1)), match.group(2)) for match in found if match]


def test_the_graph_starts_right_behind_the_plain_snapshot(cuda_module, tmp_path):
    top = [kind for inside, kind in thunks(step, tmp_path) if not inside]
    assert top == ["kCustomCall", "kCommandBuffer", "kCustomCall"]


def test_the_graph_variants_stand_inside_the_graph(cuda_module, tmp_path):
    found = thunks(graph_step, tmp_path)
    assert [kind for inside, kind in found if not inside] == ["kCommandBuffer"]
    graphed = [kind for inside, kind in found if inside]
    assert graphed[0] == graphed[-1] == "kCustomCall"
    assert graphed.count("kCustomCall") == 2


def test_hold_and_compute_stream_targets_compile(cuda_module):
    native_module("CUDA")

    def learn(x):
        stream = jax.ffi.ffi_call("jaxserve_compute_stream", array((1,), jnp.uint32), has_side_effect=True)(x)
        return x + hold("gpu.test", stream)

    text = compile_for_h100(learn, array((4,))).as_text()
    assert 'custom_call_target="jaxserve_compute_stream"' in text
    assert 'custom_call_target="jaxserve_hold"' in text


def test_a_late_reader_is_found(cuda_module):
    def late(kv, ticket, slots, block_tables, lengths, tokens, embedding, weights):
        kv, chosen, end = step(kv, ticket, slots, block_tables, lengths, tokens, embedding, weights)
        return kv, chosen + lengths[chosen % SLOTS, 0], end

    findings = uses_after(compiled_text(late), SHARED, "jaxserve_snapshot")
    assert len(findings) == 1
    assert "(lengths" in findings[0]


def test_a_live_block_table_is_found(cuda_module):
    """The same step without a snapshot of the block tables, as a backend that reads them live would be."""

    def live(kv, ticket, slots, block_tables, lengths, tokens, embedding, weights):
        rows, (past,) = snapshot(ticket, slots, [lengths], num_rows=BATCH, widths=[1])
        kv, chosen = decode(kv, block_tables[rows], past, tokens, embedding, weights)
        return kv, chosen, record_end(ticket, chosen)

    text = compiled_text(live)
    assert any("(block_tables" in finding for finding in uses_after(text, SHARED, "jaxserve_snapshot"))
    assert uses_after(text, SHARED, "jaxserve_record_end") == []


def test_a_producer_that_the_compiler_duplicates_is_found(cuda_module):
    """Source order puts the only read in front of the marker; the compiled program may read again behind it."""
    native_module("CUDA")

    def step(ticket, lengths):
        doubled = lengths * 2
        marker = record_end(ticket, doubled.sum()).astype(jnp.int32)
        return doubled * (1 + marker[0])

    text = compile_for_h100(step, array((16,), jnp.uint32), array((SLOTS, 1))).as_text()
    assert uses_after(text, ["lengths"], "jaxserve_record_end") != []
