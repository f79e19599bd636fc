"""Records an engine at work on a tiny model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.barrier.native import native_module
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.timeline.build import build_timeline
from jaxserve.timeline.chrome_trace import chrome_trace
from jaxserve.timeline.device_records import DeviceRecords
from jaxserve.timeline.model import Timeline
from jaxserve.timeline.recorder import HostRecords
from jaxserve.timeline.trace import Recording

SETTINGS: dict[str, Any] = {
    "context_length": 32, "page_size": 4, "max_running_requests": 2, "chunked_prefill_size": 8,
    "prefill_token_buckets": (8,), "decode_batch_buckets": (2,), "skip_warmup": True,
}  # fmt: skip
LONG_STEP_US = 50_000  # a step that goes on this long after its reads, so that a sleepy thread does not matter


@dataclass
class Recorded:
    """What a run left behind."""

    host: HostRecords
    device: DeviceRecords
    timeline: Timeline
    trace: dict[str, Any]


def serve(engine: Engine, num_tokens: int, tag: str) -> None:
    """Two requests of different lengths, to their end."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for row in range(2):
        engine.add(Request(f"{tag}-{row}", tuple(range(1, 6 + 2 * row)), params))
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error


def record(model: Path, *, long_steps: bool = False, num_tokens: int = 10, **settings: Any) -> Recorded:
    """A run after one that compiled everything; ``long_steps`` stalls every step behind its reads."""
    engine = Engine(EngineConfig(model=str(model), **{**SETTINGS, **settings}))
    holds = native_module("cpu").hold_points
    try:
        serve(engine, num_tokens, "before")
        engine.parts.rows.stream.sync()  # what is still queued would be recorded without who queued it
        if long_steps:
            holds.delay("end.before_record", LONG_STEP_US)
        recording = Recording().start()
        try:
            serve(engine, num_tokens, "recorded")
            engine.parts.rows.stream.sync()  # the wait for the last step may end after the engine has its tokens
        finally:
            host, device = recording.records()
    finally:
        holds.clear()
        engine.close()
    timeline = build_timeline(host, device)
    return Recorded(host, device, timeline, chrome_trace(timeline))
