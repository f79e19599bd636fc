"""The model of the barrier: it holds, mutants are refuted, and what is said about them is complete.

`make verify` runs all of it; here are the parts that take seconds.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load_run():
    spec = importlib.util.spec_from_file_location("verification_run", ROOT / "verification" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = load_run()
MUTANTS = {mutant.name: mutant for mutant in run.read_mutants()}
MODELLED = {mutant.name for mutant in run.modelled()}

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or not any(shutil.which(name) for name in ("gcc", "cc", "clang")),
    reason="needs spin and a C compiler: apt-get install spin gcc",
)


@needs_spin
def test_sound_model_holds():
    outcome = run.verify(run.SOUND["every host step interleaved"])
    assert outcome.verdict == "holds", run.as_table(outcome.events)
    assert outcome.states > 10_000


@needs_spin
def test_everything_is_fenced_in_the_end():
    assert run.verify("-DSTEPS=2 -DMAXFAIL=1 -DMAXRECYCLE=0", live=True).verdict == "holds"


@needs_spin
@pytest.mark.parametrize("name", ["no_barrier", "ngram_clear_deleted", "failure_not_abandoned"])
def test_mutant_is_refuted(name):
    outcome = run.verify(MUTANTS[name].flags, shortest=True)
    assert outcome.verdict == MUTANTS[name].finds
    lanes = {lane for lane, _ in outcome.events}
    assert lanes == set(run.LANES)
    assert len(run.as_table(outcome.events).splitlines()) >= len(outcome.events)


@needs_spin
def test_a_mutants_model_holds_without_its_fault():
    """Otherwise the counterexample would be against the protocol and not against the fault."""
    assert run.verify(run.base_flags(MUTANTS["ngram_clear_deleted"])).verdict == "holds"


def test_every_fault_of_the_model_is_listed():
    in_model = set(re.findall(r"MUTANT_\w+", run.MODEL.read_text())) - {"MUTANT_"}
    listed = {macro for mutant in run.modelled() for macro in re.findall(r"MUTANT_\w+", mutant.flags)}
    assert in_model == listed


def test_every_mutant_has_its_counterexample_and_its_explanation():
    kept = {path.stem for path in run.COUNTEREXAMPLES.glob("*.txt")}
    explained = set(re.findall(r"^\*\*(\w+)\*\*", (ROOT / "docs" / "barrier.md").read_text(), re.M))
    assert kept == MODELLED
    assert explained == set(MUTANTS)


def test_every_mutant_is_in_the_model_or_in_the_engine():
    for mutant in MUTANTS.values():
        assert (mutant.flags == "none") == (mutant.finds == "none"), mutant
        assert (mutant.engine == "none") == (mutant.stall == "none"), mutant
        assert mutant.flags != "none" or mutant.engine != "none", mutant


def test_missing_spin_is_said(monkeypatch, capsys):
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == 2
    assert "apt-get install spin" in capsys.readouterr().err
