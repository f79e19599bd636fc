"""``jaxserve bench serve``: planted times come out, failures are counted, workloads are what they say."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from live_server import live
from planted_stream import Planted, PlantedClock, planted
from scripted_engine import ByteTokenizer, ScriptedEngine

from jaxserve.bench.serve import Plan, check, run
from jaxserve.bench.serve_load import BenchError, Load
from jaxserve.bench.serve_report import report
from jaxserve.bench.serve_workload import Dataset, Tokens, make_prompts
from jaxserve.cli.main import main
from jaxserve.core.errors import ConfigError

CHECKPOINT = Path(__file__).parent.parent / "fixtures" / "gqa"


def measured(plan: Planted, count: int = 4, output_len: int = 6, load: Load | None = None, **more: Any) -> dict:
    with planted(plan) as url:
        dataset = Dataset("random", input_len=5, output_len=output_len)
        return run(Plan(url, dataset=dataset, load=load or Load(warmups=0), num_prompts=count, **more))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_planted_times_come_out(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PlantedClock(parties=4)
    clock.plant(monkeypatch)
    plan = Planted(first_s=0.2, gap_s=0.05, usage_s=3.0, clock=clock)
    found = measured(plan, endpoint=endpoint)
    assert found["completed"] == 4 and found["failed"] == 0
    for kind, wanted_ms in (("ttft", 200), ("tpot", 50), ("itl", 50), ("e2el", 450)):
        for figure in ("mean", "median", "p99"):
            assert found[f"{figure}_{kind}_ms"] == pytest.approx(wanted_ms), (figure, kind)
    assert found["total_output_tokens"] == 24 and found["total_input_tokens"] == 28
    assert found["duration"] == pytest.approx(0.45)
    assert found["output_throughput"] == pytest.approx(24 / 0.45)
    assert found["request_throughput"] == pytest.approx(4 / 0.45)
    assert found["peak_concurrency"] == 4


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_times_are_those_of_the_clock(endpoint: str) -> None:
    """However busy the machine, nothing comes before the server has sent it."""
    found = measured(Planted(first_s=0.2, gap_s=0.05), endpoint=endpoint)
    assert found["completed"] == 4 and found["failed"] == 0
    assert found["median_ttft_ms"] >= 200 and found["median_e2el_ms"] >= 450
    assert found["p99_e2el_ms"] >= found["median_e2el_ms"]
    assert found["duration"] >= 0.45
    assert found["output_throughput"] == pytest.approx(24 / found["duration"])
    assert found["request_throughput"] == pytest.approx(4 / found["duration"])


def test_chunks_of_several_tokens_make_itl_and_tpot_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PlantedClock(parties=4)
    clock.plant(monkeypatch)
    found = measured(Planted(gap_s=0.06, per_chunk=3, accepted=4, clock=clock), output_len=12)
    # three gaps of 60 ms, eleven tokens after the first
    assert found["median_tpot_ms"] == pytest.approx(180 / 11)
    assert found["median_itl_ms"] == pytest.approx(60)
    assert found["accept_length"] == 12 / (12 - 4) and found["accept_rate"] == 0.5
    assert "ITL is not TPOT" in report(found)


def test_without_usage_chunks_are_counted_and_the_report_says_so() -> None:
    found = measured(Planted(usage=False))
    assert found["total_output_tokens"] == 24 and found["output_tokens_counted_by"] == "chunks with text"
    assert "the server sent no usage" in report(found)
    assert "accept_length" not in found


def test_a_single_token_has_no_time_per_output_token() -> None:
    found = measured(Planted(), output_len=1)
    assert found["completed"] == 4 and found["mean_tpot_ms"] is None and found["mean_itl_ms"] is None
    assert "no sample" in report(found)


@pytest.mark.parametrize(
    ("plan", "kind", "failed"),
    [
        (Planted(statuses=(200, 429, 500, 429, 200)), "HTTP 429", 3),
        (Planted(breaks_after=2), "stream broken off", 5),
        (Planted(error_after=3), "error in the stream", 5),
        (Planted(gap_s=10), "timeout", 5),
    ],
    ids=["refused", "broken", "error frame", "too slow"],
)
def test_failures_are_counted_by_kind_and_in_no_other_figure(plan: Planted, kind: str, failed: int) -> None:
    found = measured(plan, count=5, load=Load(warmups=0, timeout_s=0.5))
    assert found["failed"] == failed == sum(found["errors"].values()) and kind in found["errors"]
    assert found["completed"] == 5 - failed and found["total_output_tokens"] == 6 * (5 - failed)
    assert [each["error"] is not None for each in found["per_request"]].count(True) == failed
    if failed == 5:
        with pytest.raises(BenchError, match=f"none of 5 requests succeeded: {kind}"):
            check(found)
    else:
        assert found["errors"] == {"HTTP 429": 2, "HTTP 500": 1}
        assert "2 x HTTP 429: planted refusal" in report(found)


def test_a_refused_warm_up_ends_the_bench_with_the_servers_words() -> None:
    with pytest.raises(BenchError, match="HTTP 400: planted refusal"):
        measured(Planted(statuses=(400,)), load=Load(warmups=1))


def test_the_limit_on_concurrency_holds() -> None:
    plan = Planted(first_s=0.05)
    found = measured(plan, count=9, load=Load(warmups=0, max_concurrency=3))
    assert plan.most_open == 3 == found["peak_concurrency"]


def test_a_request_is_timed_from_when_it_is_sent_not_from_when_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PlantedClock(parties=3)
    clock.plant(monkeypatch)
    found = measured(Planted(first_s=0.05, clock=clock), count=9, load=Load(warmups=0, max_concurrency=3))
    assert found["mean_ttft_ms"] == pytest.approx(50) and found["p99_ttft_ms"] == pytest.approx(50)
    assert found["duration"] == pytest.approx(0.15)


def test_a_finite_rate_spreads_requests() -> None:
    plan = Planted()
    found = measured(plan, count=20, load=Load(request_rate=50, warmups=0, burstiness=100))
    sent = [each["sent_s"] for each in found["per_request"]]
    assert 19 / 50 * 0.8 < sent[-1] < 19 / 50 * 1.3 + 0.2
    assert sent == sorted(sent)


def test_pauses_have_the_mean_and_spread_that_were_asked_for() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        due = Load(request_rate=10, burstiness=burstiness, seed=3).arrivals(4000)
        pauses = [later - earlier for earlier, later in itertools.pairwise(due)]
        assert statistics.fmean(pauses) == pytest.approx(0.1, rel=0.1)
        assert statistics.stdev(pauses) == pytest.approx(0.1 / math.sqrt(burstiness), rel=0.15)
    assert Load(request_rate=10, seed=3).arrivals(9) == Load(request_rate=10, seed=3).arrivals(9)
    assert Load().arrivals(3) == [0, 0, 0]


def test_no_server_and_strange_servers_are_clear_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "nothing answers at http://127.0.0.1:9" in capsys.readouterr().err
    with pytest.raises(BenchError, match="did not list a model"):
        measured(Planted(models=b"[]"))
    with pytest.raises(BenchError, match="wants an API key"):
        measured(Planted(models_status=401))
    with pytest.raises(BenchError, match=r"no way to empty its prefix cache .*/flush_cache: 404"):
        measured(Planted(), load=Load(warmups=0, flush_cache=True))
    started = time.monotonic()
    with pytest.raises(BenchError, match="answered 503"):
        measured(Planted(models_status=503), load=Load(ready_timeout_s=0.3))
    assert time.monotonic() - started < 5


def test_the_command_line_reaches_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Planted()
    with planted(plan) as url:
        flags = ["--base-url", url + "/v1", "--num-prompts", "3", "--input-len", "4", "--output-len", "5", "--api-key",
                 "k", "--extra-body", '{"seed": 7}', "--warmups", "2", "--json", str(tmp_path / "found.json"),
                 "--percentiles", "50,90", "--endpoint", "chat"]  # fmt: skip
        assert main(["bench", "serve", *flags]) == 0
    assert len(plan.bodies) == 5
    assert {k: v for k, v in plan.bodies[0].items() if k != "messages"} == {
        "model": "planted", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.0, "ignore_eos": True, "seed": 7,
    }  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["completed"] == 3 and "p90_ttft_ms" in found and "p99_ttft_ms" not in found
    assert "Successful requests:" in capsys.readouterr().out
    assert main(["bench", "serve", "--", "--page-size", "4"]) == 2
    assert "--start MODEL" in capsys.readouterr().err


def test_against_our_own_server_with_a_key() -> None:
    with live(ScriptedEngine(script="Hi there"), api_keys=("sesame",)) as port:
        url = f"http://127.0.0.1:{port}"
        plan = {"base_url": url, "num_prompts": 6, "dataset": Dataset(input_len=40, output_len=9)}
        found = run(Plan(**plan, api_key="sesame", extra={"ignore_eos": True}))
        assert found["completed"] == 6 and found["total_output_tokens"] == 54
        assert found["output_tokens_counted_by"] == "server"
        with pytest.raises(BenchError, match="API key"):
            run(Plan(**plan))


def test_it_starts_a_server_of_its_own_and_ends_it() -> None:
    flags = ("--num-pages", "64", "--page-size", "4", "--context-length", "64", "--max-running-requests", "2",
             "--prefill-token-buckets", "64", "--chunked-prefill-size", "64", "--decode-batch-buckets", "2",
             "--skip-warmup")  # fmt: skip
    plan = Plan(start=str(CHECKPOINT), server_flags=flags, num_prompts=4,
                dataset=Dataset(input_len=10, output_len=8), extra={"ignore_eos": True, "temperature": 0})  # fmt: skip
    found = run(plan)
    assert found["completed"] == 4
    assert found["total_output_tokens"] == 32 and found["total_input_tokens"] == 40  # exactly what was asked for
    with pytest.raises(BenchError, match="nothing answers"):
        run(Plan(found["settings"]["base_url"]))
    with pytest.raises(BenchError, match="ended with code"):
        run(Plan(start=str(CHECKPOINT), server_flags=("--page-size", "999")))


# -- workloads ---------------------------------------------------------------------------------------------------------

BYTES = Tokens(ByteTokenizer())


def test_random_prompts_are_ids_of_the_lengths_asked_for() -> None:
    made = make_prompts(Dataset(input_len=100, output_len=40, range_ratio=0.5), 200, 1, BYTES, as_text=False)
    lengths = [len(p.content) for p in made]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert all(20 <= p.max_tokens <= 60 for p in made)
    assert all(set(p.content) <= set(range(256)) for p in made)  # no special ids
    assert made == make_prompts(Dataset(input_len=100, output_len=40, range_ratio=0.5), 200, 1, BYTES, as_text=False)
    assert made[0] != make_prompts(Dataset(input_len=100, output_len=40), 1, 2, BYTES, as_text=False)[0]


def test_repeated_prompts_share_beginnings_and_nothing_else() -> None:
    made = make_prompts(Dataset("repeat", input_len=8, num_prefixes=3, prefix_len=20), 30, 1, BYTES, as_text=False)
    assert len({tuple(p.content[:20]) for p in made}) == 3
    assert len({tuple(p.content[20:]) for p in made}) == 30


def test_made_up_conversations_are_named_so_and_have_sharegpts_lengths() -> None:
    dataset = Dataset("sharegpt")
    assert "synthetic" in dataset.described
    made = make_prompts(dataset, 3000, 1, BYTES, as_text=True)
    assert statistics.fmean(p.num_tokens for p in made) == pytest.approx(220, rel=0.15)
    assert statistics.fmean(p.max_tokens for p in made) == pytest.approx(200, rel=0.15)
    assert statistics.median(p.num_tokens for p in made) < 150  # a long tail, as real ones


def test_a_file_in_sharegpts_layout_is_filtered_as_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    turns = [("hello there", "a fine answer"), ("hi", "too short a prompt"), ("x" * 2000, "too long"), ("only one",)]
    file.write_text(json.dumps([{"conversations": [{"from": "x", "value": t} for t in turn]} for turn in turns]))
    made = make_prompts(Dataset("sharegpt", file), 2, 0, BYTES, as_text=True)
    assert [(p.content, p.num_tokens, p.max_tokens) for p in made] == [("hello there", 11, 13)] * 2
    file.write_text("[]")
    with pytest.raises(ConfigError, match="no conversation"):
        make_prompts(Dataset("sharegpt", file), 2, 0, BYTES, as_text=True)
    file.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        make_prompts(Dataset("sharegpt", file), 2, 0, BYTES, as_text=True)


def test_lines_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "four"}\n')
    made = make_prompts(Dataset("jsonl", file), 3, 0, Tokens(), as_text=False)
    assert [(p.content, p.num_tokens, p.max_tokens) for p in made] == [("one", None, 3), ("four", None, 128),
                                                                       ("one", None, 3)]  # fmt: skip
    file.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with pytest.raises(ConfigError, match=r"own\.jsonl:2: wanted an object"):
        make_prompts(Dataset("jsonl", file), 3, 0, Tokens(), as_text=False)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: Dataset("alpaca"), "sharegpt, random"),
        (lambda: Dataset("jsonl"), "--dataset-path"),
        (lambda: Dataset("random", Path("x")), "not used"),
        (lambda: Dataset(range_ratio=1.0), "--range-ratio"),
        (lambda: Dataset(input_len=0), "--input-len"),
        (lambda: Load(request_rate=0), "--request-rate"),
        (lambda: Load(burstiness=0), "--burstiness"),
        (lambda: Load(max_concurrency=0), "--max-concurrency"),
        (lambda: Plan(num_prompts=0), "--num-prompts"),
        (lambda: Plan(base_url="localhost:8000"), "--base-url"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        make()
