"""The paged attention kernel's own body, run on the CPU with emulated instructions, against the gather backend."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.attention.base import AttentionStep, LiveRows, StepMetadata, StepShape, Tree
from jaxserve.attention.paged_cuda import PagedCudaBackend, num_splits, prompt_attention
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.attention.xla import XlaBackend
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.testing import backend_conformance


class OnFakeDevice(PagedCudaBackend):
    name = "paged-cuda-on-cpu"
    target = "fake_paged_attention_bf16"


@dataclasses.dataclass
class Case:
    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    page_size: int = 16
    window: int | None = None
    sinks: bool = False
    tree: bool = False
    splits: int | None = None  # None: as the backend chooses


def problem(case: Case, seed: int = 0, mode: ForwardMode = ForwardMode.TARGET_VERIFY):
    """(step, q, k, v, sinks): a pool full of NaN but for what the sequences hold."""
    rng = np.random.default_rng(seed)
    batch, width = len(case.lengths), max(1, -(-max(case.lengths) // case.page_size)) + 1
    pages = batch * width + 1
    pool = np.full((2, 2, case.kv_heads, pages, case.page_size, case.dim), np.nan, np.float32)
    tables = rng.permutation(np.arange(1, pages)).reshape(batch, width).astype(np.int32)
    for row, length in enumerate(case.lengths):
        for position in range(length):
            page, offset = tables[row, position // case.page_size], position % case.page_size
            pool[1, :, :, page, offset] = rng.normal(size=(2, case.kv_heads, case.dim))
        tables[row, -(-length // case.page_size) :] = 0
    tree = None
    if case.tree:
        parents = np.array([[rng.integers(0, i) if i else -1 for i in range(case.queries)] for _ in range(batch)])
        seen = np.zeros((batch, case.queries, case.queries), bool)
        for b in range(batch):
            for i in range(case.queries):
                seen[b, i, i] = True
                if i:
                    seen[b, i] |= seen[b, parents[b, i]]
        tree = Tree(jnp.asarray(seen), jnp.asarray(seen.sum(-1) - 1, jnp.int32))
    shape = StepShape(mode, batch, case.queries, width, case.page_size)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    nothing = jnp.zeros((batch, case.queries), jnp.int32)
    metadata = StepMetadata(jnp.asarray(tables), lengths, nothing, nothing)
    live = LiveRows(nothing[:, 0], metadata.block_tables, lengths[:, None], ffi=False)
    step = AttentionStep(
        shape, metadata, PagedKV(jnp.asarray(pool, jnp.bfloat16)), live, (None, case.window), None, tree
    )

    def normal(heads: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(batch, case.queries, heads, case.dim)), jnp.bfloat16)

    sinks = jnp.asarray(rng.normal(size=case.heads), jnp.float32) if case.sinks else None
    return step, normal(case.heads), normal(case.kv_heads), normal(case.kv_heads), sinks


CASES = {
    "one token": Case((37,)),
    "no context": Case((0, 16, 1)),
    "exact pages": Case((32, 48), page_size=32),
    "pages of 48": Case((100, 47), page_size=48),
    "pages of 64, dim 128": Case((150, 64), dim=128, page_size=64),
    "dim 96": Case((33,), dim=96),
    "dim 192": Case((20,), dim=192),
    "dim 256, one head per KV head": Case((35,), heads=2, dim=256),
    "many splits": Case((300, 5), splits=7),
    "more splits than blocks": Case((18,), splits=9),
    "one split": Case((300,), splits=1),
    "window": Case((70, 3, 200), window=20),
    "window, several tokens": Case((70, 3), queries=5, window=4),
    "sinks": Case((40, 0), sinks=True),
    "sinks, splits": Case((200,), sinks=True, splits=3),
    "chain": Case((30, 17), queries=6),
    "chain of more rows than a tile": Case((30, 3), queries=9, heads=8, kv_heads=2),
    "tree": Case((30, 17), queries=8, tree=True),
    "tree of more tokens than a block": Case((21,), queries=19, tree=True),
    "tree, window, sinks, splits": Case((90, 17), queries=7, tree=True, window=9, sinks=True, splits=3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_agrees_with_the_gather_backend(fake, monkeypatch, case: Case):
    if case.splits is not None:
        monkeypatch.setattr("jaxserve.attention.paged_cuda.num_splits", lambda *_: case.splits)
    step, *projections = problem(case)
    out = np.asarray(OnFakeDevice("xla").attend(step, 1, *projections), np.float32)
    expected = reference(step, *projections)
    np.testing.assert_allclose(out, expected, rtol=0.01, atol=0.01)
    if case is CASES["tree, window, sinks, splits"]:
        oracle = np.asarray(XlaBackend().attend(step, 1, *projections), np.float32)
        # Both round their weights to bfloat16; nothing else may tell them apart.
        assert np.abs(out - expected).max() <= max(1.5 * np.abs(oracle - expected).max(), 0.005)


def reference(step: AttentionStep, q, k, v, sinks) -> np.ndarray:
    """The same in float64, token by token."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    pool = np.asarray(step.pool.data, np.float64)[1]
    batch, queries, heads, dim = q.shape
    group, page_size = heads // k.shape[2], step.shape.page_size
    tables, lengths, window = np.asarray(step.metadata.block_tables), step.metadata.lengths, step.windows[1]
    out = np.zeros_like(q)
    for b in range(batch):
        context = int(lengths[b])
        for i in range(queries):
            depth = i if step.tree is None else int(step.tree.depths[b, i])
            own = [j for j in range(queries) if (j <= i if step.tree is None else bool(step.tree.seen[b, i, j]))]
            depths = {j: j if step.tree is None else int(step.tree.depths[b, j]) for j in own}
            past = [p for p in range(context) if window is None or p > context + depth - window]
            own = [j for j in own if window is None or depth - depths[j] < window]
            for h in range(heads):
                kv = h // group
                places = [(tables[b, p // page_size], p % page_size) for p in past]
                keys = [pool[0, kv, page, at] for page, at in places] + [k[b, j, kv] for j in own]
                values = [pool[1, kv, page, at] for page, at in places] + [v[b, j, kv] for j in own]
                scores = np.array(keys) @ q[b, i, h] * dim**-0.5
                weights = np.exp(scores - scores.max())
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[h]) - scores.max()))
                out[b, i, h] = weights @ np.array(values) / total
    return out


def test_a_page_outside_the_pool_is_never_read(fake):
    step, *projections = problem(Case((20,)))
    pages = step.pool.data.shape[3]
    tables = np.array(step.metadata.block_tables)
    unused = next(page for page in range(1, pages) if page not in tables)
    tables[0, :2] = -1, pages + unused  # layer 0, and the unused page of the next head: both are NaN
    pool = PagedKV(step.pool.data.at[1, :, :, 0].set(0))
    step = dataclasses.replace(step, pool=pool, metadata=step.metadata._replace(block_tables=jnp.asarray(tables)))
    assert np.isfinite(np.asarray(OnFakeDevice("xla").attend(step, 1, *projections), np.float32)).all()


@pytest.mark.parametrize(
    ("changed", "message"), [({"dim": 80}, "head dimensions 64.*not 80"), ({"page_size": 24}, "multiple of 16, not 24")]
)
def test_what_the_kernel_cannot_do_is_refused_when_traced(changed, message):
    step, *projections = problem(Case((20,), **changed))
    with pytest.raises(ConfigError, match=message):
        OnFakeDevice("xla").attend(step, 1, *projections)


@pytest.mark.parametrize("window", [None, 7])
def test_prompts_through_dot_product_attention_agree_with_the_gather_backend(window):
    step, q, k, v, _ = problem(Case((21,), queries=12, window=window), mode=ForwardMode.EXTEND)
    out = prompt_attention(step, 1, q, k, v, implementation="xla")
    expected = XlaBackend().attend(step, 1, q, k, v)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.02)


def test_sequences_are_cut_until_every_multiprocessor_has_work():
    assert num_splits(batch=1, kv_heads=8, rows=4, max_length=8192) == 33
    assert num_splits(batch=64, kv_heads=8, rows=4, max_length=8192) == 1
    assert num_splits(batch=1, kv_heads=8, rows=4, max_length=256) == 4
    assert num_splits(batch=1, kv_heads=1, rows=1, max_length=1 << 20) == 64


@pytest.mark.skipif(not os.environ.get("JAXSERVE_TEST_FULL"), reason="half a minute; JAXSERVE_TEST_FULL=1 runs it")
def test_the_backend_keeps_the_contract(fake):
    """The whole suite with the kernel in the programs. Those of JAX's CPU run it on the thread that dispatches."""
    backend_conformance(
        OnFakeDevice("xla"),
        modes=(ForwardMode.DECODE, ForwardMode.TARGET_VERIFY),
        page_sizes=(16,),
        dtype=jnp.bfloat16,
        tolerance=0.05,
        head_dim=64,
    )
