"""``jaxserve bench spec``: measures every way, refuses what cannot be measured, and fails when tokens differ."""

from __future__ import annotations

import dataclasses
import json

import pytest
import tiny
from bench_command import needs_matplotlib

from jaxserve.bench import speculation, speculation_report
from jaxserve.bench.speculation import Sweep, answer, measure
from jaxserve.bench.texts import KINDS
from jaxserve.cli.main import main
from jaxserve.core.errors import JaxserveError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.speculative import registry


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Reads bytes, so prompts are longer here than words would be."""
    return str(tiny.write_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=2048))


@pytest.fixture(scope="module")
def small(model):
    return Sweep(
        model, (1,), ("code edit",), ("plain", "NGRAM"), (2,), 1, 16,
        settings={"context_length": 1024, "num_pages": 80, "skip_warmup": True},
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(small):
    before = dict(registry._registered)  # of other test modules and examples
    measured = json.loads(json.dumps(measure(small)))
    assert registry._registered == before  # what drafts for the measurement is not left to users
    return measured


def test_every_way_is_measured(found, small):
    [cell] = found["cells"]
    assert (cell["kind"], cell["batch"], cell["repeats"]) == ("code edit", 1, True)
    assert list(cell["ways"]) == ["plain", "NGRAM"] and cell["num_tokens"] == 16
    for way in cell["ways"].values():
        assert len(way["rate"]) == len(way["ratio"]) == small.rounds and min(way["rate"]) > 0
    assert cell["ways"]["plain"]["ratio"] == [1.0] and cell["ways"]["plain"]["drafted"] == [0]


def test_an_eagle_head_is_measured_with_the_token_map_beside_it(tmp_path):
    head = {"speculative_draft_model_path": str(tmp_path)}
    assert speculation.settings_of(f"EAGLE={tmp_path}") == {"speculative_algorithm": "EAGLE", **head}
    (tmp_path / "token_map.json").write_text("[1, 2]")
    with_map = {"speculative_token_map": str(tmp_path / "token_map.json")}
    assert speculation.settings_of(f"EAGLE={tmp_path}") == {"speculative_algorithm": "EAGLE", **head, **with_map}
    assert speculation.settings_of(f"EAGLE3={tmp_path}") == {"speculative_algorithm": "EAGLE3", **head}


def test_steps_of_every_size_are_timed(found):
    assert [(each["batch"], each["tokens"]) for each in found["verify"]] == [(1, 0), (1, 1), (1, 2)]
    assert all(len(each["step_ms"]) == 1 and each["step_ms"][0] > 0 for each in found["verify"])


def test_the_text_says_it_all(found):
    text = speculation_report.whole(found)
    assert sum(line.startswith("| code edit") for line in text.splitlines()) == 2
    for step in ("decode, overlapped", "decode, not overlapped", "verify 2 tokens"):
        assert step in text
    assert speculation_report.compact_rates(found).count("| code edit") == 1


@pytest.mark.parametrize(
    ("repeats", "ratio", "said"),
    [
        (True, 1.3, "reached; least 1.30"),
        (True, 1.1, "MISSED; least 1.10"),
        (False, 0.96, "reached"),
        (False, 0.9, "MISSED"),
    ],
)
def test_verdicts(found, repeats, ratio, said):
    cell = found["cells"][0]
    ways = cell["ways"] | {"NGRAM": cell["ways"]["NGRAM"] | {"ratio": [ratio]}}
    [line] = speculation_report.verdicts(found | {"cells": [cell | {"repeats": repeats, "ways": ways}]})
    assert said in line


@needs_matplotlib
def test_the_picture_is_drawn(found, tmp_path):
    import matplotlib.image

    from jaxserve.bench.speculation_plot import draw

    draw(found, tmp_path / "found.png")
    picture = matplotlib.image.imread(tmp_path / "found.png")
    assert picture.shape[0] > 400 and picture[..., :3].std() > 0.05


def test_an_answer_is_not_drafted_from_the_one_before(small):
    """Else every round but the first would measure a trie that knows the answers."""
    with speculation._opened(small, {"speculative_algorithm": "NGRAM", "speculative_adaptive": False}) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        first, second = (answer(engine, [list(b"something new")], params) for _ in range(2))
        assert first.tokens == second.tokens and first.num_accepted == second.num_accepted < 6
        assert first.num_steps == second.num_steps


def test_a_draft_model_of_ones_own_is_a_way(small, model):
    """The target itself: all it drafts holds."""
    way = f"STANDALONE={model}"
    cell = measure(dataclasses.replace(small, ways=("plain", way), verify_tokens=()))["cells"][0]
    [drafted], [accepted] = cell["ways"][way]["drafted"], cell["ways"][way]["accepted"]
    assert 0 < accepted <= drafted and accepted >= drafted - 4  # those behind the last token are lost


def test_ways_that_disagree_fail_the_bench(small, monkeypatch):
    def wrong(engine, prompts, params):
        tokens = [[1, 2 if engine.scheduler.speculation is None else 3]]
        return speculation.Answered(tokens, 1.0, 1, 0, 0)

    monkeypatch.setattr(speculation, "answer", wrong)
    with pytest.raises(JaxserveError, match=r"'NGRAM' differ .*code edit, batch 1, round 0; jaxserve check-lossless"):
        measure(dataclasses.replace(small, rounds=1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batches", "5"], "--batches must be 1 .. 4"),
        (["--batches", "0"], "--batches must be 1 .. 4"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--tokens", "8"], "--tokens must be at least 16"),
        (["--ways", "plain,EAGLE9"], "ALGORITHM=FOLDER of a draft model, got plain, EAGLE9"),
        (["--ways", "plain,MTP="], "--ways must begin with plain"),
        (["--kinds", "prose"], "--kinds: unknown prose; known are code edit, JSON records"),
        (["--plot", "x.gif"], "--plot x.gif"),
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(capsys, arguments, said):
    assert main(["bench", "spec", "--model", "/nowhere", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_there_are_as_many_prompts_of_every_kind():
    assert {len(kind.prompts) for kind in KINDS.values()} == {4}
