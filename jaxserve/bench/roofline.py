"""The memory roofline of a decode step: bytes it must read, over what the same machine reads in the same run."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp

from jaxserve.engine.engine import Engine

_BYTES = {"cpu": 256 << 20}  # of the array that is read; far more than any cache
_ON_A_DEVICE = 4 << 30


def read_bandwidth(repeats: int = 7) -> float:
    """Bytes per second that summing a large array reads on the default device, median of several."""
    num = _BYTES.get(jax.default_backend(), _ON_A_DEVICE) // 4
    values = jnp.ones(num, jnp.float32)
    total = jax.jit(jnp.sum)
    total(values).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        total(values).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 4 * num / statistics.median(seconds)


def step_bytes(engine: Engine, batch: int, context: float) -> float:
    """Bytes that a decode step must read at least: every weight once (of the embedding only the rows it looks up,
    where it is no output matrix too), and the KV of what its sequences hold.

    Args:
        context: mean tokens of a sequence.
    """
    runner = engine.parts.worker.model_runner
    config = runner.model.config
    weights = sum(leaf.nbytes for leaf in runner.model.leaves)
    if not config.tie_word_embeddings:
        row = config.hidden_size * jnp.dtype(runner.kv.dtype).itemsize
        weights -= (config.vocab_size - batch) * row
    return weights + batch * context * runner.kv.bytes_per_page / runner.kv.page_size
