"""What decode steps ask of the CUDA driver, as the profiler of XLA sees it.

XLA notes in a profile when it makes, updates and launches a CUDA graph (a *command buffer*): an update rewrites a graph
whose buffers have moved, and costs the host about as much as launching its kernels one by one. The profiler also notes
calls of the driver's API.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxserve.bench.stepping import step_together
from jaxserve.engine.engine import Engine

GRAPH_MADE, GRAPH_UPDATED, GRAPH_LAUNCHED = (f"command_buffer::{what}" for what in ("initialize", "update", "execute"))
DRIVER_LAUNCHES = ("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuGraphLaunch")


@dataclass(frozen=True)
class GraphCalls:
    """What some decode steps did.

    Attributes:
        num_steps: launched meanwhile.
        made, updated, launched: CUDA graphs, by XLA.
        driver_launches: kernels and graphs the driver was asked to launch, by whomever.
    """

    num_steps: int
    made: int
    updated: int
    launched: int
    driver_launches: int


def count_graph_calls(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, num_steps: int) -> GraphCalls:
    """Runs the prompts together, greedily, on an engine that is idle, and profiles steps that decode all of them.

    Args:
        max_tokens: of each prompt. Prompts are read in turns with decoding: at least ``len(prompts) + num_steps + 2``.
        num_steps: to profile, 1 at least.

    Raises:
        ValueError: too few tokens for as many steps.
        RuntimeError: a step failed.
    """
    least = len(prompts) + num_steps + 2
    if num_steps < 1 or max_tokens < least:
        raise ValueError(f"{len(prompts)} prompts and {num_steps} steps need {least} tokens each, got {max_tokens}")
    steps, waiting = step_together(engine, prompts, max_tokens), set(range(len(prompts)))
    while waiting:
        waiting -= next(steps).keys()
    launched_before = engine.scheduler.step_number
    with tempfile.TemporaryDirectory(prefix="jaxserve-profile-") as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level, options.python_tracer_level = 3, 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(num_steps):
                next(steps)
            launched = engine.scheduler.step_number - launched_before
        events = host_events(Path(folder))
    for _ in steps:  # the engine is idle afterwards
        pass
    return GraphCalls(
        launched, events[GRAPH_MADE], events[GRAPH_UPDATED], events[GRAPH_LAUNCHED],
        sum(events[name] for name in DRIVER_LAUNCHES),
    )  # fmt: skip


def host_events(folder: Path) -> Counter[str]:
    """How often each event occurs on the host's side of the profiles in a folder, by name."""
    found: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.xplane.pb")):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if plane.name.startswith("/host:"):
                found.update(event.name for line in plane.lines for event in line.events)
    return found
