"""How well drafts do, for ``/metrics`` and ``/get_server_info``. Read where it is counted, when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.core.forward_mode import ForwardMode
from jaxserve.speculative.speculation import Speculation

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine


class SpeculationMetrics(Collector):
    """The figures of an engine that speculates; counters under vLLM's names, gauges under SGLang's."""

    def __init__(self, speculation: Speculation, labels: Mapping[str, str]):
        self._speculation = speculation
        self._names, self._values = list(labels), list(labels.values())

    def collect(self) -> Iterator[Metric]:
        """The gauges have no samples before the first verified row."""
        figures = self._speculation.figures
        # The step thread counts meanwhile, rows first and accepted drafts last; read the other way round, a rate made
        # of these never exceeds 1.
        accepted_at, num_accepted = list(figures.accepted_at), figures.num_accepted
        drafted_at, num_drafted = list(figures.drafted_at), figures.num_drafted
        yield self._counter("num_accepted_tokens", "Drafts that held, those behind the end of an output included",
                            num_accepted)  # fmt: skip
        yield self._per_position("num_accepted_tokens_per_pos", "Rows in which the draft at a position held",
                                 accepted_at)  # fmt: skip
        yield self._counter("num_draft_tokens", "Drafts verified", num_drafted)
        yield self._per_position("num_drafts_per_pos", "Rows whose drafts reach a position", drafted_at)
        yield self._counter("num_drafts", "Rows verified: one is the drafts of a sequence in one step",
                            figures.num_rows)  # fmt: skip
        recent = figures.recent
        for name, text, value in (
            ("spec_accept_length", "Tokens per verified row, the target model's own included; of the newest 1000 rows",
             recent.mean_accepted_length),
            ("spec_accept_rate", "Share of drafts that held, 0 to 1; of the newest 1000 rows", recent.acceptance_rate),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(f"jaxserve:{name}", text, labels=self._names)
            if recent.num_rows:
                gauge.add_metric(self._values, value)
            yield gauge

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"jaxserve:spec_decode_{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _per_position(self, name: str, text: str, counts: list[int]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"jaxserve:spec_decode_{name}", text, labels=[*self._names, "position"])
        for position, count in enumerate(counts):
            family.add_metric([*self._values, str(position)], count)
        return family


def speculation_in_use(engine: Engine) -> dict[str, Any] | None:
    """Who drafts, how much and behind which fence, and how well since warm-up; None where speculation is off."""
    speculation = engine.scheduler.speculation
    if speculation is None:
        return None
    figures = speculation.figures
    return {
        "algorithm": speculation.algorithm.name,
        "num_draft_tokens": engine.config.speculative_num_draft_tokens,
        "adaptive": speculation.is_adaptive,
        "fence": engine.fences_in_use()[ForwardMode.TARGET_VERIFY.name]["fence"],
        "num_accepted": figures.num_accepted,
        "num_drafted": figures.num_drafted,
        "num_rows": figures.num_rows,
        "rate_per_position": figures.rate_per_position,
    }
