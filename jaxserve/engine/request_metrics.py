"""What requests and steps did, counted by the step thread in plain numbers and rendered when ``/metrics`` is asked.

The counters of prometheus-client take a lock each time, about a microsecond; a step of many tokens makes many of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import FinishReason
from jaxserve.engine.distributions import (
    FIRST_TOKEN_SECONDS,
    PER_TOKEN_SECONDS,
    REQUEST_SECONDS,
    STEP_TOKENS,
    Distribution,
    Pace,
    lengths_up_to,
)

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

STEP_NAMES = {ForwardMode.EXTEND: "prefill", ForwardMode.DECODE: "decode", ForwardMode.TARGET_VERIFY: "verify"}


class RequestMetrics(Collector):
    """Counts since this was made (after warm-up). The step thread alone changes it.

    Attributes:
        num_requests: requests accepted.
        prompt_tokens, generation_tokens: tokens of their prompts, tokens delivered.
        emitted_tokens: those delivered tokens that came from verified rows.
        finished: outputs ended, by reason.
        steps: steps launched, by mode.
        pace: of ``generation_tokens``.
        first_token_s, between_steps_s, per_token_s, queue_s, prefill_s, decode_s, inference_s, e2e_s: see ``collect``.
        prompt_lengths, output_lengths: tokens of outputs that ended, and of their prompts.
        step_tokens: tokens each step computes.
    """

    def __init__(self, engine: Engine, labels: Mapping[str, str]):
        self._engine = engine
        self._names, self._values = list(labels), list(labels.values())
        scheduler = engine.scheduler
        self._preemptions_before = scheduler.num_preemptions
        self._queried_before, self._hit_before = scheduler.memory.num_queried, scheduler.memory.num_hit
        self.num_requests = self.prompt_tokens = self.generation_tokens = self.emitted_tokens = 0
        self.finished: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.steps: dict[ForwardMode, int] = dict.fromkeys(STEP_NAMES, 0)
        self.pace = Pace()
        self.first_token_s = Distribution(FIRST_TOKEN_SECONDS)
        self.between_steps_s, self.per_token_s = Distribution(PER_TOKEN_SECONDS), Distribution(PER_TOKEN_SECONDS)
        self.queue_s, self.prefill_s, self.decode_s, self.inference_s, self.e2e_s = (
            Distribution(REQUEST_SECONDS) for _ in range(5)
        )
        lengths = lengths_up_to(engine.context_length)
        self.prompt_lengths, self.output_lengths = Distribution(lengths), Distribution(lengths)
        self.step_tokens = Distribution(STEP_TOKENS)

    def collect(self) -> Iterator[Metric]:
        """Gauges of the moment, counters, histograms. Names of the same thing in vLLM and SGLang follow each other."""
        yield from self._gauges()
        yield from self._counters()
        for names, text, values in (
            (("time_to_first_token_seconds",), "From arrival to the first token", self.first_token_s),
            (("inter_token_latency_seconds",), "Between steps that gave one output tokens", self.between_steps_s),
            (("time_per_output_token_seconds", "request_time_per_output_token_seconds"),
             "From first to last token of an output, divided by the tokens behind the first", self.per_token_s),
            (("e2e_request_latency_seconds",), "From arrival to the end of an output", self.e2e_s),
            (("request_queue_time_seconds",), "From arrival to the first step", self.queue_s),
            (("request_prefill_time_seconds",), "From the first step to the first token", self.prefill_s),
            (("request_decode_time_seconds",), "From the first token to the last", self.decode_s),
            (("request_inference_time_seconds",), "From the first step to the last token", self.inference_s),
            (("request_prompt_tokens",), "Prompt tokens of outputs that ended", self.prompt_lengths),
            (("request_generation_tokens",), "Tokens of outputs that ended", self.output_lengths),
            (("iteration_tokens_total",), "Tokens a step computes", self.step_tokens),
        ):  # fmt: skip
            for name in names:
                family = HistogramMetricFamily(f"jaxserve:{name}", text, labels=self._names)
                family.add_metric(self._values, values.cumulative(), values.total)
                yield family

    def _gauges(self) -> Iterator[Metric]:
        scheduler = self._engine.scheduler
        memory = scheduler.memory
        used = 1 - memory.num_available / max(1, scheduler.pool.num_usable)
        hit_rate = (memory.num_hit - self._hit_before) / max(1, memory.num_queried - self._queried_before)
        pace = self.pace.per_second(time.monotonic(), self.generation_tokens)
        for names, text, value in (
            (("num_requests_running", "num_running_reqs"), "Sequences that hold a slot", len(scheduler.running)),
            (("num_requests_waiting", "num_queue_reqs"), "Sequences that wait for one", len(scheduler.waiting)),
            (("kv_cache_usage_perc", "token_usage"), "Share of KV pages that sequences use, 0 to 1", used),
            (("kv_cache_cached_pages",), "KV pages in the prefix cache", memory.num_cached),
            (("kv_cache_evictable_pages",), "Those of them that no sequence uses", memory.num_evictable),
            (("cache_hit_rate",), "Share of prompt tokens found in the prefix cache, 0 to 1", hit_rate),
            (("gen_throughput",), "Tokens delivered a second, over the newest 10 seconds", pace),
        ):
            for name in names:
                family = GaugeMetricFamily(f"jaxserve:{name}", text, labels=self._names)
                family.add_metric(self._values, value)
                yield family

    def _counters(self) -> Iterator[Metric]:
        speculates = self._engine.scheduler.speculation is not None
        for name, text, value in (
            ("num_requests", "Requests accepted", self.num_requests),
            ("prompt_tokens", "Prompt tokens accepted", self.prompt_tokens),
            ("generation_tokens", "Output tokens delivered", self.generation_tokens),
            ("spec_decode_num_emitted_tokens", "Output tokens delivered that came from verified rows",
             self.emitted_tokens if speculates else None),
            ("num_preemptions", "Sequences whose pages were taken away",
             self._engine.scheduler.num_preemptions - self._preemptions_before),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache",
             self._engine.scheduler.memory.num_queried - self._queried_before),
            ("prefix_cache_hits", "Prompt tokens found there",
             self._engine.scheduler.memory.num_hit - self._hit_before),
        ):  # fmt: skip
            if value is not None:
                family = CounterMetricFamily(f"jaxserve:{name}", text, labels=self._names)
                family.add_metric(self._values, value)
                yield family
        by_reason = CounterMetricFamily("jaxserve:request_success", "Outputs ended, whatever the reason",
                                        labels=[*self._names, "finished_reason"])  # fmt: skip
        for reason, count in self.finished.items():
            by_reason.add_metric([*self._values, reason], count)
        yield by_reason
        by_mode = CounterMetricFamily("jaxserve:steps", "Steps launched", labels=[*self._names, "mode"])
        for mode, count in self.steps.items():
            if mode is not ForwardMode.TARGET_VERIFY or speculates:
                by_mode.add_metric([*self._values, STEP_NAMES[mode]], count)
        yield by_mode
