"""Measures a jaxserve engine, stepped by hand."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from worker import answer

from jaxserve.bench.stepping import run_greedily
from jaxserve.core.config import EngineConfig
from jaxserve.engine.engine import Engine

WEIGHT_READS = 9


class WeightReader:
    """Reads the weights where they lie, once, with all cores: what a decode step at batch 1 cannot do without."""

    def __init__(self, leaves: list[jax.Array]):
        cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(cores)
        parts = [np.array_split(np.asarray(leaf).ravel(), cores) for leaf in leaves]
        self._shares = [[part[core] for part in parts] for core in range(cores)]

    def __call__(self) -> float:
        """Median seconds of several reads."""
        seconds = []
        for _ in range(WEIGHT_READS):
            start = time.perf_counter()
            list(self._pool.map(self._read, self._shares))
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)[WEIGHT_READS // 2]

    @staticmethod
    def _read(share: list[np.ndarray]) -> None:
        for array in share:
            np.dot(array, array)


def open_engine(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    engine = Engine(EngineConfig(skip_warmup=True, **settings))
    weight_bytes = sum(leaf.nbytes for leaf in engine.parts.model.leaves)
    opened = {
        "jax": jax.__version__,
        "weight_bytes": weight_bytes,
        "backend": engine.parts.worker.model_runner.backend.name,
        "kv_bytes_per_token": engine.parts.worker.model_runner.kv.bytes_per_page // engine.config.page_size,
    }
    rounds = itertools.count()
    read_weights = WeightReader(engine.parts.model.leaves)

    def reply(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        found = dataclasses.asdict(run_greedily(engine, prompts, max_tokens))
        return {**found, "round": next(rounds), "weight_read_s": read_weights()}

    return opened, reply


if __name__ == "__main__":
    answer(open_engine)
