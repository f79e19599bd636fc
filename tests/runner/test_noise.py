"""Random numbers of draws: a known hash, evenly spread, and the same wherever a sequence stands."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxserve.runner.sampler import gumbel_noise, threefry


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(key, counter, words):
    """Those published with Random123."""
    found = threefry(*[tuple(jnp.uint32(word) for word in pair) for pair in (key, counter)])
    assert [int(word) for word in found] == list(words)


def test_it_is_the_hash_of_jax():
    key, counter = np.random.default_rng(0).integers(0, 2**32, (2, 2, 500), dtype=np.uint32)
    for column in range(0, 500, 100):
        pair = key[:, column]
        expected = threefry_2x32(pair, counter.reshape(-1))
        found = threefry((jnp.uint32(pair[0]), jnp.uint32(pair[1])), (jnp.asarray(counter[0]), jnp.asarray(counter[1])))
        np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("vocab", [7, 4096])
def test_a_row_depends_on_its_seed_and_position_alone(vocab):
    low, high, position = jnp.array([[3, 3, 3, 4], [0, 0, 1, 0], [9, 10, 9, 9]], jnp.int32)
    noise = np.asarray(gumbel_noise(low, high, position, vocab))
    assert noise.shape == (4, vocab) and np.isfinite(noise).all()
    for row in range(4):
        alone = gumbel_noise(low[row : row + 1], high[row : row + 1], position[row : row + 1], vocab)
        np.testing.assert_array_equal(alone[0], noise[row])
    assert len({row.tobytes() for row in noise}) == 4


def test_noise_is_spread_as_gumbels_is():
    """Kolmogorov-Smirnov, and no two tokens or positions that go together."""
    count = 1 << 20
    noise = np.asarray(gumbel_noise(*jnp.array([[5, 5], [0, 0], [1, 2]], jnp.int32), count))
    for row in noise:
        expected = np.exp(-np.exp(-np.sort(row).astype(np.float64)))
        assert np.abs(expected - (np.arange(count) + 0.5) / count).max() < 2.2 / np.sqrt(count)  # p < 1e-4
        halves = row[: count // 2], row[count // 2 :]
        assert abs(np.corrcoef(*halves)[0, 1]) < 4.5 / np.sqrt(count // 2)
        assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 4.5 / np.sqrt(count)
    assert abs(np.corrcoef(*noise)[0, 1]) < 4.5 / np.sqrt(count)
