"""The native kernel computes what the XLA backend computes, and both what a plain softmax does."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.attention.base import AttentionStep, LiveRows, StepMetadata, StepShape, Tree
from jaxserve.attention.native import NativeBackend
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.attention.xla import XlaBackend
from jaxserve.barrier.native import native_module
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.verify import tree_geometry

CASES = [
    # batch, queries, heads, kv heads, dim, page size, context lengths, window
    (1, 1, 9, 3, 64, 16, [200], None),
    (4, 1, 4, 2, 16, 4, [0, 1, 5, 63], None),
    (2, 5, 6, 3, 128, 16, [700, 3], None),
    (3, 4, 5, 1, 20, 1, [17, 0, 2], None),
    (2, 3, 8, 8, 80, 8, [40, 300], 16),
    (1, 40, 4, 2, 16, 4, [11], 8),
    (1, 64, 2, 2, 32, 64, [0], None),
]


def make_case(batch, queries, heads, kv_heads, dim, page_size, lengths, window):
    random = np.random.default_rng(hash((batch, queries, heads, dim)) % 2**32)
    width = -(-(max(lengths) + queries) // page_size)
    num_pages = 1 + batch * width
    data = random.standard_normal((2, 2, kv_heads, num_pages, page_size, dim)).astype(np.float32)
    tables = random.permutation(np.arange(1, num_pages)).reshape(batch, width).astype(np.int32)
    q = random.standard_normal((batch, queries, heads, dim)).astype(np.float32)
    k, v = random.standard_normal((2, batch, queries, kv_heads, dim)).astype(np.float32)
    shape = StepShape(ForwardMode.TARGET_VERIFY, batch, queries, width, page_size)
    unused = jnp.zeros((batch, queries), jnp.int32)
    metadata = StepMetadata(jnp.asarray(tables), jnp.asarray(lengths, jnp.int32), unused, unused)
    live = LiveRows(jnp.zeros(batch, jnp.int32), jnp.asarray(tables), jnp.zeros((batch, 1), jnp.int32), ffi=False)
    step = AttentionStep(shape, metadata, PagedKV(jnp.asarray(data)), live, (None, window), None)
    return step, q, k, v


def plain_attention(step, layer, q, k, v, sinks=None):
    """One query at a time, in float64."""
    window = step.windows[layer]
    data, tables = np.asarray(step.pool.data, np.float64), np.asarray(step.metadata.block_tables)
    batch, queries, heads, dim = q.shape
    out = np.zeros(q.shape)
    for b in range(batch):
        length = int(step.metadata.lengths[b])
        rows = [(tables[b, p // step.shape.page_size], p % step.shape.page_size) for p in range(length)]
        for h in range(heads):
            kv = h // (heads // k.shape[2])
            keys = [data[layer, 0, kv, page, offset] for page, offset in rows] + list(k[b, :, kv].astype(np.float64))
            values = [data[layer, 1, kv, page, offset] for page, offset in rows] + list(v[b, :, kv].astype(np.float64))
            for i in range(queries):
                depths = np.arange(queries) if step.tree is None else np.asarray(step.tree.depths[b])
                sees = np.arange(queries) <= i if step.tree is None else np.asarray(step.tree.seen[b, i])
                begin = -1 if window is None else length + depths[i] - window
                seen = [p for p in range(length) if p > begin]
                seen += [length + j for j in range(queries) if sees[j] and length + depths[j] > begin]
                scores = np.array(keys)[seen] @ q[b, i, h].astype(np.float64) / np.sqrt(dim)
                if sinks is not None:
                    scores = np.append(scores, sinks[h])
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights[: len(seen)] @ np.array(values)[seen] / weights.sum()
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", [NativeBackend(), XlaBackend()], ids=lambda b: b.name)
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "window"])
def test_attention_equals_plain_softmax(case, backend, layer):
    native_module("cpu")
    step, q, k, v = make_case(*case)
    got = jax.jit(lambda q, k, v: backend.attend(step, layer, q, k, v))(q, k, v)
    np.testing.assert_allclose(np.asarray(got), plain_attention(step, layer, q, k, v), atol=2e-5)


TREE_CASES = [  # the last one has more new tokens than fit a block of the kernel, and a context that ends a chunk
    (2, 5, 4, 2, 16, 4, [9, 0], 3),
    (3, 8, 9, 3, 64, 16, [250, 17, 1], 6),
    (1, 64, 2, 1, 32, 16, [256], 20),
]


@pytest.mark.parametrize("case", TREE_CASES, ids=str)
@pytest.mark.parametrize("backend", [NativeBackend(), XlaBackend()], ids=lambda b: b.name)
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "window"])
def test_tree_attention_equals_plain_softmax(case, backend, layer):
    native_module("cpu")
    step, q, k, v = make_case(*case)
    random = np.random.default_rng(6)
    parents = [[random.integers(max(0, n - 3), n + 1) for n in range(case[1] - 1)] for _ in range(case[0])]
    depths, seen = tree_geometry(jnp.asarray(parents, jnp.int32))
    assert not all(np.array_equal(row, np.tri(case[1], dtype=bool)) for row in seen)  # no chains
    step = dataclasses.replace(step, tree=Tree(seen, depths))
    got = jax.jit(lambda q, k, v: backend.attend(step, layer, q, k, v))(q, k, v)
    np.testing.assert_allclose(np.asarray(got), plain_attention(step, layer, q, k, v), atol=2e-5)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4], CASES[5]], ids=str)
@pytest.mark.parametrize("backend", [NativeBackend(), XlaBackend()], ids=lambda b: b.name)
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "window"])
def test_sinks_equal_plain_softmax(case, backend, layer):
    native_module("cpu")
    step, q, k, v = make_case(*case)
    # From sinks that take nothing to sinks that take almost all.
    sinks = np.linspace(-200, 12, case[2]).astype(np.float32)
    sinks[-1] = 200
    got = jax.jit(lambda q, k, v, sinks: backend.attend(step, layer, q, k, v, sinks))(q, k, v, sinks)
    np.testing.assert_allclose(np.asarray(got), plain_attention(step, layer, q, k, v, sinks), atol=2e-5)


def test_sinks_are_one_per_head():
    native_module("cpu")
    step, q, k, v = make_case(*CASES[0])
    with pytest.raises(Exception, match="sinks must be one per query head"):
        jax.block_until_ready(NativeBackend().attend(step, 0, q, k, v, jnp.zeros(3)))


def test_extreme_scores_stay_finite():
    """The largest score decides alone; exp must neither overflow nor lose it."""
    native_module("cpu")
    step, q, k, v = make_case(*CASES[0])
    got = jax.jit(lambda q, k, v: NativeBackend().attend(step, 0, q, k, v))(q * 1000, k, v)
    np.testing.assert_allclose(np.asarray(got), plain_attention(step, 0, q * 1000, k, v), atol=2e-4)


def test_a_page_outside_the_pool_is_an_error_not_a_fault():
    native_module("cpu")
    step, q, k, v = make_case(*CASES[0])
    bad = step.metadata._replace(block_tables=step.metadata.block_tables.at[0, 3].set(10_000))
    broken = AttentionStep(step.shape, bad, step.pool, step.live, step.windows, None)
    with pytest.raises(Exception, match="page outside the pool"):
        jax.block_until_ready(jax.jit(lambda q, k, v: NativeBackend().attend(broken, 0, q, k, v))(q, k, v))
