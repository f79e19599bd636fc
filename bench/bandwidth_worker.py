"""Measures how fast all cores together read main memory: several ways, the best of which counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from worker import answer

REPEATS = 5


def best(function: Callable[[], Any], num_bytes: int) -> float:
    """Bytes per second of the fastest of several calls; the first is not counted."""
    function()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return num_bytes / min(seconds)


def open_memory(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    values = np.ones(settings["num_bytes"] // 4, np.float32)
    num_threads = len(os.sched_getaffinity(0))
    parts = np.array_split(values, num_threads)
    pool = ThreadPoolExecutor(num_threads)
    ways: dict[str, Callable[[], Any]] = {
        "numpy sum in threads": lambda: list(pool.map(np.sum, parts)),
        "numpy dot in threads": lambda: list(pool.map(lambda part: np.dot(part, part), parts)),
    }
    if settings["library"] == "jax":
        import jax

        array = jax.device_put(values)
        matrix = jax.device_put(values.reshape(-1, 1024))
        vector = jax.numpy.ones(1024, jax.numpy.float32)
        total = jax.jit(lambda x: x.sum())
        product = jax.jit(lambda m, v: m @ v)
        ways["jax sum"] = lambda: total(array).block_until_ready()
        ways["jax matrix x vector"] = lambda: product(matrix, vector).block_until_ready()
    else:
        import torch

        tensor = torch.from_numpy(values)
        ways["torch sum"] = lambda: tensor.sum().item()
    return {"threads": num_threads}, lambda: {name: best(way, values.nbytes) for name, way in ways.items()}


if __name__ == "__main__":
    answer(open_memory)
