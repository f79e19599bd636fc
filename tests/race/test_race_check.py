"""The race check on the real engine: silent on what is right, loud on every listed fault, without any stall."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import mutants
import pytest
from harness import make_engine, run, stalled, workload
from test_stalls import CONFIGURATIONS

from jaxserve.barrier import journal
from jaxserve.core.errors import ConfigError, RaceError
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.runner.launch import Launch
from jaxserve.testing import race_check  # noqa: F401  the fixture

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", mutants.in_engine(), ids=lambda mutant: mutant.name)
def test_mutant_is_found_in_one_run_without_a_stall(mutant, monkeypatch, tiny_model, right_tokens):
    settings = mutants.inject(mutant, monkeypatch, right_tokens)
    engine = make_engine(tiny_model, race_check=True, **settings)
    try:
        with pytest.raises(
            RaceError, match=r"(?s)^race on .*\n  (write|fill) .* by .*\n  read .* by .*\n  nothing orders"
        ):
            run(engine)
    finally:
        monkeypatch.undo()
        engine.close()


# The configurations whose programs are built otherwise for the check. The others are checked as they serve, in
# test_stalls.py.
NOTED = [name for name in CONFIGURATIONS if "no marker" in name or name in ("xla-live", "planned", "hybrid")]
STALLED = ("late reads", "late row writes")


@pytest.mark.parametrize("name", NOTED)
def test_the_engine_is_clean_under_stalls(name, tiny_model, right_tokens):
    """A false alarm would be as bad as a miss."""
    engine = make_engine(tiny_model, race_check=True, **CONFIGURATIONS[name])
    try:
        for stall in STALLED:
            with stalled(stall):
                assert run(engine, stall) == right_tokens
    finally:
        engine.close()


def drive(engine: Engine, each_step: Any = lambda number: None) -> dict[str, list[int]]:
    """Steps to the end; errors count as an end."""
    tokens: dict[str, list[int]] = {}
    number = 0
    while engine.has_work:
        each_step(number)
        number += 1
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    engine.scheduler.check_integrity()
    return tokens


def add_all(engine: Engine, tag: str) -> None:
    for i, (prompt, output) in enumerate(workload()):
        engine.add(
            Request(f"{tag}-{i}", tuple(prompt), SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True))
        )


TROUBLED = {
    "native": {},
    "planned, no marker": {"attention_backend": "planned", "shared_read_marker": False},
    "xla-live, no overlap": {"attention_backend": "xla-live", "disable_overlap_schedule": True},
}


@pytest.mark.parametrize("name", TROUBLED)
def test_preemption_abort_failure_warm_up_and_closing_are_clean(name, tiny_model, monkeypatch):
    engine = make_engine(
        tiny_model, race_check=True, skip_warmup=name != "native", num_pages=14,
        **TROUBLED[name],
    )  # fmt: skip
    try:
        add_all(engine, "abort")
        drive(engine, lambda number: engine.abort(f"abort-{number // 6}") if number % 6 == 5 else None)
        assert engine.scheduler.num_preemptions > 0
        collect, calls = Launch.collect, []

        def broken(self):
            calls.append(1)
            if len(calls) % 9 == 4:
                raise RuntimeError("planted failure")
            return collect(self)

        monkeypatch.setattr(Launch, "collect", broken)
        add_all(engine, "fail")
        drive(engine)
        monkeypatch.undo()
        add_all(engine, "after")
        assert len(drive(engine)) == len(workload())
        add_all(engine, "closed")  # closed with a launch in flight
        for _ in range(5):
            engine.step()
    finally:
        engine.close()
    assert not journal.is_on()


def test_a_launch_given_up_while_it_runs_is_no_race(tiny_model):
    """Recovery rewrites the rows under a launch that is stuck; nobody will see what that one computes."""
    engine = make_engine(tiny_model, race_check=True, fence_timeout_s=0.2)
    try:
        run(engine)
        add_all(engine, "stuck")
        for _ in range(6):
            engine.step()
        with stalled("none"):
            from jaxserve.barrier.native import native_module

            points = native_module("cpu").hold_points
            points.delay("snapshot.before_reads", 900_000)
            engine.step()
            engine.step()
        drive(engine)
        run(engine, "after")
    finally:
        engine.close()


def test_the_check_says_that_it_is_on_and_is_off_by_default(tiny_model, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING, "jaxserve"):
        engine = make_engine(tiny_model)
        assert not journal.is_on() and "race check" not in caplog.text
        engine.close()
        monkeypatch.setenv("JAXSERVE_RACE_CHECK", "1")
        engine = make_engine(tiny_model)
        assert journal.is_on() and "the race check is on" in caplog.text
        engine.close()
    assert not journal.is_on()


def test_an_engine_that_could_not_be_made_leaves_no_check_behind(tmp_path):
    with pytest.raises(Exception, match=r"."):
        make_engine(tmp_path / "nothing", race_check=True)
    assert not journal.is_on()


def test_another_platform_is_refused(tiny_model, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("jaxserve.engine.assembly.check_cuda_settings", lambda environ: None)
    with pytest.raises(ConfigError, match="--race-check follows programs on the CPU only, and this is gpu"):
        make_engine(tiny_model, race_check=True)


def test_the_fixture_checks_what_a_test_runs(race_check, tiny_model):  # noqa: F811
    engine = make_engine(tiny_model)
    run(engine)
    race_check.check()
    engine.close()


def test_the_fixture_fails_a_test_that_races(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import numpy as np\n"
        "from jaxserve.barrier.native import native_module\n"
        "from jaxserve.testing import race_check\n"
        "def test_two_streams(race_check):\n"
        "    native = native_module('cpu')\n"
        "    table = native.SharedBuffer(2, 3, False, 'table')\n"
        "    streams = [native.Stream(1, 64, 9.0) for _ in range(2)]\n"
        "    for stream in streams:\n"
        "        stream.write_rows(table, np.zeros(1, np.int32), np.zeros((1, 3), np.int32))\n"
        "    for stream in streams:\n"
        "        stream.sync()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "RaceError: race on table row 0 (columns 0..2)" in done.stdout
