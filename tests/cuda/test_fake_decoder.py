"""Captured decode and verify steps on the fake device: the real bodies of their kernels, against the Flax model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.attention.base import AttentionStep, LiveRows, StepMetadata, StepShape, Tree
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.attention.xla import XlaBackend
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.models.config import ModelConfig
from jaxserve.models.draft import FINAL
from jaxserve.models.loading.weights import LoadedModel, abstract_model
from jaxserve.runner import captured_steps
from jaxserve.runner.captured_steps import CapturedSteps, ReplayCounts
from jaxserve.runner.forward import Forward, captured_forward, forward

PAGE_SIZE, PAGES = 16, 16
REFUSED = (jax.errors.JaxRuntimeError, ValueError)  # by a handler; jax 0.11 raises either, by how it dispatches

PLAIN = ModelConfig(
    "LlamaForCausalLM", vocab_size=96, hidden_size=64, intermediate_size=72, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, tie_word_embeddings=True, attention_windows=(None, None),
)  # fmt: skip
MODELS = {
    "llama": PLAIN,
    "one head per KV head, dim 96, an LM head": dataclasses.replace(
        PLAIN, num_heads=2, head_dim=96, tie_word_embeddings=False
    ),
    "biases": dataclasses.replace(PLAIN, attention_bias=True, mlp_bias=True),
    "windows": dataclasses.replace(PLAIN, attention_windows=(None, 7)),
    "wide rows": dataclasses.replace(PLAIN, hidden_size=2056, num_layers=1, attention_windows=(None,)),
    "qwen3": dataclasses.replace(PLAIN, architecture="Qwen3ForCausalLM", head_dim=128),
}


@pytest.fixture
def captured(fake, monkeypatch):
    """Captured steps of the fake twin."""
    monkeypatch.setattr(captured_steps, "cublas_libraries", lambda: [fake.__file__])
    monkeypatch.setattr(CapturedSteps, "target", "fake_captured_step")
    steps = CapturedSteps(fake)
    yield steps
    steps.close()


def model_of(config: ModelConfig, dtype, seed: int = 0) -> LoadedModel:
    """Random weights, all of them, large enough for every part of the model to matter; bfloat16 values in any dtype."""
    loaded = abstract_model(config, jnp.bfloat16)
    random = np.random.default_rng(seed)
    leaves = []
    for path, leaf in zip(loaded.paths, loaded.leaves, strict=True):
        if "norms" in path:
            values = 1 + 0.3 * random.normal(size=leaf.shape)
        else:
            values = random.normal(size=leaf.shape) * (0.5 if leaf.ndim == 1 else 2 * leaf.shape[1] ** -0.5)
        leaves.append(jnp.asarray(values.astype(jnp.bfloat16).astype(dtype)))
    return dataclasses.replace(loaded, leaves=leaves)


def step_of(config: ModelConfig, lengths: tuple[int, ...], queries: int, tree: bool, dtype, seed: int = 0):
    """(step, tokens, positions): a pool that is NaN wherever no sequence has written."""
    random = np.random.default_rng(seed)
    batch, width = len(lengths), max(3, -(-max(lengths) // PAGE_SIZE))
    pool = np.full((config.num_layers, 2, config.num_kv_heads, PAGES, PAGE_SIZE, config.head_dim), np.nan, np.float32)
    tables = np.zeros((batch, width), np.int32)
    free = iter(random.permutation(np.arange(1, PAGES)))
    for row, length in enumerate(lengths):
        for position in range(length):
            if position % PAGE_SIZE == 0:
                tables[row, position // PAGE_SIZE] = next(free)
            new = random.normal(size=(config.num_layers, 2, config.num_kv_heads, config.head_dim))
            pool[:, :, :, tables[row, position // PAGE_SIZE], position % PAGE_SIZE] = new
    shape = StepShape(ForwardMode.TARGET_VERIFY, batch, queries, width, PAGE_SIZE)
    depths = np.broadcast_to(np.arange(queries), (batch, queries))
    made_tree = None
    if tree:
        seen = np.zeros((batch, queries, queries), bool)
        for b in range(batch):
            for i in range(queries):
                seen[b, i, i] = True
                if i:
                    seen[b, i] |= seen[b, random.integers(0, i)]
        depths = seen.sum(-1) - 1
        made_tree = Tree(jnp.asarray(seen), jnp.asarray(depths, jnp.int32))
    nothing = jnp.zeros((batch, queries), jnp.int32)
    metadata = StepMetadata(jnp.asarray(tables), jnp.asarray(lengths, jnp.int32), nothing, nothing)
    live = LiveRows(nothing[:, 0], metadata.block_tables, metadata.lengths[:, None], ffi=False)
    data = jnp.asarray(pool.astype(jnp.bfloat16).astype(dtype))
    step = AttentionStep(shape, metadata, PagedKV(data), live, config.attention_windows, None, made_tree)
    tokens = jnp.asarray(random.integers(0, config.vocab_size, (batch, queries)), jnp.int32)
    return step, tokens, jnp.asarray(np.array(lengths)[:, None] + depths, jnp.int32)


def captured_program(captured: CapturedSteps, loaded: LoadedModel, step, points=()):
    """``(leaves, pool, tokens, positions) -> Forward``, computed when it returns."""

    def call(leaves, pool, tokens, positions):
        held = dataclasses.replace(step, pool=PagedKV(pool))
        return captured_forward(captured, loaded.bind(leaves), held, tokens, positions, points)

    jitted = jax.jit(call)
    return lambda *arguments: jax.block_until_ready(jitted(*arguments))


def run_by_xla(loaded: LoadedModel, step, tokens, positions, points=()) -> Forward:
    """The Flax model; its logits are those of all rows."""

    def call(leaves, pool, tokens, positions):
        held, model = dataclasses.replace(step, pool=PagedKV(pool)), loaded.bind(leaves)
        computed = forward(model, XlaBackend(), held, tokens, positions, points)
        return computed._replace(logits=computed.scores(model))

    return jax.jit(call)(loaded.leaves, step.pool.data, tokens, positions)


def error_of(found, expected) -> np.ndarray:
    """Of each row (a token's logits, features, or a layer's keys), the error's size relative to the row's."""
    found, expected = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (found, expected))
    return np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)


def check(found: Forward, in_bfloat16: Forward, expected: Forward) -> None:
    """No row is much further from float32 than the Flax model in bfloat16, which XLA rounds less often."""
    for mine, rounded, exact in (
        (found.logits, in_bfloat16.logits, expected.logits),
        (found.features, in_bfloat16.features, expected.features),
        (np.stack(found.keys), np.stack(in_bfloat16.keys), np.stack(expected.keys)),
        (np.stack(found.values), np.stack(in_bfloat16.values), np.stack(expected.values)),
    ):
        error, usual = error_of(mine, exact), error_of(rounded, exact)
        assert error.max() < max(2 * usual.max(), 0.01)
        assert error.max() < 0.06


CASES = {
    **{name: (name, (0, 20, 16), 3, False) for name in MODELS},
    "one token each": ("llama", (37, 5), 1, False),
    "windows, one token each": ("windows", (37, 5), 1, False),
    "several splits": ("llama", (150, 3), 2, False),
    "tree": ("llama", (37, 5), 6, True),
    "tree, qwen3": ("qwen3", (0, 20, 16), 3, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_captured_step_computes_the_model(captured, case):
    name, lengths, queries, tree = CASES[case]
    config = MODELS[name]
    points = (0, 1, FINAL) if config.num_layers > 1 else (FINAL, 0, FINAL)
    step, tokens, positions = step_of(config, lengths, queries, tree, jnp.bfloat16)
    loaded = model_of(config, jnp.bfloat16)
    found = captured_program(captured, loaded, step, points)(loaded.leaves, step.pool.data, tokens, positions)
    wide, _, _ = step_of(config, lengths, queries, tree, jnp.float32)
    in_bfloat16 = run_by_xla(model_of(config, jnp.bfloat16), step, tokens, positions, points)
    check(found, in_bfloat16, run_by_xla(model_of(config, jnp.float32), wide, tokens, positions, points))


class Steps:
    """Steps of one model and program, with weights and pool at the same addresses."""

    def __init__(self, captured: CapturedSteps, batch: int = 2):
        self.step, self.tokens, self.positions = step_of(PLAIN, (37, 5)[:batch], 1, False, jnp.bfloat16)
        self.leaves = model_of(PLAIN, jnp.bfloat16).leaves
        self._program = captured_program(captured, abstract_model(PLAIN, jnp.bfloat16), self.step)

    def run(self, tokens=None, pool=None) -> Forward:
        pool, tokens = self.step.pool.data if pool is None else pool, self.tokens if tokens is None else tokens
        return self._program(self.leaves, pool, tokens, self.positions)


def equal(a: Forward, b: Forward) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_step_runs_once_as_it_is_and_is_replayed_from_then_on(captured, switches):
    steps = Steps(captured)
    first = steps.run()
    assert dataclasses.replace(captured.counts(), arena_bytes=0) == ReplayCounts(1, 0, 0, 0, 0, 0, 0)
    assert captured.replay_ms(2) is None
    others = [steps.run() for _ in range(3)]
    counts = captured.counts()
    assert (counts.uncaptured, counts.captured, counts.moved, counts.replayed) == (1, 1, 0, 3)
    # Of each of the two layers: two norms, four products, rotation, attention, activation. And the
    # embedding, the last norm and the LM head.
    assert counts.nodes == 2 * 9 + 3
    assert counts.capture_ns > 0
    assert all(equal(first, other) for other in others)
    # What is captured are addresses: other tokens in the same places give other logits.
    changed = steps.run(tokens=(steps.tokens + 1) % PLAIN.vocab_size)
    assert not np.array_equal(changed.logits, first.logits)
    assert equal(steps.run(), first)
    assert captured.counts().captured == 1
    assert captured.replay_ms(2, repeats=3) > 0
    assert captured.replay_ms(1) is None and captured.replay_ms(2, queries=2) is None
    assert equal(steps.run(), first)
    captured.close()
    assert switches.fake_live_graphs() == 0


def test_programs_of_other_sizes_have_graphs_of_their_own(captured):
    two, one = Steps(captured), Steps(captured, batch=1)
    expected = two.run()
    assert all(equal(two.run(), expected) for _ in range(2))
    alone = one.run()
    assert all(equal(one.run(), alone) and equal(two.run(), expected) for _ in range(2))
    counts = captured.counts()
    assert (counts.uncaptured, counts.captured, counts.moved) == (2, 2, 0)


def test_a_pool_that_has_moved_is_noticed(captured):
    steps = Steps(captured)
    expected = [steps.run() for _ in range(2)][-1]
    other = jnp.array(steps.step.pool.data, copy=True)
    assert other.unsafe_buffer_pointer() != steps.step.pool.data.unsafe_buffer_pointer()
    assert all(equal(steps.run(pool=other), expected) for _ in range(3))
    counts = captured.counts()
    assert (counts.uncaptured, counts.captured, counts.moved) == (2, 2, 1)


def test_a_larger_step_makes_room_and_is_noticed(captured):
    one = Steps(captured, batch=1)
    expected = [one.run() for _ in range(2)][-1]
    small = captured.counts().arena_bytes
    Steps(captured).run()
    assert captured.counts().arena_bytes > small
    assert all(equal(one.run(), expected) for _ in range(3))
    assert captured.counts().moved == 1


@pytest.mark.parametrize(
    "call",
    ["cudaStreamBeginCapture", "cublasGemmEx", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphLaunch"],
)
def test_a_capture_that_fails_is_an_error_and_is_tried_again(captured, switches, call):
    steps = Steps(captured)
    expected = steps.run()
    switches.fake_fail_next(call.encode())
    with pytest.raises(REFUSED, match=f"{call} failed"):
        steps.run()
    assert all(equal(steps.run(), expected) for _ in range(2))
    captured.close()
    assert switches.fake_live_graphs() == 0


def test_steps_that_are_closed_are_refused(captured):
    steps = Steps(captured)
    steps.run()
    captured.close()
    with pytest.raises(REFUSED, match=f"captured steps {captured.number} are not open"):
        steps.run()


def test_a_step_without_room_is_refused(captured, monkeypatch):
    monkeypatch.setattr(CapturedSteps, "reserve", lambda self, **sizes: None)
    with pytest.raises(REFUSED, match=r"wanted \d+ bytes, reserved are 0"):
        Steps(captured).run()


def test_weights_that_do_not_fit_are_refused(captured):
    steps = Steps(captured)
    loaded = abstract_model(PLAIN, jnp.bfloat16)

    def call(leaves, pool):
        model = loaded.bind(leaves)
        model.norms = model.norms[...][:-1]
        held = dataclasses.replace(steps.step, pool=PagedKV(pool))
        return captured_forward(captured, model, held, steps.tokens, steps.positions, ())

    with pytest.raises(REFUSED, match="norms: wanted 320 elements, got 256"):
        jax.block_until_ready(jax.jit(call)(steps.leaves, steps.step.pool.data))


def test_a_layer_that_does_not_exist_cannot_be_observed(captured):
    steps = Steps(captured)
    program = captured_program(captured, abstract_model(PLAIN, jnp.bfloat16), steps.step, (3,))
    with pytest.raises(REFUSED, match="wanted points from -1 to 2, got 3"):
        program(steps.leaves, steps.step.pool.data, steps.tokens, steps.positions)


def test_without_cublas_the_error_says_where_it_was_looked_for(fake, monkeypatch):
    monkeypatch.setattr(captured_steps, "cublas_libraries", lambda: ["/nowhere/libcublas.so.13"])
    with pytest.raises(
        ConfigError,
        match=r"cannot be used here: .*cuBLAS failed: no library; jax\[cuda13\] brings it along.*\n.*/nowhere",
    ):
        CapturedSteps(fake)
    monkeypatch.setattr(captured_steps, "cublas_libraries", lambda: ["libm.so.6"])
    with pytest.raises(ConfigError, match="the library has no cublasCreate_v2"):
        CapturedSteps(fake)
