"""Steps an engine by hand and times it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine


@dataclass(frozen=True)
class Stepped:
    """Prompts that were run together, greedily. Seconds; a *full step* decodes all of them.

    Attributes:
        steps: between the results of full steps.
        host: planning and launching, per such step.
        first_tokens: per prompt, from when all were sent.
        tokens: per prompt.
        held_up: from publishing a step's row writes to their being done, mean over full steps; None where rows are not
            written in place, and on CUDA, where nobody on the host knows.
        bytes_to_device: of control rows, per launch among them.
        fences: applied, by ``kind:reason``.
    """

    steps: list[float]
    host: list[float]
    first_tokens: list[float]
    tokens: list[list[int]]
    held_up: float | None
    bytes_to_device: float
    fences: dict[str, int]


class _Timed:
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


@dataclass(frozen=True)
class _Counts:
    held_up_ns: int
    num_held_up: int
    num_bytes: int
    num_launches: int

    @classmethod
    def of(cls, engine: Engine) -> _Counts:
        rows = engine.parts.rows
        held_up = rows.stream.stats()["held_up"].values()
        return cls(sum(d["total_ns"] for d in held_up), sum(sum(d["counts"]) for d in held_up), rows.bytes_to_device,
                   engine.scheduler.step_number)  # fmt: skip


def step_together(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[dict[int, list[int]]]:
    """Runs the prompts together, greedily, each to ``max_tokens`` tokens; yields what each step gave, by prompt.

    Raises:
        RuntimeError: a step failed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    numbers = {f"bench-{number}": number for number in range(len(prompts))}
    for name, prompt in zip(numbers, prompts, strict=True):
        engine.add(Request(name, tuple(prompt), params))
    while engine.has_work:
        found: dict[int, list[int]] = {}
        for delta in engine.step():
            if delta.error:
                raise RuntimeError(f"a step failed: {delta.error}")
            if delta.token_ids:
                found.setdefault(numbers[delta.request_id], []).extend(delta.token_ids)
        yield found


def run_greedily(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> Stepped:
    """Runs the prompts together, each to ``max_tokens`` tokens, on an engine that is idle."""
    scheduler = engine.scheduler
    plan, launch = _Timed(scheduler.plan), _Timed(scheduler.launch)
    scheduler.plan, scheduler.launch = plan, launch  # type: ignore
    fences = scheduler.barrier.counts.copy()
    try:
        tokens: list[list[int]] = [[] for _ in prompts]
        first: dict[int, float] = {}
        steps, host, counts = [], [], []
        start = before = time.perf_counter()
        was_full, busy = False, 0.0
        for given in step_together(engine, prompts, max_tokens):
            now = time.perf_counter()
            for number, new in given.items():
                tokens[number] += new
                first.setdefault(number, now - start)
            full = len(given) == len(prompts)
            if full and was_full:
                steps.append(now - before)
                host.append(plan.seconds + launch.seconds - busy)
                counts.append(_Counts.of(engine))
                now = time.perf_counter()  # what counting takes belongs to no step
            before, was_full, busy = now, full, plan.seconds + launch.seconds
    finally:
        del scheduler.plan, scheduler.launch  # type: ignore
    if len(counts) < 2:
        raise RuntimeError(f"{len(prompts)} prompts of {max_tokens} tokens never decoded together; ask for more tokens")
    begin, end = counts[0], counts[-1]
    num_held_up = end.num_held_up - begin.num_held_up
    return Stepped(
        steps=steps,
        host=host,
        first_tokens=[first[number] for number in range(len(prompts))],
        tokens=tokens,
        held_up=(end.held_up_ns - begin.held_up_ns) / 1e9 / num_held_up if num_held_up else None,
        bytes_to_device=(end.num_bytes - begin.num_bytes) / (end.num_launches - begin.num_launches),
        fences={":".join(fence): n for fence, n in (scheduler.barrier.counts - fences).items()},
    )
