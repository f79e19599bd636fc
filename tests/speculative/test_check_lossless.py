"""``check_lossless``: every algorithm, backend, page size and batch says what plain decoding says; liars are named."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
import tiny

from jaxserve.cli.main import main
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, InvalidRequest
from jaxserve.core.request import TokenLogprob
from jaxserve.speculative.base import Proposals, SpeculativeAlgorithm
from jaxserve.speculative.registry import temporarily_registered
from jaxserve.testing import Draws, LosslessError, check_lossless, examine_lossless
from jaxserve.testing.draw_statistics import chi_square, count_ranks
from jaxserve.testing.lossless import REFERENCE, ways_of

PROMPTS = ["abcabcabcabcabc", "The end of the", [7] * 9, list(range(40, 61))]
TARGET = (0.5, 0.3, 0.2, 0.0)


class Suffix(SpeculativeAlgorithm):
    """Drafts what followed the newest token where it stood before."""

    def propose(self, contexts, num_drafts):
        tokens = np.zeros((len(contexts), num_drafts), np.int32)
        counts = np.zeros(len(contexts), np.int32)
        for row, context in enumerate(contexts):
            [places] = np.nonzero(context[:-1] == context[-1])
            drafts = context[places[-1] + 1 :][:num_drafts] if len(places) else []
            tokens[row, : len(drafts)], counts[row] = drafts, len(drafts)
        return Proposals(tokens, np.tile(np.arange(num_drafts, dtype=np.int32), (len(contexts), 1)), counts)


class Favourite(SpeculativeAlgorithm):
    """Drafts token 0, always."""

    def propose(self, contexts, num_drafts):
        parents = np.tile(np.arange(num_drafts, dtype=np.int32), (len(contexts), 1))
        return Proposals(parents * 0, parents, np.full(len(contexts), num_drafts, np.int32))


@pytest.fixture(scope="module")
def config(tiny_model):
    return EngineConfig(
        model=str(tiny_model), context_length=64, max_running_requests=4, decode_batch_buckets=(4,),
        chunked_prefill_size=16, prefill_token_buckets=(16,), skip_warmup=True, speculative_num_draft_tokens=6,
    )  # fmt: skip


@pytest.fixture(scope="module")
def algorithms():
    with temporarily_registered(Suffix) as suffix:
        drafting = {"speculative_adaptive": False}
        ngram = drafting | {"speculative_algorithm": "NGRAM"}
        yield {
            "NGRAM": ngram,
            "NGRAM relay": ngram | {"speculative_ngram_fence": "relay"},
            "NGRAM trees": ngram | {"speculative_ngram_max_bfs_breadth": 4},
            "SUFFIX": drafting | {"speculative_algorithm": suffix},
        }


BACKENDS = [("native", 1), ("planned", 16)]
if os.environ.get("JAXSERVE_TEST_FULL") == "1":
    BACKENDS += [("xla", 16), ("xla-live", 4)]


@pytest.mark.parametrize(("backend", "page_size"), BACKENDS)
def test_every_algorithm_backend_and_page_size_is_lossless(config, algorithms, backend, page_size):
    settings = dataclasses.replace(config, attention_backend=backend, page_size=page_size)
    ways = {name: REFERENCE | settings for name, settings in algorithms.items()}
    report = check_lossless(settings, PROMPTS, max_tokens=12, ways=ways)
    assert [(c.way, c.kind, c.batch) for c in report.comparisons] == [
        (way, kind, batch) for way in ways for batch in (1, 4) for kind in ("greedy", "sampled", "controlled")
    ]
    for each in report.comparisons:
        assert each.num_tokens == 12 * len(PROMPTS) and not each.differences
        assert each.logprob_gap < 1e-4  # other programs, so other rounding
    for way in ways:
        accepted = sum(c.num_accepted for c in report.comparisons if c.way == way)
        assert accepted > (10 if way.startswith("NGRAM") else 3)
    assert report.notes == []


def test_overlap_and_fences_are_compared(config):
    ways = ways_of(dataclasses.replace(config, speculative_algorithm="NGRAM"))
    assert list(ways) == [
        "plain", "plain, overlap off", "plain, coarse", "NGRAM", "NGRAM, adaptive", "NGRAM, overlap off",
        "NGRAM, coarse", "NGRAM, its fence relay",
    ]  # fmt: skip
    assert list(ways_of(config)) == ["plain", "plain, overlap off", "plain, coarse"]
    report = check_lossless(config, PROMPTS[:2], max_tokens=6)
    assert [c.way for c in report.comparisons if c.batch == 1 and c.kind == "greedy"] == [
        "plain, overlap off",
        "plain, coarse",
    ]


# -- what differs is said ----------------------------------------------------------------------------------------------


@pytest.fixture
def accepts_anything(monkeypatch):
    """Verification believes every draft."""
    from jaxserve.runner import step_program

    accept = step_program.accept

    def believe(tokens, parents, target):
        path, counts = accept(tokens, parents, tokens[:, 1:][:, [*range(tokens.shape[1] - 1), -1]])
        return path, counts

    monkeypatch.setattr(step_program, "accept", believe)


def test_a_wrong_acceptance_is_named(config, algorithms, accepts_anything):
    with pytest.raises(
        LosslessError, match=r"NGRAM, greedy, batch 2: prompt \d, token \d+: got \d+, plain decoding says"
    ):
        check_lossless(config, PROMPTS[:2], max_tokens=12, ways={"NGRAM": algorithms["NGRAM"]})


@pytest.fixture(scope="module")
def undecided(tmp_path_factory):
    """A model to which two tokens are nearly the same; the way below prefers the other one."""
    table = np.full((tiny.BYTE_VOCAB, tiny.BYTE_VOCAB), -20.0, np.float32)
    table[:, 5], table[:, 9] = 0.0, 2e-5
    one = tiny.write_markov(tmp_path_factory.mktemp("one"), table)
    table[:, 5] = 4e-5
    return str(one), str(tiny.write_markov(tmp_path_factory.mktemp("other"), table))


@pytest.mark.parametrize(("tie_margin", "is_tie"), [(1e-4, True), (1e-6, False)])
def test_a_tie_is_counted_and_named(config, undecided, tie_margin, is_tie):
    model, other = undecided
    report = examine_lossless(
        dataclasses.replace(config, model=model), [[1]], max_tokens=4, tie_margin=tie_margin,
        ways={"other": REFERENCE | {"model": other}},
    )  # fmt: skip
    greedy, _, _ = report.comparisons
    [difference] = greedy.differences
    assert (difference.position, difference.wanted, difference.got) == (0, 9, 5)
    assert difference.margin == pytest.approx(2e-5, abs=1e-5)
    assert greedy.num_ties == is_tie
    assert any("tie in other, greedy, batch 1: prompt 0, token 0: got 5" in note for note in report.notes) == is_tie
    assert any("other, greedy, batch 1: prompt 0, token 0: got 5" in text for text in report.violations) != is_tie


def test_a_tie_between_sampled_tokens_counts_their_random_numbers(config, tmp_path):
    """One logit is moved past the point where the other token wins, which the noise alone tells."""
    table = np.full((tiny.BYTE_VOCAB, tiny.BYTE_VOCAB), -40.0, np.float32)
    table[:, 5], table[:, 9] = 0.0, 0.0
    model = dataclasses.replace(config, model=str(tiny.write_markov(tmp_path / "one", table)))
    table[:, 9] = 2.0
    other = {"other": REFERENCE | {"model": str(tiny.write_markov(tmp_path / "other", table))}}
    report = examine_lossless(model, [[1], [2], [3]], max_tokens=8, ways=other)
    differences = [d for c in report.comparisons if c.kind == "sampled" for d in c.differences]
    assert differences
    for difference in differences:
        assert (difference.wanted, difference.got) == (5, 9)
        assert 0 < difference.margin < 2.0  # by less than what was added to the other token


def test_wrong_logprobs_of_right_tokens_are_named(config, tmp_path):
    table = np.full((tiny.BYTE_VOCAB, tiny.BYTE_VOCAB), -20.0, np.float32)
    table[:, 5] = 1.0
    model = dataclasses.replace(config, model=str(tiny.write_markov(tmp_path / "one", table)))
    table[:, 9] = 0.0
    other = {"other": REFERENCE | {"model": str(tiny.write_markov(tmp_path / "other", table))}}
    violations = examine_lossless(model, [[1]], max_tokens=2, ways=other).violations
    assert any("greedy, batch 1: log-probabilities of the same tokens differ by 0.31 nats" in v for v in violations)


# -- distributions -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def markov(config, tmp_path_factory):
    table = np.full((tiny.BYTE_VOCAB, tiny.BYTE_VOCAB), -100.0, np.float32)
    table[:, :3] = np.log(TARGET[:3])
    folder = tiny.write_markov(tmp_path_factory.mktemp("markov"), table)
    return dataclasses.replace(config, model=str(folder), max_running_requests=32, decode_batch_buckets=(32,),
                               speculative_num_draft_tokens=2)  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "draws", "wanted"),
    [
        ("favourite", Draws(40_000), TARGET[:3]),
        ("NGRAM", Draws(20_000, temperature=0.7, top_k=2), (0.6747, 0.3253)),  # .5^(1/.7), .3^(1/.7), normalised
    ],
)
def test_speculation_does_not_bend_the_distribution(markov, algorithm, draws, wanted):
    with temporarily_registered(Favourite) as favourite:
        name = favourite if algorithm == "favourite" else algorithm
        ways = {algorithm: {"speculative_algorithm": name, "speculative_adaptive": False}}
        report = check_lossless(markov, [[0, 1, 2]], max_tokens=2, draws=draws, ways=ways)
    [found] = report.distributions
    assert found.num_draws >= 20_000 and found.degrees == len(wanted) - 1
    assert np.allclose(np.array(found.expected) / found.num_draws, wanted, atol=1e-4)
    assert found.statistic < {2: 18.4, 1: 15.1}[found.degrees] and found.num_impossible == 0
    if algorithm == "favourite":  # a draft x is accepted with the target's p(x)
        assert found.num_accepted / found.num_drafted == pytest.approx(0.5, abs=0.015)


def test_a_bent_distribution_is_found(markov, monkeypatch):
    """Too little noise, with and without speculation: the tokens are the same, only their distribution is wrong."""
    from jaxserve.runner import sampler

    right = sampler.gumbel_noise
    monkeypatch.setattr(sampler, "gumbel_noise", lambda *arguments: 0.5 * right(*arguments))
    with temporarily_registered(Favourite) as name:
        ways = {"bent": {"speculative_algorithm": name, "speculative_adaptive": False}}
        report = examine_lossless(markov, [[0, 1, 2]], max_tokens=2, draws=Draws(4000), ways=ways)
    [violation] = report.violations
    assert (
        violation.startswith("bent, sampled at temperature 1, top_k 0: tokens by rank [") and "chi-square" in violation
    )


def draws_of(tokens, probabilities):
    top = tuple((i, float(np.log(p))) for i, p in enumerate(probabilities))
    return [TokenLogprob(t, float(np.log(probabilities[t])) if t < len(top) else -50.0, top) for t in tokens]


def test_draws_are_counted_by_rank():
    counts = count_ranks(draws_of([0] * 5 + [1] * 3 + [7] * 2, [0.5, 0.3, 0.2]), 1.0, 0)
    assert counts.observed.tolist() == [5, 3, 0, 2] and counts.num_impossible == 2
    assert np.allclose(counts.expected, [5, 3, 2, 0])
    counts = count_ranks(draws_of([0, 0, 1, 2], [0.5, 0.3, 0.2]), 0.5, 2)
    assert counts.num_impossible == 1 and np.allclose(counts.expected, [4 * 25 / 34, 4 * 9 / 34, 0])
    with pytest.raises(ConfigError, match=r"temperature 0\.7 and top_k 0 are not known"):
        count_ranks([], 0.7, 0)


def test_the_statistic_written_out():
    tested = chi_square([48, 35, 15, 2, 0], [50, 30, 18, 1.5, 0.5])
    assert tested.observed == (48, 35, 17) and tested.expected == (50, 30, 20)
    assert tested.statistic == pytest.approx(4 / 50 + 25 / 30 + 9 / 20) and tested.degrees == 2
    assert tested.p_value == pytest.approx(np.exp(-tested.statistic / 2), rel=1e-4)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tiny_model, config, algorithms, tmp_path, monkeypatch):
    """The command on two prompts, with two ways instead of eight."""
    from jaxserve.testing import lossless

    monkeypatch.setattr(lossless, "ways_of", lambda config: {"plain": REFERENCE, "NGRAM": algorithms["NGRAM"]})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n\n" for text in ("abcabcabcabcabc", "The end of the")))
    sizes = ["--context-length", "64", "--max-running-requests", "4", "--decode-batch-buckets", "4"]
    sizes += ["--chunked-prefill-size", "16", "--prefill-token-buckets", "16", "--speculative-num-draft-tokens", "6"]
    return ["check-lossless", str(tiny_model), "--prompts", str(prompts), "--max-tokens", "12", *sizes]


def test_the_command_prints_a_row_per_way_and_batch(command, config, capsys):
    assert main([*command, "--draws", "100"]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in out.splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        [way, batch, "equal", "equal"] for way, batch in (("plain", "2"), ("NGRAM", "1"), ("NGRAM", "2"))
    ]
    assert "lossless: every token is that of plain decoding (ties below 0.0001 nats)" in out
    assert out.count("tokens drawn at temperature 1: chi-square") == 2


def test_the_command_fails_when_something_differs(command, capsys, accepts_anything):
    assert main([*command, "--draws", "0", "--json", "--compilation-cache-dir", ""]) == 1
    found = json.loads(capsys.readouterr().out)
    differences = [d for each in found["comparisons"] for d in each["differences"]]
    assert found["violations"] and any(d["wanted"] != d["got"] and not d["is_tie"] for d in differences)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.txt", None, "cannot be read"),
        ("blank.txt", "\n \n", "holds no prompts"),
        ("bad.jsonl", '{"prompt": "x"}\n{"text": "x"}', 'line 2: wanted an object with a string "prompt"'),
        ("bad.jsonl", "not json", "line 1: is not JSON"),
        ("latin.txt", b"\xe4\xf6", "cannot be read"),
    ],
)
def test_bad_prompt_files_are_refused_before_anything_is_loaded(tmp_path, capsys, name, text, said):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["check-lossless", "/nowhere", "--prompts", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--draws", "-1"], "--draws must be at least 0"),
        (["--tie-margin", "nan"], "--tie-margin must be a number of nats"),
        (["--speculative-num-draft-tokens", "1"], "--speculative-num-draft-tokens"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_loaded(capsys, flags, said):
    assert main(["check-lossless", "/nowhere", *flags]) == 2
    assert said in capsys.readouterr().err


def test_no_prompts_are_refused(config):
    with pytest.raises(InvalidRequest, match="at least one prompt"):
        check_lossless(config, [])
