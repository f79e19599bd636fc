"""Counters agree with what clients were given, whatever happened to their requests, and cost a step microseconds."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rig import Collected, add, greedy, prompt_of, run

from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import OutputDelta, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.engine.distributions import Distribution, Pace, lengths_up_to
from jaxserve.engine.engine import Engine
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.request_metrics import RequestMetrics
from jaxserve.runner.batch import StepBatch
from jaxserve.scheduler.scheduler import Committed
from jaxserve.speculative.figures import VerifiedRow

Engines = Callable[..., Engine]
PLAIN: dict[str, Any] = {"num_pages": 26, "max_queued_requests": 60}  # too few pages for four long sequences
# Paced by measured step times, a loaded machine drafts next to nothing.
NGRAM = PLAIN | {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3, "speculative_adaptive": False}


def samples(engine: Engine) -> dict[tuple[str, ...], float]:
    """What Prometheus would read: (name without prefix, label values but the model's) -> value."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(engine.metrics.registry).decode()):
        for sample in family.samples:
            name = sample.name.removeprefix("jaxserve:")
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[name, *labels.values()] = sample.value
    return found


class Witness:
    """Counts steps by looking at the plans, beside the metrics."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.steps: Counter[str] = Counter()
        self.step_tokens = 0
        launch = engine.scheduler.launch

        def counted(batch: StepBatch[Sequence]) -> Any:
            names = {ForwardMode.EXTEND: "prefill", ForwardMode.DECODE: "decode", ForwardMode.TARGET_VERIFY: "verify"}
            self.steps[names[batch.mode]] += 1
            self.step_tokens += len(batch.slots) * batch.queries if batch.tokens is None else batch.tokens.shape[1]
            return launch(batch)

        monkeypatch.setattr(engine.scheduler, "launch", counted)


@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "ngram"])
def test_every_counter_says_what_clients_got(
    engines: Engines, tiny: Path, monkeypatch: pytest.MonkeyPatch, speculates: bool
) -> None:
    """Mixed traffic: n > 1, aborts while waiting and while running, stop tokens, and too few pages, so that sequences
    are preempted; with NGRAM also verified drafts behind the end of an output."""
    engine = engines(tiny, **(NGRAM if speculates else PLAIN))
    engine.scheduler.residency.num_preemptions += 5  # of another time: counts begin at the reset
    engine.metrics.reset()
    preempted_before = engine.scheduler.num_preemptions
    witness, rng, collected = Witness(engine, monkeypatch), random.Random(7), Collected()
    open_ids: list[str] = []
    sent: dict[str, Request] = {}

    def traffic(step: int) -> list[OutputDelta]:
        deltas = []
        if rng.random() < 0.35:
            prompt = prompt_of(rng.randint(1, 24), seed=step)
            if rng.random() < 0.5:
                prompt = prompt[:4] * 6  # repeats itself, so there is something to draft
            params = greedy(rng.randint(1, 30), n=rng.choice([1, 1, 2, 3]), stop_token_ids=(rng.randint(0, 259),))
            name = add(engine, prompt, params)
            sent[name] = Request(name, tuple(prompt), params)
            open_ids.append(name)
        if open_ids and rng.random() < 0.1:
            deltas = engine.abort(open_ids.pop(rng.randrange(len(open_ids))))
        return deltas

    for step in range(120):
        collected.take(traffic(step))
        collected.take(engine.step())
    run(engine, collected)
    found = samples(engine)
    outputs = collected.outputs
    tokens = {key: len(output.token_ids) for key, output in outputs.items()}
    assert found["num_requests_total",] == len(sent) > 20
    assert found["prompt_tokens_total",] == sum(len(request.prompt_ids) for request in sent.values())
    assert found["generation_tokens_total",] == sum(tokens.values()) > 300
    reasons = Counter(output.finish_reason for output in outputs.values())
    assert set(reasons) == {"stop", "length", "abort"}
    assert {r: found["request_success_total", r] for r in ("stop", "length", "abort", "error")} == {
        "stop": reasons["stop"], "length": reasons["length"], "abort": reasons["abort"], "error": 0,
    }  # fmt: skip
    assert found["num_preemptions_total",] == engine.scheduler.num_preemptions - preempted_before > 0
    assert {key[1]: v for key, v in found.items() if key[0] == "steps_total" and v} == witness.steps
    assert found["iteration_tokens_total_count",] == sum(witness.steps.values())
    assert found["iteration_tokens_total_sum",] == witness.step_tokens

    # histograms: once per output, per output with a token, per output with two, per step that gave an output tokens
    started = sum(1 for count in tokens.values() if count)
    assert found["e2e_request_latency_seconds_count",] == len(outputs) == sum(r.params.n for r in sent.values())
    assert found["request_generation_tokens_count",] == found["request_prompt_tokens_count",] == len(outputs)
    assert found["request_generation_tokens_sum",] == sum(tokens.values())
    assert found["request_prompt_tokens_sum",] == sum(len(sent[name].prompt_ids) for name, _ in outputs)
    for name in ("time_to_first_token_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
                 "request_inference_time_seconds"):  # fmt: skip
        assert found[f"{name}_count",] == started, name
    assert started <= found["request_queue_time_seconds_count",] <= len(outputs)
    several = sum(1 for count in tokens.values() if count > 1)
    assert found["time_per_output_token_seconds_count",] == several
    assert found["request_time_per_output_token_seconds_count",] == several
    behind_the_first = sum(tokens.values()) - started
    if speculates:
        emitted = sum(o.speculation.num_emitted for o in outputs.values() if o.speculation)
        assert found["spec_decode_num_emitted_tokens_total",] == emitted > 50
        assert found["inter_token_latency_seconds_count",] < behind_the_first
    else:
        assert ("spec_decode_num_emitted_tokens_total",) not in found and ("steps_total", "verify") not in found
        assert found["inter_token_latency_seconds_count",] == behind_the_first

    # twins, and gauges at rest
    for one, other in (("num_requests_running", "num_running_reqs"), ("num_requests_waiting", "num_queue_reqs"),
                       ("kv_cache_usage_perc", "token_usage")):  # fmt: skip
        assert found[one,] == found[other,] == 0
    assert found["gen_throughput",] > 0


def test_gauges_follow_sequences_and_pages(engines: Engines, tiny: Path) -> None:
    engine = engines(tiny, **PLAIN)
    for seed in range(6):
        add(engine, prompt_of(8, seed), greedy(20))
    for _ in range(8):
        engine.step()
    found = samples(engine)
    assert found["num_running_reqs",] == 4 and found["num_queue_reqs",] == 2
    pool, available = engine.scheduler.pool, engine.scheduler.memory.num_available
    assert found["token_usage",] == pytest.approx((pool.num_usable - available) / pool.num_usable)
    assert 0 < found["token_usage",] < 1
    run(engine)


def test_a_token_the_client_does_not_get_is_not_counted(
    engines: Engines, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that are not numbers end an output; the token they gave was never delivered."""
    engine = engines(tiny, **PLAIN)
    engine.metrics.reset()
    add(engine, prompt_of(5), greedy(4), "broken")
    collected = Collected()
    commit = engine.scheduler.commit

    def not_numbers(*args: Any) -> list[Committed]:
        return [Committed(c.sequence, c.token_id, c.logprob, False, c.length) for c in commit(*args)]

    monkeypatch.setattr(engine.scheduler, "commit", not_numbers)
    run(engine, collected)
    found = samples(engine)
    assert collected["broken"].finish_reason == "error" and found["request_success_total", "error"] == 1
    assert found["generation_tokens_total",] == 0 == found["time_to_first_token_seconds_count",]


def test_the_text_parses_and_buckets_add_up(engines: Engines, tiny: Path) -> None:
    engine = engines(tiny, **PLAIN)
    engine.metrics.reset()
    add(engine, prompt_of(20), greedy(6))
    run(engine)
    families = list(text_string_to_metric_families(generate_latest(engine.metrics.registry).decode()))
    assert all(s.labels["model_name"] == engine.model_name for family in families for s in family.samples)
    for family in families:
        assert family.name.startswith("jaxserve:") and family.documentation
        if family.type == "histogram" and family.samples and "kind" not in family.samples[0].labels:
            buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
            assert buckets == sorted(buckets) and buckets[-1] == next(
                s.value for s in family.samples if s.name.endswith("_count")
            )
    lengths = [s for family in families for s in family.samples if s.name == "jaxserve:request_prompt_tokens_bucket"]
    assert {s.labels["le"]: s.value for s in lengths}["10.0"] == 0
    assert {s.labels["le"]: s.value for s in lengths}["20.0"] == 1


def test_distributions_and_pace() -> None:
    values = Distribution((1, 2, 5))
    for value in (0.5, 1, 1.5, 7):
        values.add(value)
    assert values.cumulative() == [("1.0", 2), ("2.0", 3), ("5.0", 3), ("+Inf", 4)] and values.total == 10
    assert lengths_up_to(128) == (1, 2, 5, 10, 20, 50, 100)
    pace = Pace(window_s=10.0, mark_every_s=1.0)
    for second in range(20):
        pace.note(float(second), 5 * second)
    assert pace.per_second(20.0, 100) == pytest.approx(5.0)
    assert pace.per_second(25.0, 100) == pytest.approx((100 - 75) / 10)  # idle since: falls
    assert pace.per_second(40.0, 100) == 0.0


def test_counting_costs_a_step_microseconds() -> None:
    """A step of 64 sequences, one token each. Measured: 16 us, a quarter of a microsecond per token."""
    memory = SimpleNamespace(num_queried=0, num_hit=0)
    scheduler = SimpleNamespace(num_preemptions=0, speculation=None, memory=memory)
    parts = SimpleNamespace()
    engine: Any = SimpleNamespace(model_name="m", context_length=4096, scheduler=scheduler, parts=parts)
    metrics = EngineMetrics.__new__(EngineMetrics)
    metrics._engine, metrics._marks = engine, {}
    metrics.requests = RequestMetrics(engine, {"model_name": "m"})
    requests = [Request(f"r{i}", (1, 2), SamplingParams()) for i in range(64)]
    owners = tuple(Sequence(request, 0, 1, 10, [1, 2]) for request in requests)
    for owner in owners:
        metrics.launched(StepBatch(1, ForwardMode.EXTEND, (owner,), np.zeros(1), 2, tokens=np.zeros((1, 2))))
    step = StepBatch(2, ForwardMode.DECODE, owners, np.zeros(64), 3)
    tokens = [(Committed(s, 5, None, True, 3, 0, VerifiedRow(0, 0)), OutputDelta("r", 0, "x", (5,))) for s in owners]
    took = []
    for _ in range(200):
        start = time.perf_counter()
        metrics.launched(step)
        for token, delta in tokens:
            metrics.committed(token, delta)
        took.append(time.perf_counter() - start)
    assert metrics.requests.generation_tokens == 200 * 64
    assert min(took) < 160e-6  # ten times that, for slow machines
