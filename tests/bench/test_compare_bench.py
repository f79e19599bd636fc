"""``jaxserve bench compare``: measures every way on tiny models, and can be run again from its result."""

from __future__ import annotations

import json

import pytest
from bench_command import run_bench

from jaxserve.bench import compare, compare_report
from jaxserve.bench.compare import Comparison, count_operations, from_json, hlo_hash
from jaxserve.bench.models import MODELS
from jaxserve.cli.main import main
from jaxserve.core.errors import ConfigError

BATCHES, ROUNDS = (1, 2), 1


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return run_bench(
        tmp_path_factory.mktemp("compare"), "compare", "--models", "tiny-qwen3", "--ways",
        "cuda-graph,xla-cmdbuf-inside",
        "--batches", "1,2", "--rounds", str(ROUNDS), "--tokens", "12", "--seed", "5",
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(files):
    return json.loads((files / "found.json").read_text())


def test_every_batch_was_measured_and_what_the_platform_refuses_is_named(found):
    assert [(c["model"], c["way"], c["mode"], c["batch"]) for c in found["cells"]] == [
        ("tiny-qwen3", "cuda-graph", "jit", batch) for batch in BATCHES
    ]
    [(what, why)] = found["left_out"].items()
    assert what == "tiny-qwen3, xla-cmdbuf-inside" and "needs CUDA graphs, and this is cpu" in why


def test_numbers_are_those_of_steps_that_were_run(found):
    for cell in found["cells"]:
        assert min(cell["step_ms"]) > 0
        assert all(step > host > 0 for step, host in zip(cell["step_ms"], cell["host_ms"], strict=True))
        assert len(cell["held_up_fine_ms"]) == len(cell["held_up_coarse_ms"]) == len(cell["coarse_step_ms"]) == ROUNDS
        assert min(cell["held_up_fine_ms"]) > 0
        assert cell["first_run_s"] > cell["compile_s"] > 0
        assert cell["operations"] > 10 and cell["roofline"] > 0
        absent = ("graph_mib", "calls", "captured", "replay_ms")  # on a CPU
        assert [cell[name] for name in absent] == [None] * len(absent)
    one, two = found["cells"]
    assert one["hlo"] != two["hlo"]
    assert found["bandwidth"] > 1e8 and found["versions"]["jax"]
    assert found["settings"]["seed"] == 5


def test_a_result_can_be_measured_again(found, tmp_path, capsys, files):
    assert from_json(found | {"schema": 1}) == from_json(found)
    again = from_json(found)
    assert again.batches == BATCHES and again.max_tokens == 12 and list(again.models) == ["tiny-qwen3"]
    path = tmp_path / "again.json"
    arguments = ["bench", "compare", "--from", str(files / "found.json"), "--batches", "2", "--json", str(path)]
    assert main(arguments) == 0
    [cell] = json.loads(path.read_text())["cells"]
    before = found["cells"][1]
    assert (cell["hlo"], cell["tokens_hash"]) == (before["hlo"], before["tokens_hash"])
    assert "| tiny-qwen3 | 2 " in capsys.readouterr().out


def test_the_tables_show_what_is_absent_as_absent(found, files):
    text = (files / "found.md").read_text()
    assert text == compare_report.whole(found)
    assert "cuda-graph (jit)" in text and "left out: tiny-qwen3, xla-cmdbuf-inside:" in text
    row = next(line for line in text.splitlines() if line.startswith("| 1 "))
    assert [cell.strip() for cell in row.split("|")[-6:-2]] == ["-"] * 4  # graph memory, launches, updates, replay


def test_a_way_without_fences_has_its_columns_empty(found):
    """As torch's cells, which ``bench/compare_torch.py`` adds."""
    absent = dict.fromkeys(
        ("host_ms", "operations", "held_up_fine_ms", "held_up_coarse_ms", "coarse_step_ms", "graph_mib", "calls")
    )
    own = {"way": "torch", "mode": "CUDA graph", "batch": 9, "step_ms": [1.0, 3.0, 2.0], "replay_ms": [1.5, 1.7, 1.6]}
    other = found["cells"][0] | absent | {"captured": None} | own
    text = compare_report.whole(found | {"cells": [*found["cells"], other]})
    row = [cell.strip() for cell in next(line for line in text.splitlines() if line.startswith("| 9 ")).split("|")]
    assert row[1:4] == ["9", "torch (CUDA graph)", "2.00"] and row[-3] == "1.60"
    assert row.count("-") == len(absent) + 1  # calls are two columns


@pytest.mark.parametrize(("launched", "updates"), [(8, "0.5"), (0, "-")])
def test_calls_are_shown_for_each_step(found, launched, updates):
    """Where no graph was launched none can have been updated, or the profile has other names for both."""
    calls = {"num_steps": 4, "made": 0, "updated": 2, "launched": launched, "driver_launches": 12}
    text = compare_report.whole(found | {"cells": [found["cells"][0] | {"calls": calls}]})
    row = next(line for line in text.splitlines() if line.startswith("| 1 "))
    assert [cell.strip() for cell in row.split("|")[-5:-3]] == ["3.0", updates]


def test_graphs_that_we_capture_have_updates_of_their_own(found):
    """XLA launches none of them, and says nothing of them."""
    calls = {"num_steps": 4, "made": 0, "updated": 0, "launched": 0, "driver_launches": 60}
    captured = {"uncaptured": 2, "captured": 2, "moved": 1, "replayed": 8, "capture_ns": 2_000_000_000}
    cell = found["cells"][0] | {"calls": calls, "captured": captured, "replay_ms": 1.25, "compile_s": 3.0}
    text = compare_report.whole(found | {"cells": [cell]})
    row = next(line for line in text.splitlines() if line.startswith("| 1 "))
    assert [part.strip() for part in row.split("|")[-5:-1]] == ["15.0", "0.1", "1.25", "5.0"]


def test_pictures_are_drawn(files):
    pytest.importorskip("matplotlib")
    assert (files / "found.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ways": ("graphs",)}, "unknown graphs; known are xla, xla-cmdbuf, xla-cmdbuf-inside, cuda-graph"),
        ({"batches": (1, 64), "max_tokens": 32}, "64 sequences need at least 68"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"models": {}}, "at least one model"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Comparison(**settings)


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"bench": "compare", "schema": 99}'])
def test_other_files_are_refused(tmp_path, content, capsys):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert main(["bench", "compare", "--from", str(path)]) != 0
    assert "--from" in capsys.readouterr().err


def test_rounds_that_disagree_fail(monkeypatch):
    real = compare.run_greedily
    runs = []

    def lying(*arguments):
        run = real(*arguments)
        runs.append(run)
        if len(runs) == 3:
            run.tokens[0][-1] += 1
        return run

    monkeypatch.setattr(compare, "run_greedily", lying)
    with pytest.raises(Exception, match="differ between rounds"):
        compare.measure(Comparison({"tiny": MODELS["tiny"]}, ("xla",), (1,), max_tokens=8, rounds=1))


HLO = """\
HloModule jit_step, is_scheduled=true

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %n = f32[2]{0} negate(%p), metadata={op_name="a" source_line=3}
}

ENTRY %main (x: f32[2]) -> (f32[2], f32[2]) {
  %x = f32[2]{0} parameter(0)
  %fusion = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="b"}
  %call.1 = (f32[2]{0}, f32[1]{0}) custom-call(%fusion), custom_call_target="kernel"
  %gte = f32[2]{0} get-tuple-element(%call.1), index=0
  ROOT %t = (f32[2]{0}, f32[2]{0}) tuple(%fusion, %gte)
}
"""


def test_operations_are_those_of_the_entry_that_launch():
    assert count_operations(HLO) == 2


def test_the_hash_is_of_the_program_and_not_of_where_it_came_from():
    assert hlo_hash(HLO) == hlo_hash(HLO.replace('op_name="b"', 'op_name="elsewhere"'))
    assert hlo_hash(HLO) != hlo_hash(HLO.replace("negate", "exponential"))
