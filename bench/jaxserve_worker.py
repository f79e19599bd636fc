"""Measures a jaxserve engine, stepped by hand."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from worker import answer

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine

WEIGHT_READS = 9


class Timed:
    """A callable that adds up how long it takes."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*arguments)
        finally:
            self.seconds += time.perf_counter() - start


class WriteDelays:
    """How long each step's row writes take from being published to being done: the time they stand behind the fence.

    A thread waits for each record in turn. What the stream itself counts as waiting says less: it stands in a wait from
    one launch to the next even when no write is behind it.
    """

    def __init__(self, rows: Any):
        self._rows, self._publish = rows, rows.publish
        self._queue: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seconds: list[float] = []

    def __enter__(self) -> WriteDelays:
        def publish() -> int:
            generation = self._publish()
            if generation:
                self._queue.put((generation, time.perf_counter()))
            return generation

        self._rows.publish = publish
        self._thread.start()
        return self

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            generation, start = item
            self._rows.write_done.sync(generation, 60.0)
            self.seconds.append(time.perf_counter() - start)

    def __exit__(self, *exc: object) -> None:
        del self._rows.publish
        self._queue.put(None)
        self._thread.join()


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


def measure(engine: Engine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Runs the prompts together, greedily; times the steps that decode all of them.

    Returns:
        Seconds: ``steps`` (between results of full decode steps), ``host`` (plan and launch, per such step),
        ``first_tokens`` (per prompt, from when all were sent), ``wait`` (how long the schedule stream stood in waits,
        per step), ``write_delays`` (of every step, prefill included). Besides: ``bytes`` it copied per step, ``tokens``
        per prompt.
    """
    with WriteDelays(engine.parts.rows) as delays:
        found = _measure(engine, prompts, max_tokens)
    return {**found, "write_delays": delays.seconds}


def _measure(engine: Engine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    scheduler, stream = engine.scheduler, engine.parts.rows.stream
    plan, launch = Timed(scheduler.plan), Timed(scheduler.launch)
    scheduler.plan, scheduler.launch = plan, launch  # type: ignore
    try:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        names = [f"bench-{i}" for i in range(len(prompts))]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        first: dict[str, float] = {}
        steps, host = [], []
        waits: list[tuple[int, int]] = []
        start = before = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            engine.add(Request(name, tuple(prompt), params))
        was_full = False
        while engine.has_work:
            busy = plan.seconds + launch.seconds
            deltas = [delta for delta in engine.step() if delta.token_ids]
            now = time.perf_counter()
            for delta in deltas:
                tokens[delta.request_id] += delta.token_ids
                first.setdefault(delta.request_id, now - start)
            full = len(deltas) == len(prompts) and len(first) == len(prompts)
            if full and was_full:
                steps.append(now - before)
                host.append(plan.seconds + launch.seconds - busy)
                stats = stream.stats()
                waits.append((stats["wait_ns"], stats["bytes_copied"]))
            before, was_full = now, full
        stream.sync()
        spans = max(1, len(waits) - 1)
        return {
            "steps": steps,
            "host": host,
            "wait": (waits[-1][0] - waits[0][0]) / 1e9 / spans,
            "bytes": (waits[-1][1] - waits[0][1]) / spans,
            "first_tokens": [first[name] for name in names],
            "tokens": [tokens[name] for name in names],
        }
    finally:
        del scheduler.plan, scheduler.launch  # type: ignore


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
        before = dict(engine.scheduler.barrier.counts)
        found = measure(engine, prompts, max_tokens)
        counts = {
            f"{kind}:{reason}": n - before.get((kind, reason), 0)
            for (kind, reason), n in engine.scheduler.barrier.counts.items()
        }
        return {**found, "fences": counts, "round": next(rounds), "weight_read_s": read_weights()}

    return opened, reply


if __name__ == "__main__":
    answer(open_engine)
