"""Each way of breaking the barrier makes tokens wrong under some stall.

A mutant that survives means that the stall tests cannot see the fault it stands for.
"""

from __future__ import annotations

import re
import time

import mutants
import pytest
from harness import DRAFT_STALLS, STALLS, make_engine, run, stalled


def test_the_list_and_the_faults_are_the_same():
    """Every function is listed once, every listed one exists, and its stall too."""
    listed = mutants.in_engine()
    assert sorted(mutant.engine for mutant in listed) == sorted(mutants.FAULTS)
    assert {mutant.stall for mutant in listed} <= {*STALLS, *DRAFT_STALLS}
    assert set(mutants.LOUD) <= set(mutants.FAULTS)


def gives_wrong_tokens(engine, mutant, right_tokens, factor: int) -> bool:
    """One run under the mutant's stall, ``factor`` times as long: a busy machine may need that."""
    with stalled(mutant.stall, factor):
        try:
            return run(engine, f"try{time.monotonic_ns()}") != right_tokens
        except RuntimeError as error:
            # Only wrong tokens count, or the error named here: any other would prove nothing about the fence.
            if not re.search(mutants.LOUD.get(mutant.engine, "no error is expected"), str(error)):
                raise
            return True


@pytest.mark.parametrize("mutant", mutants.in_engine(), ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant, monkeypatch, tiny_model, right_tokens):
    engine = make_engine(tiny_model, race_check=False, **mutants.inject(mutant, monkeypatch, right_tokens))
    try:
        caught = any(gives_wrong_tokens(engine, mutant, right_tokens, factor) for factor in (1, 1, 4, 16))
        assert caught, f"{mutant.name} gave the right tokens under {mutant.stall!r}"
    finally:
        monkeypatch.undo()
        engine.close()
