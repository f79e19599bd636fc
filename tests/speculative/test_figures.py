"""What is told of speculation: raw figures, counts per output, metrics, warnings."""

from __future__ import annotations

import functools
import logging
import tempfile
from typing import ClassVar

import harness
import numpy as np
import pytest
from drafters import Prophet
from harness import run, workload
from oracle import greedy_full_recompute

from jaxserve.core.request import CompletionOutput, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.speculation_counts import SpeculationCounts, total
from jaxserve.engine.llm import LLM
from jaxserve.engine.speculation_metrics import speculation_in_use
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model
from jaxserve.speculative import watch
from jaxserve.speculative.base import Proposals, SpeculativeAlgorithm
from jaxserve.speculative.figures import RECENT_ROWS, SpeculationFigures, VerifiedRow
from jaxserve.speculative.pacing import StepTimes
from jaxserve.speculative.registry import temporarily_registered
from jaxserve.speculative.watch import AcceptanceWatch

# Engines of equal shapes share compiled programs, which is most of the time they take.
_cache = tempfile.TemporaryDirectory(prefix="jaxserve-programs-")
make_engine = functools.partial(harness.make_engine, compilation_cache_dir=_cache.name)


class Scripted(SpeculativeAlgorithm):
    """Drafts as long a chain as it may, of which the first ``held[i]`` tokens are right at its i-th turn."""

    name = "SCRIPTED"
    held: ClassVar[list[int]] = []

    def __init__(self, context):
        super().__init__(context)
        self.turn = 0

    def propose(self, contexts, num_drafts):
        (context,) = contexts
        future = Prophet.future_of(context.tolist())[:num_drafts]
        held = self.held[self.turn] if self.turn < len(self.held) else num_drafts
        self.turn += 1
        drafts = [token if i < held else (token + 1) % 250 for i, token in enumerate(future)]
        row = np.array([drafts], np.int32)
        return Proposals(row, np.arange(len(drafts), dtype=np.int32)[None], np.array([len(drafts)], np.int32))


class Wrong(Scripted):
    """Never right."""

    held: ClassVar[list[int]] = [0] * 100_000

    def propose(self, contexts, num_drafts):
        rows = [super(Wrong, self).propose([context], num_drafts) for context in contexts]
        width = max(row.tokens.shape[1] for row in rows)
        pad = [np.pad(row.tokens, ((0, 0), (0, width - row.tokens.shape[1]))) for row in rows]
        parents = np.tile(np.arange(width, dtype=np.int32), (len(rows), 1))
        return Proposals(np.concatenate(pad), parents, np.concatenate([row.counts for row in rows]))


class Silent(SpeculativeAlgorithm):
    """Has nothing to say."""

    def propose(self, contexts, num_drafts):
        shape = len(contexts), num_drafts
        return Proposals(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(len(contexts), np.int32))


@pytest.fixture(scope="module")
def loaded(tiny_model):
    import jax.numpy as jnp

    return load_model(open_checkpoint(tiny_model), jnp.float32)


def serve(engine, prompt, **params) -> CompletionOutput:
    engine.add(Request("r", tuple(prompt), SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})))
    output = CompletionOutput(0)
    while engine.has_work:
        for delta in engine.step():
            output.append(delta)
    return output


def values(engine, name, *labels):
    """Samples of a metric: label values -> number."""
    samples = [s for family in engine.metrics.registry.collect() for s in family.samples]
    return {tuple(s.labels[label] for label in labels): s.value for s in samples if s.name == f"jaxserve:{name}"}


PROMPT = list(b"the figures of four steps")


def scripted(tiny_model, loaded, monkeypatch, held, num_draft_tokens):
    monkeypatch.setattr(Prophet, "answers", [PROMPT + greedy_full_recompute(loaded, PROMPT, 24)])
    monkeypatch.setattr(Scripted, "held", held)
    with temporarily_registered(Scripted) as name:
        return make_engine(
            tiny_model, speculative_algorithm=name, speculative_adaptive=False,
            speculative_num_draft_tokens=num_draft_tokens, decode_batch_buckets=(1,), max_running_requests=1,
        )  # fmt: skip


def test_figures_written_out():
    """O-32."""
    figures = SpeculationFigures()
    for accepted in (3, 1, 0, 2):
        figures.verified(VerifiedRow(3, accepted), 3)
    assert figures.mean_accepted_length == 2.5 and figures.acceptance_rate == 0.5
    assert figures.rate_per_position == [0.75, 0.5, 0.25]
    assert figures.recent.mean_accepted_length == 2.5 and figures.recent.acceptance_rate == 0.5
    figures.verified(VerifiedRow(5, 5), 5)
    assert figures.rate_per_position == [0.8, 0.6, 0.4, 1.0, 1.0]
    assert SpeculationFigures().acceptance_rate == SpeculationFigures().mean_accepted_length == 0


def test_recent_figures_forget():
    figures = SpeculationFigures()
    for _ in range(5 * int(RECENT_ROWS)):
        figures.verified(VerifiedRow(4, 4), 4)
    assert figures.recent.acceptance_rate == pytest.approx(1) and figures.recent.mean_accepted_length == pytest.approx(
        5
    )
    for _ in range(5 * int(RECENT_ROWS)):
        figures.verified(VerifiedRow(4, 0), 4)
    assert figures.recent.acceptance_rate < 0.01 < 0.4 < figures.acceptance_rate


def test_counts_add_up():
    one = SpeculationCounts().with_row(3, 3, 4).with_row(3, 0, 1)
    other = SpeculationCounts().with_row(5, 1, 2)
    assert one.rows_by_accepted == (1, 0, 0, 1) and (one.num_rows, one.num_accepted, one.num_emitted) == (2, 3, 5)
    both = total([one, other])
    assert both == SpeculationCounts(11, 7, (1, 1, 0, 1)) and both.mean_accepted_length == 7 / 3
    assert both.acceptance_rate == 4 / 11
    assert total([]) is None and SpeculationCounts().acceptance_rate == SpeculationCounts().mean_accepted_length == 0


def test_four_steps(tiny_model, loaded, monkeypatch):
    """O-32: k = 3, of which 3, 1, 0 and 2 hold."""
    engine = scripted(tiny_model, loaded, monkeypatch, [3, 1, 0, 2], num_draft_tokens=4)
    output = serve(engine, PROMPT, max_tokens=12)  # 12: with 11 the last row would have no room for three drafts
    figures, counts = engine.scheduler.speculation.figures, output.speculation
    assert figures.mean_accepted_length == 2.5 and figures.acceptance_rate == 0.5
    assert figures.rate_per_position == [0.75, 0.5, 0.25]
    assert (counts.num_rows, counts.num_drafted, counts.num_accepted) == (4, 12, 6)
    assert (
        counts.mean_accepted_length == 2.5 and counts.acceptance_rate == 0.5 and counts.rows_by_accepted == (1, 1, 1, 1)
    )
    steps = values(engine, "steps_total", "mode")
    assert steps == {("prefill",): 2, ("decode",): 1, ("verify",): 4}
    assert 1 + counts.num_emitted + steps["decode",] == len(output.token_ids) == 12
    assert values(engine, "spec_decode_num_emitted_tokens_total")[()] == counts.num_emitted == 10
    engine.close()


def test_an_end_within_the_drafts(tiny_model, loaded, monkeypatch):
    """O-32: five drafts hold, and the third is the end: raw figures say five, those of the output three."""
    engine = scripted(tiny_model, loaded, monkeypatch, [5], num_draft_tokens=6)
    answer = Prophet.answers[0][len(PROMPT) :]
    assert answer[3] not in answer[:3]
    output = serve(engine, PROMPT, max_tokens=24, stop_token_ids=(answer[3],))
    figures, counts = engine.scheduler.speculation.figures, output.speculation
    assert (figures.num_rows, figures.num_drafted, figures.num_accepted) == (1, 5, 5)
    assert counts == SpeculationCounts(num_drafted=5, num_emitted=3, rows_by_accepted=(0, 0, 0, 1))
    assert 1 + counts.num_emitted == len(output.token_ids)
    assert values(engine, "spec_decode_num_accepted_tokens_total")[()] == 5
    assert values(engine, "spec_decode_num_emitted_tokens_total")[()] == 3
    engine.close()


def test_metrics_agree_with_what_clients_are_told(tiny_model, prophets):
    engine = make_engine(tiny_model, speculative_algorithm="TREE-PROPHET", speculative_adaptive=False)
    assert values(engine, "spec_decode_num_drafts_total") == {(): 0}
    assert values(engine, "spec_accept_length") == values(engine, "spec_accept_rate") == {}  # not known: absent
    last = {}
    for i, (prompt, output) in enumerate(workload()):
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, n=2)
        engine.add(Request(f"r{i}", tuple(prompt), params))
    while engine.has_work:
        for delta in engine.step():
            before = last.get((delta.request_id, delta.index), SpeculationCounts())
            assert delta.speculation.num_drafted >= before.num_drafted and delta.speculation.acceptance_rate <= 1
            last[delta.request_id, delta.index] = delta.speculation
    counts = total(list(last.values()))
    assert len(last) == 20 and counts.num_accepted > 50
    assert values(engine, "spec_decode_num_drafts_total")[()] == counts.num_rows
    assert values(engine, "spec_decode_num_draft_tokens_total")[()] == counts.num_drafted
    assert values(engine, "spec_decode_num_accepted_tokens_total")[()] == counts.num_accepted
    assert values(engine, "spec_decode_num_emitted_tokens_total")[()] == counts.num_emitted
    held = values(engine, "spec_decode_num_accepted_tokens_per_pos_total", "position")
    reached = values(engine, "spec_decode_num_drafts_per_pos_total", "position")
    assert sum(held.values()) == counts.num_accepted and set(held) == set(reached)
    assert all(held[position] <= reached[position] <= counts.num_rows for position in held)
    assert values(engine, "spec_accept_rate")[()] == pytest.approx(counts.acceptance_rate)
    assert values(engine, "spec_accept_length")[()] == pytest.approx(counts.mean_accepted_length)
    said = speculation_in_use(engine)
    assert said["algorithm"] == "TREE-PROPHET" and said["num_draft_tokens"] == 8 and said["adaptive"] is False
    assert said["fence"] == "coarse:ngram" and said["num_accepted"] == counts.num_accepted
    engine.metrics.reset()
    assert values(engine, "spec_decode_num_drafts_total") == {(): 0} and values(engine, "spec_accept_rate") == {}
    engine.close()


def test_generate_tells_of_every_output(tiny_model, prophets):
    settings = harness.SETTINGS | {"compilation_cache_dir": _cache.name, "speculative_adaptive": False}
    (prompt, num_tokens), *_ = workload()
    with LLM(str(tiny_model), **settings, speculative_algorithm="TREE-PROPHET") as llm:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, n=2)
        (output,) = llm.generate(prompt, params)
    one, other = (each.speculation for each in output.outputs)
    assert one.num_accepted > 0 and other.num_accepted > 0 and output.speculation == one + other


def test_nothing_is_told_without_speculation(tiny_model):
    engine = make_engine(tiny_model)
    assert serve(engine, PROMPT, max_tokens=4).speculation is None and speculation_in_use(engine) is None
    assert not any("spec" in family.name for family in engine.metrics.registry.collect())
    engine.close()


def test_the_fence_that_is_told_is_the_fence_that_is_applied(tiny_model, prophets):
    for algorithm in ("PROPHET", "LIVE-PROPHET"):
        engine = make_engine(tiny_model, speculative_algorithm=algorithm, speculative_adaptive=False)
        before = engine.scheduler.barrier.counts.copy()
        run(engine)
        told = tuple(speculation_in_use(engine)["fence"].split(":"))
        verify = values(engine, "steps_total", "mode")["verify",]
        plain = values(engine, "steps_total", "mode").get(("decode",), 0)
        same = told == ("fine", "marker")  # plain decode steps get that one, too
        assert (engine.scheduler.barrier.counts - before)[told] == verify + (plain if same else 0)
        engine.close()


def test_drafts_that_never_hold_are_reported_once(caplog):
    bad, good = AcceptanceWatch("BAD"), AcceptanceWatch("GOOD")
    with caplog.at_level(logging.WARNING):
        for i in range(3 * int(watch.MEMORY)):
            bad.committed(1, 0, 1, verified=True)
            good.committed(1, int(i % 10 == 0), int(i % 10 != 0), verified=True)
    (record,) = caplog.records
    assert record.getMessage().startswith("BAD: of the newest 2000 drafts that could hold, 0.0 % did")
    assert "--speculative-algorithm" in record.getMessage()


def test_drafts_that_stop_holding_are_reported(caplog):
    changed = AcceptanceWatch("CHANGED")
    with caplog.at_level(logging.WARNING):
        for _ in range(100_000):
            changed.committed(3, 2, 0, verified=True)
        assert not caplog.records
        for _ in range(20_000):
            changed.committed(1, 0, 1, verified=True)
    assert len(caplog.records) == 1


def test_idle_speculation_is_told_once(caplog):
    idle, busy = AcceptanceWatch("IDLE"), AcceptanceWatch("BUSY")
    with caplog.at_level(logging.WARNING):
        for i in range(3 * watch.IDLE_TOKENS):
            idle.committed(1, int(i % 4 == 0), int(i % 4 == 1), verified=False)
            busy.committed(1, 1, 0, verified=i % 10 == 0)
    (record,) = caplog.records
    assert "IDLE: speculation is idle; 0 of the first 10000 tokens" in record.getMessage()
    assert "drafts for 5000 tokens, of which 0.50 held" in record.getMessage()


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_wrong_draft_is_noticed_whatever_the_pace(adaptive, tiny_model, prophets, caplog, monkeypatch):
    monkeypatch.setattr(watch, "MEMORY", 60.0)
    if adaptive:  # verifying is made to seem dear, so that not one draft is sent
        monkeypatch.setattr(StepTimes, "cost", lambda self, queries, batch: 1.0 if queries == 1 else 10.0)
    with temporarily_registered(Wrong) as name:
        engine = make_engine(tiny_model, speculative_algorithm=name, speculative_adaptive=adaptive)
    with caplog.at_level(logging.WARNING):
        run(engine, "a")
        run(engine, "b")
    (record,) = [each for each in caplog.records if each.name == "jaxserve.speculative.watch"]
    assert "drafts that could hold, 0.0 % did" in record.getMessage()
    figures = engine.scheduler.speculation.figures
    assert figures.num_accepted == 0 and (figures.num_rows == 0) == adaptive
    engine.close()


def test_an_algorithm_without_drafts_is_idle(tiny_model, caplog, monkeypatch):
    monkeypatch.setattr(watch, "IDLE_TOKENS", 50)
    with temporarily_registered(Silent) as name:
        engine = make_engine(tiny_model, speculative_algorithm=name)
    with caplog.at_level(logging.WARNING):
        run(engine)
    (record,) = [each for each in caplog.records if each.name == "jaxserve.speculative.watch"]
    assert "0 of the first 5" in record.getMessage() and "nothing to verify" in record.getMessage()
    engine.close()
