"""How many drafts are worth it."""

from __future__ import annotations

import pytest

from jaxserve.speculative.pacing import MEMORY, Record, StepTimes, best_queries, worth

COSTS = {4: 1.4, 8: 1.8}


def record(chance: float, num_predicted: int) -> Record:
    return Record(predicted=[7] * num_predicted, hits=chance * MEMORY, trials=MEMORY)


def test_worth_is_the_sum_of_powers():
    for chance in (0.0, 0.3, 0.9, 1.0):
        assert worth(chance, 5) == pytest.approx(sum(chance**n for n in range(1, 6)))
    assert worth(0.5, 0) == 0


@pytest.mark.parametrize(
    ("chance", "num_predicted", "queries"),
    [(0.1, 7, 1), (0.4, 7, 4), (0.6, 7, 4), (0.95, 7, 8), (0.95, 3, 4), (0.95, 0, 1)],
)
def test_the_best_size(chance, num_predicted, queries):
    assert best_queries([record(chance, num_predicted)], (4, 8), COSTS) == queries


def test_one_sequence_pays_for_the_others_or_does_not():
    eager, idle = record(0.95, 7), record(0.95, 0)
    assert best_queries([eager, idle], (4, 8), COSTS) > 1
    assert best_queries([eager, *[idle] * 7], (4, 8), COSTS) == 1


def test_a_record_learns_without_speculating():
    seen = Record(predicted=[1, 2, 3, 4])
    before = seen.chance
    seen.met([1, 2])
    assert seen.predicted == [3, 4] and seen.chance > before
    seen.met([9])
    assert seen.predicted == []
    good = Record()
    for _ in range(100):
        good.tried(3, 0)
    assert good.chance > 0.95 and good.trials == MEMORY
    for _ in range(24):
        good.tried(0, 1)
    assert good.chance < 0.4  # old luck fades


def test_costs_are_measured():
    times = StepTimes()
    guessed = times.cost(4, 2)
    times.add(1, 2, 0.010)
    times.add(4, 2, 0.9)  # a first step may be slow by chance
    assert times.cost(4, 2) == guessed
    times.add(4, 2, 0.016)
    times.add(4, 2, 0.016)
    assert times.cost(4, 2) == pytest.approx(1.6) and times.cost(4, 8) == guessed and times.cost(1, 8) == 1
    times.add(4, 2, 0.016)
    times.add(4, 2, 1.0)  # one slow step is not the rule
    assert times.cost(4, 2) == pytest.approx(1.6)
