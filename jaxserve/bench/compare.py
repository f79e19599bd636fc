"""The comparison bench: one model and batch after the other, under every way a program can reach the device."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import importlib.metadata
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.bench.graph_calls import GraphCalls, count_graph_calls
from jaxserve.bench.machine import machine
from jaxserve.bench.models import COMPARED, NUM_WORDS, write_model
from jaxserve.bench.roofline import read_bandwidth, step_bytes
from jaxserve.bench.stepping import Stepped, run_greedily
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.shapes import ceil_div
from jaxserve.engine.engine import Engine
from jaxserve.runner.captured_steps import CapturedSteps, ReplayCounts

SCHEMA = 3  # of the JSON; what was measured has been written the same way since the first
WAYS: dict[str, dict[str, Any]] = {
    "xla": {"graph_backend": "xla"},
    "xla-cmdbuf": {"graph_backend": "xla-cmdbuf"},
    "xla-cmdbuf-inside": {"graph_backend": "xla-cmdbuf", "graph_snapshot": "inside"},
    "cuda-graph": {"graph_backend": "cuda-graph"},
}
PAGE_SIZE = 16
PROFILED_STEPS = 16
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "jax-cuda13-pjrt")
FLAGS = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "JAX_PLATFORMS")
# Instructions of a scheduled program that launch nothing.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")


@dataclass(frozen=True)
class Comparison:
    """What to measure.

    Attributes:
        models: name -> ``config.json``.
        ways: names in ``WAYS``; on a CPU all of them are one, ``jit``.
        batches: sequences that decode together.
        prompt_tokens, max_tokens: of each sequence.
        rounds: measurements; one more goes ahead for warming up.
        attention_backend, dtype: as the engine's flags.
        seed: of the prompts.
        max_seconds: after this nothing further is begun; the result names what was left out.

    Raises:
        ConfigError: what cannot be measured.
    """

    models: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: COMPARED)
    ways: tuple[str, ...] = ("xla", "xla-cmdbuf", "cuda-graph")
    batches: tuple[int, ...] = (1, 8, 64)
    prompt_tokens: int = 16
    max_tokens: int = 128
    rounds: int = 3
    attention_backend: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_seconds: float = 900.0

    def __post_init__(self) -> None:
        if not self.models or not self.ways or not self.batches:
            raise ConfigError("bench compare needs at least one model, one way and one batch")
        unknown = [way for way in self.ways if way not in WAYS]
        if unknown:
            raise ConfigError(f"--ways: unknown {', '.join(unknown)}; known are {', '.join(WAYS)}")
        for name, value in (("--rounds", self.rounds), ("--batches", min(self.batches))):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        least = max(self.batches) + 4  # prefills alternate with decode steps
        if self.max_tokens < least:
            raise ConfigError(f"--tokens {self.max_tokens}: {max(self.batches)} sequences need at least {least} tokens "
                              "each to decode together for a while; raise it, or lower --batches")  # fmt: skip


def from_json(found: Mapping[str, Any]) -> Comparison:
    """The comparison that a result was measured with.

    Raises:
        ConfigError: it is no result of this bench, or of a later version of it.
    """
    if found.get("bench") != "compare" or found.get("schema") not in range(1, SCHEMA + 1):
        raise ConfigError(f"--from: wanted a result of bench compare with schema 1 to {SCHEMA}")
    names = {each.name for each in dataclasses.fields(Comparison)}
    settings: dict[str, Any] = {name: value for name, value in found["settings"].items() if name in names}
    for name, value in settings.items():
        settings[name] = tuple(value) if isinstance(value, list) else value
    return Comparison(**settings)


def measure(comparison: Comparison, progress: Callable[[str], None] = lambda message: None) -> dict[str, Any]:
    """Measures every combination.

    Returns:
        JSON values: ``bench``, ``schema``, ``machine``, ``versions``, ``flags``, ``settings``, ``bandwidth`` (bytes per
        second, measured here), ``cells`` (see ``_cell``), ``left_out`` ({what: why}) and ``seconds``.
    """
    start = time.monotonic()
    cells: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    bandwidth = read_bandwidth()
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as temporary:
        for name, config in comparison.models.items():
            length = comparison.prompt_tokens + comparison.max_tokens + 1
            folder = write_model(Path(temporary) / name.replace("/", "-"), config, length)
            for way in comparison.ways:
                what = f"{name}, {way}"
                if time.monotonic() - start > comparison.max_seconds:
                    left_out[what] = f"began nothing after {comparison.max_seconds:.0f} s"
                    continue
                try:
                    for cell in _cells(comparison, name, folder, way, bandwidth, start, left_out):
                        cells.append(cell)
                        progress(f"{time.monotonic() - start:4.0f} s: {what}, batch {cell['batch']}: "
                                 f"{statistics.median(cell['step_ms']):.2f} ms a step")  # fmt: skip
                except ConfigError as error:  # what a platform refuses is a result, too
                    left_out[what] = str(error)
                    progress(f"{time.monotonic() - start:4.0f} s: {what}: {error}")
    return {
        "bench": "compare", "schema": SCHEMA, "machine": machine() | device(), "versions": versions(),
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        "settings": dataclasses.asdict(comparison) | {"page_size": PAGE_SIZE}, "bandwidth": bandwidth,
        "cells": cells, "left_out": left_out, "seconds": time.monotonic() - start,
    }  # fmt: skip


def _cells(comparison: Comparison, name: str, folder: Path, way: str, bandwidth: float, start: float,
           left_out: dict[str, str]) -> Any:  # fmt: skip
    """Every batch of one model and way, on one engine."""
    pages = max(comparison.batches) * ceil_div(comparison.prompt_tokens + comparison.max_tokens + 1, PAGE_SIZE)
    engine = Engine(
        EngineConfig(
            model=str(folder), load_format="dummy", skip_warmup=True, page_size=PAGE_SIZE, num_pages=pages,
            max_running_requests=max(comparison.batches), decode_batch_buckets=comparison.batches,
            chunked_prefill_size=comparison.prompt_tokens, prefill_token_buckets=(comparison.prompt_tokens,),
            attention_backend=comparison.attention_backend, dtype=comparison.dtype, grammar_backend="none",
            compilation_cache_dir="", seed=comparison.seed, **WAYS[way],
        )
    )  # fmt: skip
    try:
        for batch in comparison.batches:
            if time.monotonic() - start > comparison.max_seconds:
                left_out[f"{name}, {way}, batch {batch}"] = f"began nothing after {comparison.max_seconds:.0f} s"
                continue
            yield _cell(comparison, name, way, batch, engine, bandwidth)
    finally:
        engine.close()
        del engine
        gc.collect()  # pools and weights go before the next ones come


def _cell(comparison: Comparison, name: str, way: str, batch: int, engine: Engine, bandwidth: float) -> dict[str, Any]:
    """All rounds of one combination.

    Returns:
        ``model``, ``way``, ``mode`` (what the way is on this platform), ``attention``, ``batch``; per step, all rounds
        together, ``step_ms`` and ``host_ms`` (planning and launching); per round, ``held_up_fine_ms`` and
        ``held_up_coarse_ms`` (how long row writes stood behind that fence; null where nobody on the host knows) and
        ``coarse_step_ms``; ``tokens_per_s``; ``compile_s`` and ``first_run_s`` (compiling included); ``operations``
        (of the scheduled decode program that launch something), ``hlo`` (its hash); ``graph_mib`` (growth of the
        device's memory outside of XLA's pool in the first run; null where unknown); ``calls`` (of decode steps that
        are profiled behind everything else, see ``GraphCalls``; null where there is no driver, or none was seen);
        ``captured`` (what ``ReplayCounts`` counted in this combination) and ``replay_ms`` (one replay, without an
        engine around it) of graphs that we capture; null for other ways;
        ``roofline`` (share of the bandwidth); ``distinct_tokens`` and ``tokens_hash``.
    """
    prompts = prompts_of(comparison, batch)
    cache = engine.parts.worker.step_runner.steps
    captured = engine.parts.worker.model_runner.captured
    compiled_before, memory_before = cache.compile_seconds, _foreign_mib()
    counted_before = None if captured is None else captured.counts()
    begin = time.perf_counter()
    first = run_greedily(engine, prompts, comparison.max_tokens)
    first_run, compiled = time.perf_counter() - begin, cache.compile_seconds - compiled_before
    memory_after = _foreign_mib()
    fine: list[Stepped] = []
    coarse: list[Stepped] = []
    for _ in range(comparison.rounds):
        for forced, runs in ((False, fine), (True, coarse)):
            engine.scheduler.barrier.force_coarse = forced
            runs.append(run_greedily(engine, prompts, comparison.max_tokens))
    engine.scheduler.barrier.force_coarse = False
    for run in (*fine, *coarse):
        if run.tokens != first.tokens:
            raise JaxserveError(f"greedy tokens of {name}, {way}, batch {batch} differ between rounds: a fence is off")
    steps = [seconds for run in fine for seconds in run.steps]
    context = comparison.prompt_tokens + comparison.max_tokens / 2
    text = _decode_text(engine, batch)
    calls = _calls(comparison, engine, prompts, jax.default_backend())
    known = memory_before is not None and memory_after is not None
    return {
        "model": name, "way": way, "mode": engine.parts.worker.model_runner.graph.name,
        "attention": engine.parts.worker.model_runner.backend.name, "batch": batch,
        "step_ms": [1e3 * seconds for seconds in steps],
        "host_ms": [1e3 * seconds for run in fine for seconds in run.host],
        "held_up_fine_ms": _held_up(fine), "held_up_coarse_ms": _held_up(coarse),
        "coarse_step_ms": [1e3 * statistics.median(run.steps) for run in coarse],
        "tokens_per_s": batch / statistics.median(steps), "compile_s": compiled, "first_run_s": first_run,
        "operations": count_operations(text), "hlo": hlo_hash(text),
        "graph_mib": memory_after - memory_before if known else None,  # type: ignore[operator]
        "calls": None if calls is None else dataclasses.asdict(calls),
        "captured": None if captured is None else _counted_since(captured, counted_before),
        "replay_ms": None if captured is None else captured.replay_ms(batch),
        "roofline": step_bytes(engine, batch, context) / statistics.median(steps) / bandwidth,
        "distinct_tokens": len({token for one in first.tokens for token in one}),
        "tokens_hash": hashlib.sha256(repr(first.tokens).encode()).hexdigest()[:16],
    }  # fmt: skip


def _counted_since(captured: CapturedSteps, before: ReplayCounts | None) -> dict[str, int] | None:
    """What became of captured steps since ``before``."""
    counts = captured.counts()
    if counts is None or before is None:
        return None
    since = {name: value - getattr(before, name) for name, value in dataclasses.asdict(counts).items()}
    return since | {"nodes": counts.nodes, "arena_bytes": counts.arena_bytes}


def _calls(comparison: Comparison, engine: Engine, prompts: list[list[int]], platform: str) -> GraphCalls | None:
    """What some decode steps ask of the driver; None where there is none, or where the profiler saw no call of it."""
    if platform == "cpu":
        return None
    num_steps = min(PROFILED_STEPS, comparison.max_tokens - len(prompts) - 2)
    calls = count_graph_calls(engine, prompts, comparison.max_tokens, num_steps)
    return calls if calls.driver_launches else None


def prompts_of(comparison: Comparison, batch: int) -> list[list[int]]:
    """The prompts that decode together in a batch of this size."""
    random = np.random.default_rng(comparison.seed + batch)
    return random.integers(0, NUM_WORDS, (batch, comparison.prompt_tokens)).tolist()


def _held_up(runs: list[Stepped]) -> list[float] | None:
    found = [run.held_up for run in runs]
    return None if None in found else [1e3 * seconds for seconds in found if seconds is not None]


def _decode_text(engine: Engine, batch: int) -> str:
    cache = engine.parts.worker.step_runner.steps
    keys = cache.keys()
    [key] = [k for k in keys if k.shape.mode is ForwardMode.DECODE and k.shape.batch == batch]
    return cache.get(key).as_text()


def count_operations(hlo_text: str) -> int:
    """Instructions of the entry computation that launch something; graphs, which bundle them, are not seen here."""
    entry = hlo_text[hlo_text.index("\nENTRY ") :]
    names = re.findall(r"^\s+(?:ROOT )?%\S+ = (?:\([^=]*?\)|\S+) ([\w-]+)\(", entry, re.MULTILINE)
    return sum(name not in _FREE for name in names)


def hlo_hash(hlo_text: str) -> str:
    """Of the scheduled program, without what only says where it came from."""
    plain = re.sub(r",? ?metadata=\{[^}]*\}", "", hlo_text)
    plain = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", "\n", plain)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _smi(query: str) -> str | None:
    smi = shutil.which("nvidia-smi")
    if smi is None or jax.default_backend() == "cpu":
        return None
    done = subprocess.run(
        [smi, f"--query-gpu={query}", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def _foreign_mib() -> float | None:
    """Memory in use on the device outside of XLA's pool, in MiB; None where nobody says."""
    used = _smi("memory.used")
    pool = (jax.local_devices()[0].memory_stats() or {}).get("pool_bytes")
    return None if used is None or pool is None else float(used) - pool / (1 << 20)


def device() -> dict[str, str]:
    """The device, and its driver where it has one."""
    found = {"platform": jax.default_backend(), "device": jax.local_devices()[0].device_kind}
    driver = _smi("driver_version")
    return found if driver is None else found | {"driver": driver}


def versions() -> dict[str, str]:
    """Of what computes."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
