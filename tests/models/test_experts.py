"""Choosing experts and computing them, against loops over tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.experts import apply_experts, choose_experts, expert_blocks, expert_groups

HIDDEN, INNER, EXPERTS = 12, 10, 6


def weights(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    gate_up = random.standard_normal((EXPERTS, 2 * INNER, HIDDEN)).astype(np.float32)
    return gate_up, random.standard_normal((EXPERTS, HIDDEN, INNER)).astype(np.float32)


def one_expert(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    x, gate_up, down = (array.astype(np.float64) for array in (x, gate_up, down))
    gate, up = np.split(gate_up @ x, 2)
    return down @ (gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("spread", ["even", "one"])
def test_experts_equal_a_loop_over_tokens(num_tokens: int, spread: str) -> None:
    """Many rows of one expert make several blocks, the last of which is not full."""
    random = np.random.default_rng(num_tokens)
    gate_up, down = weights()
    x = random.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    chosen = np.array([random.permutation(EXPERTS)[:3] for _ in range(num_tokens)], np.int32)
    if spread == "one":
        chosen[:] = [4, 1, 5]
    share = random.uniform(0.1, 1, chosen.shape).astype(np.float32)
    got = jax.jit(apply_experts)(x, gate_up, down, chosen, share)
    right = [sum(s * one_expert(t, gate_up[e], down[e]) for e, s in zip(es, ss, strict=True))
             for t, es, ss in zip(x, chosen, share, strict=True)]  # fmt: skip
    np.testing.assert_allclose(got, right, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("block_rows", [1, 4, 16])
def test_blocks_equal_groups(block_rows: int) -> None:
    counts = np.array([0, 9, 1, 0, 4, 0], np.int32)
    rows = np.random.default_rng(3).standard_normal((14, HIDDEN)).astype(np.float32)
    arguments = (rows, *weights(), counts)
    blocks = jax.jit(expert_blocks, static_argnums=4)(*arguments, block_rows)
    np.testing.assert_allclose(blocks, jax.jit(expert_groups)(*arguments), atol=1e-5, rtol=1e-5)


def test_a_token_does_not_feel_its_batch() -> None:
    random = np.random.default_rng(5)
    gate_up, down = weights()
    router, bias = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32), np.zeros(EXPERTS, np.float32)

    @jax.jit
    def layer(x: jax.Array) -> jax.Array:
        return apply_experts(x, gate_up, down, *choose_experts(x, router, bias, num_chosen=2))

    x = random.standard_normal((8, HIDDEN)).astype(np.float32)
    before = np.asarray(layer(x))[2]
    others = random.standard_normal((8, HIDDEN)).astype(np.float32)
    others[6] = x[2]
    np.testing.assert_allclose(np.asarray(layer(others))[6], before, rtol=1e-6)


def test_the_correction_chooses_and_does_not_weigh() -> None:
    router = np.eye(4, dtype=np.float32)
    x = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    scores = 1 / (1 + np.exp(-x[0]))
    chosen, share = choose_experts(x, router, np.array([0, 0, 0, 9.0], np.float32), num_chosen=2, scale=1.5)
    assert sorted(np.asarray(chosen)[0].tolist()) == [0, 3]
    by_expert = dict(zip(np.asarray(chosen)[0].tolist(), np.asarray(share)[0].tolist(), strict=True))
    total = scores[0] + scores[3]
    assert by_expert == pytest.approx({0: 1.5 * scores[0] / total, 3: 1.5 * scores[3] / total})
    _, plain = choose_experts(x, router, np.zeros(4, np.float32), num_chosen=2, normalize=False)
    assert np.asarray(plain)[0].tolist() == pytest.approx([scores[0], scores[1]])


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """The best expert of all stands in a group whose two best together are worse."""
    router = np.eye(6, dtype=np.float32)
    x = np.array([[4.0, -4.0, 1.0, 1.5, -1.0, 0.0]], np.float32)
    chosen, _ = choose_experts(x, router, np.zeros(6, np.float32), num_chosen=2, num_groups=3, num_groups_chosen=1)
    assert sorted(np.asarray(chosen)[0].tolist()) == [2, 3]
    chosen, _ = choose_experts(x, router, np.zeros(6, np.float32), num_chosen=3, num_groups=3, num_groups_chosen=2)
    assert sorted(np.asarray(chosen)[0].tolist()) == [0, 2, 3]
    assert jnp.asarray(chosen).dtype == jnp.int32
