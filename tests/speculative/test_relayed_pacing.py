"""How many drafts a draft model makes."""

from __future__ import annotations

import pytest

from jaxserve.speculative.pacing import LEAST_SAMPLES, MEMORY, Record, StepTimes
from jaxserve.speculative.relayed_pacing import BURST, LONGEST_WAIT, SHORTEST_WAIT, RelayedPacing

DEPTHS = {1: 0, 2: 1, 4: 3}


def measured(costs: dict[int, float]) -> StepTimes:
    times = StepTimes()
    for queries, cost in costs.items():
        for _ in range(LEAST_SAMPLES):
            times.add(queries, 1, 0.01 * cost)
    return times


def record(chance: float) -> Record:
    return Record(hits=chance * MEMORY, trials=MEMORY)


@pytest.mark.parametrize(
    ("chance", "costs", "queries"),
    [
        (0.1, {2: 1.2, 4: 1.6}, 1),
        (0.45, {2: 1.2, 4: 1.8}, 2),  # 1.45 / 1.2; three drafts bring 1.74 / 1.8
        (0.45, {2: 1.2, 4: 1.4}, 4),
        (0.9, {2: 1.2, 4: 1.8}, 4),
        (0.9, {2: 2.0, 4: 4.0}, 1),
    ],
)
def test_the_best_size(chance, costs, queries):
    pacing = RelayedPacing(DEPTHS, measured({1: 1.0} | costs))
    assert pacing.queries_for([record(chance)], 1, 1) == queries


def test_rows_without_drafts_cost_as_much():
    pacing = RelayedPacing(DEPTHS, measured({1: 1.0, 2: 1.2, 4: 1.6}))
    assert pacing.queries_for([record(0.9)] * 4, 4, 1) == 4
    assert pacing.queries_for([record(0.9)], 4, 1) == 1
    assert pacing.queries_for([], 4, 1) == 1


def test_plain_steps_are_timed_first():
    times = StepTimes()
    pacing = RelayedPacing(DEPTHS, times)
    for _ in range(LEAST_SAMPLES):
        assert pacing.queries_for([record(0.9)], 1, 1) == 1
        times.add(1, 1, 0.01)
    assert pacing.queries_for([record(0.9)], 1, 1) == 4
    assert pacing.queries_for([record(0.9)] * 2, 2, 2) == 1, "another batch size has costs of its own"


def test_other_sizes_are_run_now_and_then_and_ever_more_rarely():
    pacing = RelayedPacing(DEPTHS, measured({1: 1.0, 2: 1.5, 4: 2.5}))
    bad = record(0.1)
    sizes = [pacing.queries_for([bad], 1, 1) for _ in range(20 * LONGEST_WAIT)]
    bursts = [place for place, size in enumerate(sizes) if size != 1 and (place == 0 or sizes[place - 1] == 1)]
    assert {tuple(sizes[place : place + BURST + 1]) for place in bursts} == {(2,) * BURST + (1,), (4,) * BURST + (1,)}
    waits = [later - earlier for earlier, later in zip([1 - BURST, *bursts], bursts, strict=False)]
    assert waits[0] < SHORTEST_WAIT + BURST and waits[-1] in range(LONGEST_WAIT, LONGEST_WAIT + BURST)
    assert waits == sorted(waits)
    assert sum(size != 1 for size in sizes) < 0.015 * len(sizes)
    for _ in range(10):
        pacing.new_record()
    assert 2 in (soon := [pacing.queries_for([bad], 1, 1) for _ in range(SHORTEST_WAIT + BURST)]) or 4 in soon


def test_plain_steps_are_timed_again_while_drafts_pay():
    pacing = RelayedPacing(DEPTHS, measured({1: 1.0, 2: 1.2, 4: 1.6}))
    sizes = [pacing.queries_for([record(0.9)], 1, 1) for _ in range(4 * LONGEST_WAIT)]
    assert sizes.count(4) > 0.97 * len(sizes) and {1, 2} <= set(sizes)


def test_a_new_sequence_is_expected_to_do_as_others_did():
    pacing = RelayedPacing(DEPTHS, measured({1: 1.0, 2: 1.2, 4: 1.6}))
    for _ in range(300):
        pacing.common.tried(3, 0)
    assert pacing.new_record().chance > 0.9
    for _ in range(600):
        pacing.common.tried(0, 1)
    fresh = pacing.new_record()
    assert fresh.chance < 0.35
    for _ in range(4):
        fresh.tried(3, 0)
    assert fresh.chance > 0.8  # what others did is soon outweighed
