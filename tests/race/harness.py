"""Runs one workload through an engine under stalls, so that a wrong fence shows as a wrong token.

The workload keeps every kind of shared row busy: sequences of different lengths decode together, so lengths change each
step; they end at different steps, so slots are recycled while others run; more wait than fit, so prefills and decodes
alternate; pages are small, so block tables grow every few steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.barrier.native import native_module
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine

STALL_US = 4000  # several times what the host needs to plan and write the next step

STALLS = {
    "none": {},
    "late reads": {"snapshot.before_reads": STALL_US, "copy.before_reads": STALL_US},
    "late marker": {"snapshot.before_record": STALL_US},
    "late layer reads": {"layer.before_reads": STALL_US},
    "long step": {"snapshot.after_record": STALL_US},
    "late end record": {"end.before_record": STALL_US},
    "late row writes": {"stream.before_copy": STALL_US // 4},
    "late write record": {"stream.before_record": STALL_US},
}

# Passed by verify steps only.
DRAFT_STALLS = {"late acceptance": {"drafts.before_acceptance": STALL_US}}

SETTINGS: dict[str, Any] = {
    "context_length": 128,
    "page_size": 4,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "prefill_token_buckets": (16,),
    "max_prefill_tokens": 64,  # prompts are read alone and together
    "decode_batch_buckets": (4,),
    "skip_warmup": True,
    "greedy_programs": True,  # nearly all runs are greedy
    "hold_points": True,
    "fence_timeout_s": 10.0,
}


def workload() -> list[tuple[list[int], int]]:
    """(prompt ids, max_tokens) of ten requests."""
    random = np.random.default_rng(5)
    lengths = [(5, 9), (23, 14), (9, 5), (3, 22), (17, 7), (30, 12), (4, 4), (12, 17), (7, 10), (21, 6)]
    return [([int(t) for t in random.integers(0, 250, prompt)], output) for prompt, output in lengths]


def make_engine(model: Path, **overrides: Any) -> Engine:
    """An engine on the tiny model with hold points compiled in."""
    return Engine(EngineConfig(model=str(model), **{**SETTINGS, **overrides}))


def change_sizes(monkeypatch: Any, engine: Engine) -> list[int]:
    """Makes steps of every size there is, most of the largest, in any order; returns the list they are noted in."""
    speculation, random, chosen = engine.scheduler.speculation, np.random.default_rng(3), []
    sizes = list(speculation.algorithm.verify_tokens(engine.config))
    sizes += 2 * sizes[-1:]

    def queries_for(sequences: list[Any]) -> int:
        if len(chosen) % len(sizes) == 0:
            random.shuffle(sizes)
        chosen.append(sizes[len(chosen) % len(sizes)])
        return chosen[-1]

    monkeypatch.setattr(speculation, "queries_for", queries_for)
    return chosen


def run(engine: Engine, tag: str = "r", params: dict[str, Any] | None = None) -> list[list[int]]:
    """Token ids of every request of the workload; afterwards no page or slot may be missing."""
    tokens: dict[str, list[int]] = {}
    for i, (prompt, output) in enumerate(workload()):
        settings = {"temperature": 0.0, "ignore_eos": True, **(params or {})}
        engine.add(Request(f"{tag}-{i}", tuple(prompt), SamplingParams(max_tokens=output, **settings)))
        tokens[f"{tag}-{i}"] = []
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                raise RuntimeError(delta.error)
            tokens[delta.request_id] += delta.token_ids
    engine.scheduler.check_integrity()
    assert engine.scheduler.memory.num_available == engine.scheduler.pool.num_usable
    return list(tokens.values())


@contextlib.contextmanager
def stalled(name: str, factor: int = 1) -> Iterator[Callable[[str], int]]:
    """Arms a stall of ``STALLS`` or ``DRAFT_STALLS``; yields a function that counts passes through a hold point."""
    points = native_module("cpu").hold_points
    for point, microseconds in {**STALLS, **DRAFT_STALLS}[name].items():
        points.delay(point, factor * microseconds)
    try:
        yield points.hits
    finally:
        points.clear()
