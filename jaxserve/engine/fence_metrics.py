"""What fences and programs did. Read where it is counted, when ``/metrics`` is asked: a step pays nothing for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

# Upper bounds in seconds of the extension's buckets (csrc/common/durations.h); the last has none.
BOUNDS = [*(floatToGoString(1e-6 * 2**i) for i in range(24)), "+Inf"]


class FenceMetrics(Collector):
    """The barrier's and the programs' metrics of one engine.

    Fences, waits and demotions count from when this was made (after warm-up); compiled programs from the start.
    On CUDA the stream's waits happen on the device, which does not tell how long they took: those families stay empty.
    """

    def __init__(self, engine: Engine, labels: Mapping[str, str], graph_splits: Mapping[str, int]):
        self._engine = engine
        self._names, self._values = list(labels), list(labels.values())
        self.graph_splits = graph_splits
        self._first_stats = engine.parts.rows.stream.stats()
        self._first_fences = engine.scheduler.barrier.counts.copy()
        self._first_demotions = self._demotions()

    def collect(self) -> Iterator[Metric]:
        """Every family, whether it has samples or not: its help text says when it has none."""
        stats = self._engine.parts.rows.stream.stats()
        fences = self._engine.scheduler.barrier.counts.copy()
        yield self._counter(
            "fences", "Write-after-read fences applied", ("kind", "reason"), fences - self._first_fences
        )
        yield self._histogram(
            "fence_wait_seconds",
            "How long the schedule stream stood in each fence's wait, needed or not; no samples on CUDA",
            stats["waits"], self._first_stats["waits"],
        )  # fmt: skip
        yield self._histogram(
            "row_writes_held_up_seconds",
            "From publishing a step's row writes to their being done, by the fence they stood behind; "
            "no samples on CUDA",
            stats["held_up"], self._first_stats["held_up"],
        )  # fmt: skip
        staging_ns = stats["staging_wait_ns"] - self._first_stats["staging_wait_ns"]
        yield self._counter(
            "staging_wait_seconds", "How long the host waited for a free staging block", (), {(): staging_ns / 1e9}
        )
        yield self._counter(
            "demotions",
            "Executions whose shared reads end elsewhere than their attention backend declared",
            ("from", "to", "backend"), self._demotions() - self._first_demotions,
        )  # fmt: skip
        caches = self._engine.parts.worker.program_caches
        by_kind: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
            ("programs_compiled", "Programs compiled or fetched from the cache", lambda cache: cache.num_compiled),
            ("program_compile_seconds", "Time that took", lambda cache: cache.compile_seconds),
            ("late_compiles", "Programs compiled after warm-up; a request waited", lambda cache: cache.num_late),
            ("retraces", "Launches refused because an argument did not fit the compiled program; the log names it",
             lambda cache: cache.num_retraces),
        )  # fmt: skip
        for name, text, read in by_kind:
            totals: dict[tuple[str, ...], float] = {}
            for cache in caches:
                totals[cache.kind,] = totals.get((cache.kind,), 0) + read(cache)
            yield self._counter(name, text, ("kind",), totals)
        yield self._graph_splits()
        captured = self._engine.parts.worker.model_runner.captured
        counts = None if captured is None else captured.counts()
        names = () if counts is None else ("replayed", "uncaptured", "moved")
        yield self._counter(
            "captured_steps",
            "With --graph-backend cuda-graph: steps that were one launch of a graph, those that ran as they are, and "
            "graphs captured anew because an address had changed; no samples otherwise",
            ("outcome",), {(name,): getattr(counts, name) for name in names},
        )  # fmt: skip

    def _demotions(self) -> Counter[Any]:
        return sum((runner.demotions.counts for runner in self._engine.parts.worker.step_runners), Counter())

    def _counter(self, name: str, text: str, labels: tuple[str, ...],
                 values: Mapping[Any, float]) -> CounterMetricFamily:  # fmt: skip
        family = CounterMetricFamily(f"jaxserve:{name}", text, labels=[*self._names, *labels])
        for key, value in values.items():
            family.add_metric([*self._values, *key], value)
        return family

    def _histogram(self, name: str, text: str, durations: dict[str, Any],
                   first: dict[str, Any]) -> HistogramMetricFamily:  # fmt: skip
        family = HistogramMetricFamily(f"jaxserve:{name}", text, labels=[*self._names, "kind"])
        for kind, found in durations.items():
            before = first.get(kind, {"counts": [0] * len(BOUNDS), "total_ns": 0})
            counts = accumulate(now - then for now, then in zip(found["counts"], before["counts"], strict=True))
            seconds = (found["total_ns"] - before["total_ns"]) / 1e9
            family.add_metric([*self._values, kind], list(zip(BOUNDS, counts, strict=True)), seconds)
        return family

    def _graph_splits(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "jaxserve:program_graph_splits",
            "Places where a program's CUDA graph is interrupted; no samples where that is not known, as on the CPU",
            labels=[*self._names, "program"],
        )
        for program, splits in self.graph_splits.items():
            family.add_metric([*self._values, program], splits)
        return family
