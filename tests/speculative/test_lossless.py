"""Speculation changes the number of steps, never a token: every backend and fence, under poison and stalls."""

from __future__ import annotations

import pytest
from drafters import Prophet
from harness import STALL_US, make_engine, run

from jaxserve.barrier.native import native_module
from jaxserve.testing.poison import Poison

CONFIGURATIONS = {
    "native": {},
    "native, page size 1": {"page_size": 1},
    "native, no overlap": {"disable_overlap_schedule": True},
    "native, forced coarse": {"force_coarse_war_barrier": True},
    "native, few pages": {"num_pages": 24},
    "xla, page size 16": {"attention_backend": "xla", "page_size": 16},
    "xla-live": {"attention_backend": "xla-live"},
    "planned": {"attention_backend": "planned"},
    "xla, no marker": {"attention_backend": "xla", "shared_read_marker": False},
    "upload": {"shared_updates": "upload"},
}
DRAFT_STALL = {
    "drafts.before_acceptance": STALL_US,
    "drafts.before_reads": STALL_US // 4,
    "snapshot.before_reads": STALL_US // 2,
}


# Where drafts are read depends on the source of the other rows; the rest is tried with one algorithm.
ROW_SOURCES = ("native", "planned", "xla, no marker")
CASES = [("LIVE-PROPHET", name) for name in CONFIGURATIONS]
CASES += [(algorithm, name) for algorithm in ("PROPHET", "TREE-PROPHET") for name in ROW_SOURCES]


@pytest.mark.parametrize(("algorithm", "configuration"), CASES)
def test_tokens_equal_the_oracle(algorithm, configuration, prophets, tiny_model, right_tokens):
    settings = CONFIGURATIONS[configuration]
    engine = make_engine(tiny_model, **settings, speculative_algorithm=algorithm, speculative_adaptive=False)
    poison = Poison(engine, Prophet.future_of) if "shared_updates" not in settings else None
    points = native_module("cpu").hold_points
    try:
        assert run(engine, "plain") == right_tokens
        for point, microseconds in DRAFT_STALL.items():
            points.delay(point, microseconds)
        assert run(engine, "stalled") == right_tokens
        figures = engine.scheduler.speculation.figures
        assert 0.2 < figures.acceptance_rate < 1.0
        assert figures.num_accepted > 40
        if poison is not None:
            assert poison.num_poisoned > 20
        if configuration == "native, few pages":
            assert engine.scheduler.num_preemptions > 0
    finally:
        points.clear()
        engine.close()


def test_fences_of_verify(prophets, tiny_model):
    for algorithm, fence in (("PROPHET", ("fine", "marker")), ("LIVE-PROPHET", ("coarse", "ngram"))):
        engine = make_engine(tiny_model, speculative_algorithm=algorithm, speculative_adaptive=False)
        try:
            run(engine)
            run(engine, "again")  # its requests decode together in few steps
            counts = engine.scheduler.barrier.counts
            assert counts[fence] > 10
            assert algorithm == "PROPHET" or counts["fine", "marker"] < counts[fence]
        finally:
            engine.close()
