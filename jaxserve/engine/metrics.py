"""Engine metrics in Prometheus form. Names follow the field: ``jaxserve:num_requests_running`` and so on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import Request
from jaxserve.core.sequence import Sequence
from jaxserve.engine.fence_metrics import FenceMetrics
from jaxserve.engine.speculation_metrics import SpeculationMetrics
from jaxserve.runner.batch import StepBatch
from jaxserve.scheduler.scheduler import Committed

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

log = logging.getLogger(__name__)

LATENCY_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip

_STEP_NAMES = {ForwardMode.EXTEND: "prefill", ForwardMode.DECODE: "decode", ForwardMode.TARGET_VERIFY: "verify"}


class EngineMetrics:
    """Counters and gauges of one engine.

    Attributes:
        registry: what ``/metrics`` renders.
        graph_splits: program -> places where its CUDA graph is interrupted, of the programs it is known of.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.graph_splits: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        """Starts all counts at zero (after warm-up)."""
        self.registry = CollectorRegistry()
        self._model = {"model_name": self._engine.model_name}
        self._last_token: dict[Sequence, float] = {}
        scheduler = self._engine.scheduler
        pool = scheduler.pool
        self._gauge("num_requests_running", "Sequences that hold a slot", lambda: len(scheduler.running))
        self._gauge("num_requests_waiting", "Sequences that wait for one", lambda: len(scheduler.waiting))
        self._gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1",
                    lambda: 1 - pool.num_free / max(1, pool.num_usable))  # fmt: skip
        self._gauge("num_preemptions", "Sequences whose pages were taken away", lambda: scheduler.num_preemptions)
        self.registry.register(FenceMetrics(self._engine, self._model, self.graph_splits))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens accepted")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens delivered")
        self._emitted: Any = None
        if scheduler.speculation is not None:
            scheduler.speculation.reset_figures()
            self.registry.register(SpeculationMetrics(scheduler.speculation, self._model))
            self._emitted = self._counter(
                "spec_decode_num_emitted_tokens", "Output tokens delivered that came from verified rows"
            )
        self._finished = Counter("jaxserve:request_success", "Outputs ended", ["model_name", "finished_reason"],
                                 registry=self.registry)  # fmt: skip
        self._steps = Counter("jaxserve:steps", "Steps launched", ["model_name", "mode"], registry=self.registry)
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token")
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens of one output")
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token")

    def _gauge(self, name: str, text: str, read: Any) -> None:
        gauge = Gauge(f"jaxserve:{name}", text, ["model_name"], registry=self.registry)
        gauge.labels(**self._model).set_function(read)

    def _counter(self, name: str, text: str) -> Any:
        return Counter(f"jaxserve:{name}", text, ["model_name"], registry=self.registry).labels(**self._model)

    def _histogram(self, name: str, text: str) -> Any:
        histogram = Histogram(f"jaxserve:{name}", text, ["model_name"], buckets=LATENCY_BUCKETS, registry=self.registry)
        return histogram.labels(**self._model)

    def set_graph_splits(self, splits: Mapping[str, int]) -> None:
        """Takes over what a program report says of this engine's programs; warns of others, which it cannot mean."""
        own = set()
        for runner in self._engine.parts.worker.step_runners:
            for cache, keys in zip((runner.steps, runner.preps), runner.program_keys(), strict=True):
                own |= {f"{cache.kind} {key.label}" for key in keys}
        self.graph_splits.update({program: count for program, count in splits.items() if program in own})
        others = [program for program in splits if program not in own]
        if others:
            log.warning("the program report is of another configuration: this engine has no %s", ", ".join(others))

    def accepted(self, request: Request) -> None:
        """A request entered the queue."""
        self._prompt_tokens.inc(len(request.prompt_ids))

    def launched(self, batch: StepBatch) -> None:
        """A step was dispatched."""
        self._steps.labels(mode=_STEP_NAMES[batch.mode], **self._model).inc()

    def committed(self, token: Committed) -> None:
        """A token was committed to an output."""
        now, sequence = time.monotonic(), token.sequence
        self._generation_tokens.inc()
        if token.verified is not None:
            self._emitted.inc()
        if sequence in self._last_token:
            self._itl.observe(now - self._last_token[sequence])
        else:
            self._ttft.observe(now - sequence.request.arrival_s)
        self._last_token[sequence] = now

    def finished(self, sequence: Sequence) -> None:
        """An output ended."""
        self._last_token.pop(sequence, None)
        self._finished.labels(finished_reason=sequence.finish_reason, **self._model).inc()
        self._e2e.observe(time.monotonic() - sequence.request.arrival_s)
