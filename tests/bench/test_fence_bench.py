"""``jaxserve bench fence``: measures all four ways, and refuses what cannot be measured before it begins.

No times are compared here: that is what the bench is for, on a quiet machine.
"""

from __future__ import annotations

import importlib.util
import json
from typing import ClassVar

import pytest
from bench_command import needs_matplotlib, run_bench

from jaxserve.bench import fence, fence_report
from jaxserve.bench.fence import WAYS, Sweep, TableSize, measure
from jaxserve.bench.models import MODELS
from jaxserve.bench.stepping import Stepped
from jaxserve.cli.main import main
from jaxserve.core.errors import JaxserveError

BATCH, ROUNDS = 2, 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What a small sweep writes."""
    return run_bench(
        tmp_path_factory.mktemp("bench"), "fence", "--models", "tiny", "--batches", str(BATCH), "--sizes", "2x2,4x64",
        "--rounds", str(ROUNDS), "--tokens", "14",
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(files):
    return json.loads((files / "found.json").read_text())


def test_every_combination_is_there(found):
    assert set(found) == {"schema", "machine", "settings", "cells", "left_out", "seconds"}
    assert found["left_out"] == [] and found["seconds"] > 0
    assert [(c["model"], c["batch"], c["slots"], c["table_width"]) for c in found["cells"]] == [
        ("tiny", BATCH, 2, 2),
        ("tiny", BATCH, 4, 64),
    ]


def test_every_way_was_measured_in_every_round(found):
    for cell in found["cells"]:
        assert list(cell["ways"]) == list(WAYS)
        for way, run in cell["ways"].items():
            for what in ("step_ms", "host_ms", "bytes", "ratio"):
                assert len(run[what]) == ROUNDS and min(run[what]) > 0, (way, what)
            assert min(step - host for step, host in zip(run["step_ms"], run["host_ms"], strict=True)) > 0
            if way in ("coarse", "fine"):
                assert len(run["held_up_ms"]) == ROUNDS and min(run["held_up_ms"]) > 0
            else:
                assert run["held_up_ms"] is None
        assert cell["ways"]["upload"]["ratio"] == [1.0] * ROUNDS


def test_each_way_does_what_its_name_says(found):
    for cell in found["cells"]:
        ways = cell["ways"]
        assert set(ways["coarse"]["fences"]) == {"coarse:forced"}
        assert set(ways["fine"]["fences"]) == {"coarse:extend", "fine:marker"}
        assert ways["upload"]["bytes"] == [cell["shared_bytes"]] * ROUNDS
        # Two lengths a step, now and then a page, of 4 bytes; functional names the rows besides.
        assert all(4 * BATCH <= count < 100 for way in ("functional", "coarse", "fine") for count in ways[way]["bytes"])


def test_the_tokens_are_worth_comparing(found):
    """A model that repeats one token would hide a wrong block table."""
    assert all(cell["distinct_tokens"] > BATCH for cell in found["cells"])


def test_the_table_has_a_row_per_combination_and_way(files, found):
    rows = [line for line in (files / "found.md").read_text().splitlines() if line.startswith("| tiny")]
    short = 2  # smallest and largest rows
    assert len(rows) == short + len(found["cells"]) * len(WAYS)
    for way in WAYS:
        assert sum(f"| {way} " in row for row in rows) == len(found["cells"])


def test_the_summary_has_a_row_per_combination(found):
    lines = fence_report.summary(found).splitlines()
    assert sum(line.startswith("| tiny") for line in lines) == len(found["cells"])


@pytest.mark.parametrize(("load", "cores", "warned"), [("1.40", 2, False), ("1.60", 2, True), ("1.60", 16, False)])
def test_a_busy_machine_is_said(found, load, cores, warned):
    found = found | {"machine": found["machine"] | {"load_at_start": load, "cores": cores}}
    assert fence_report.summary(found).startswith("Provisional: others used the machine (load 1.6") == warned


@needs_matplotlib
def test_the_picture_is_drawn(files):
    import matplotlib.image

    picture = matplotlib.image.imread(files / "found.png")
    assert picture.shape[0] > 500 and picture.shape[1] > 800
    assert picture[..., :3].std() > 0.05  # not a blank page


@needs_matplotlib
@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_the_picture_has_the_format_of_its_name(found, tmp_path, suffix):
    from jaxserve.bench.fence_plot import draw

    path = tmp_path / f"found{suffix}"
    draw(found, path)
    assert path.read_bytes()[:5] in (b"<?xml", b"%PDF-")


# -- the measuring itself, with engines that only pretend --------------------------------------------------------------


class FakeEngine:
    opened: ClassVar[list[str]] = []
    closed: ClassVar[list[str]] = []

    def __init__(self, config):
        self.way = next(
            way for way, settings in WAYS.items()
            if config.shared_updates == settings["shared_updates"]
            and config.force_coarse_war_barrier == settings.get("force_coarse_war_barrier", False)
        )  # fmt: skip
        self.model_config = config
        config.hidden_size = config.num_layers = 1
        self.opened.append(self.way)

    def close(self):
        self.closed.append(self.way)


@pytest.fixture
def turns(monkeypatch):
    """Order of the runs; way -> step time and tokens may be changed through ``steps`` and ``tokens``."""
    FakeEngine.opened.clear()
    FakeEngine.closed.clear()
    turns: list[str] = []
    monkeypatch.setattr(fence, "Engine", FakeEngine)

    def run(engine, prompts, max_tokens):
        turns.append(engine.way)
        step = {"upload": 4.0, "functional": 3.0, "coarse": 2.0, "fine": 1.0}[engine.way] * (1 + turns.count("fine"))
        wrong = engine.way == "coarse" and len(turns) > len(WAYS)
        tokens = [[1, 9 if wrong and run.disagree else 2]]
        return Stepped([step], [step / 2], [step], tokens, 0.5, 8.0, {})

    run.disagree = False
    monkeypatch.setattr(fence, "run_greedily", run)
    return turns, run


SMALL = {"models": {"tiny": MODELS["tiny"]}, "batches": (1,), "sizes": (TableSize(1, 4),), "max_tokens": 8}


def test_the_ways_take_turns_and_the_order_turns(turns):
    order, _ = turns
    found = measure(Sweep(rounds=3, **SMALL))
    ways = list(WAYS)
    assert order == [way for n in range(4) for way in ways[n:] + ways[:n]]  # the first round is not counted
    assert len(found["cells"][0]["ways"]["fine"]["step_ms"]) == 3
    assert FakeEngine.closed == ways


def test_ways_that_disagree_about_tokens_fail_the_bench(turns):
    _, run = turns
    run.disagree = True
    with pytest.raises(JaxserveError, match=r"'coarse' differ.*model tiny, batch 1, 1 slots of 4 pages, round 1"):
        measure(Sweep(rounds=2, **SMALL))
    assert FakeEngine.closed == list(WAYS)


def test_nothing_is_begun_after_the_time_is_over_and_the_result_says_so(turns):
    found = measure(Sweep(rounds=1, max_seconds=0.0, **SMALL))
    assert found["cells"] == [] and found["left_out"] == ["tiny, 1 slots of 4 pages"]
    assert FakeEngine.opened == []


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_measured(monkeypatch):
    def fail(*arguments):
        raise AssertionError("measured")

    monkeypatch.setattr(fence, "measure", fail)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "tiny,huge"], "unknown huge; known are tiny, small, medium, smollm2-135m"),
        (["--sizes", "8by64"], "wanted sizes like 8x64,512x8192, got '8by64'"),
        (["--sizes", "2x64", "--batches", "1,4"], "batch 4 needs that many slots"),
        (["--sizes", "8x1", "--batches", "1"], "hold no sequence of 64 tokens"),
        (["--tokens", "5", "--batches", "8"], "8 sequences need at least 12 tokens"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--batches", "0"], "--batches must be at least 1, got 0"),
        (["--batches", "many"], "wanted integers"),
        (["--json", "nowhere/found.json"], "there is no folder nowhere"),
        (["--plot", "found.gif"], "must end in .png, .svg, .pdf"),
        (["--model", "nowhere.gguf"], "nowhere.gguf"),
        (["--batch", "8"], "did you mean --batches?"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused_before_any_work(nothing_measured, capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["bench", "fence", *arguments])
    except SystemExit as exit:
        code = exit.code
    assert code in (1, 2)
    error = capsys.readouterr().err
    assert said in error and error.startswith("jaxserve bench fence: error:")


def test_a_plot_without_matplotlib_is_refused_before_any_work(nothing_measured, capsys, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert main(["bench", "fence", "--plot", str(tmp_path / "found.png")]) == 2
    assert "pip install 'jaxserve[plot]'" in capsys.readouterr().err


def test_another_checkpoint_gives_its_sizes(monkeypatch, tmp_path, capsys):
    from tiny import write_tiny

    taken = []
    monkeypatch.setattr(fence, "measure", lambda sweep, progress: taken.append(sweep) or EMPTY)
    path = write_tiny(tmp_path / "mine")
    assert main(["bench", "fence", "--model", str(path)]) == 0
    assert list(taken[0].models) == ["tiny", "small", "medium", "mine"]
    assert taken[0].models["mine"]["hidden_size"] == 64
    assert main(["bench", "fence", "--model", str(path), "--models", "mine", "--quick"]) == 0
    assert list(taken[1].models) == ["mine"]


EMPTY = {
    "schema": 1, "cells": [], "left_out": [], "seconds": 0.0,
    "machine": {"cpu": "", "cores": 1, "memory_gib": 1, "date": "", "python": "", "load_at_start": "0.10", "jax": "",
                "platform": "cpu"},
    "settings": {"batches": [1], "page_size": 16, "max_tokens": 8, "rounds": 1, "max_seconds": 1.0},
}  # fmt: skip
