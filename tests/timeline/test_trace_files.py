"""Traces as files: written at the end however it comes, bounded, refused early."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from recorded import SETTINGS
from trace_rules import problems

from jaxserve import LLM, SamplingParams
from jaxserve.cli.main import main
from jaxserve.cli.trace_flag import stopped_by_signals
from jaxserve.core.errors import ConfigError
from jaxserve.timeline.recorder import RECORDER
from jaxserve.timeline.trace import Recording, Trace, check_trace_path

ROOT = Path(__file__).parents[2]


def generate(llm: LLM, num_tokens: int = 6) -> None:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))


def num_steps(trace: dict[str, Any]) -> int:
    return sum(e["ph"] == "X" and e["name"].startswith("collect ") for e in trace["traceEvents"])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_llm_writes_its_trace_when_closed(tiny: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with LLM(str(tiny), trace=path, **SETTINGS) as llm:
        generate(llm)
        assert not path.exists()
    text = path.read_bytes()
    trace = json.loads(gzip.decompress(text) if name.endswith(".gz") else text)
    assert problems(trace) == [] and num_steps(trace) == 6
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert not RECORDER.on


@pytest.mark.parametrize(
    ("path", "why"),
    [("trace.txt", "json.gz"), ("missing/trace.json", "no folder"), ("folder.json", "is a folder")],
)
def test_a_bad_path_is_refused_before_the_model_is_looked_for(tmp_path: Path, path: str, why: str) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=why):
        LLM("/no/such/model", trace=tmp_path / path)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may write anywhere
    with pytest.raises(ConfigError, match="Permission denied"):
        check_trace_path(tmp_path / "trace.json")


@pytest.mark.parametrize("command", [["serve"], ["generate", "hi"], ["chat"]])
def test_commands_refuse_a_bad_path_first(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--model", "/no/such/model", "--trace", "/no/such/folder/trace.json"]) == 2
    assert "there is no folder /no/such/folder" in capsys.readouterr().err


def test_a_trace_of_a_remote_chat_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "--trace", "trace.json"]) == 2
    assert "--trace cannot change a running server" in capsys.readouterr().err


def test_a_long_run_keeps_its_newest_part_and_says_so(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(str(tiny), **SETTINGS) as llm, Trace(path, Recording(newest_entries=200, newest_spans=30)):
        generate(llm, 20)
        generate(llm, 20)
    trace = json.loads(path.read_bytes())
    assert problems(trace) == []
    remarks = trace["otherData"]["remarks"]
    assert len(remarks) == 2 and all("were dropped" in remark for remark in remarks)
    # in the newest part steps are whole
    last = max(e["args"]["step"] for e in trace["traceEvents"] if e["name"].startswith("collect "))
    assert [e for e in trace["traceEvents"] if e["name"] == f"decode {last}" and "launch" in e["args"]]
    assert num_steps(trace) < 8


def test_closing_twice_writes_once(tiny: Path, tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json").start()
    trace.close()
    trace.path.unlink()
    trace.close()
    assert not trace.path.exists()


PROGRAM = """
import sys
from pathlib import Path
from jaxserve import LLM, SamplingParams
llm = LLM(sys.argv[1], trace=sys.argv[2], skip_warmup=True, context_length=32, page_size=4, max_running_requests=2,
          prefill_token_buckets=(8,), decode_batch_buckets=(2,))
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
raise KeyboardInterrupt  # and nobody closes llm
"""


def test_a_script_that_dies_with_its_llm_open_still_writes(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, str(tiny), str(path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "KeyboardInterrupt" in run.stderr
    assert num_steps(json.loads(path.read_bytes())) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_a_command_by_the_ordinary_way(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore it
    try:
        with pytest.raises(SystemExit) as leaving, stopped_by_signals():
            os.kill(os.getpid(), number)
            time.sleep(1)
        assert leaving.value.code == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_serve_writes_its_trace_at_a_signal(tiny: Path, tmp_path: Path) -> None:
    import urllib.request

    path = tmp_path / "trace.json.gz"
    flags = {"--context-length": "32", "--page-size": "4", "--max-running-requests": "2",
             "--prefill-token-buckets": "8", "--chunked-prefill-size": "8",
             "--decode-batch-buckets": "2",
             "--port": "0", "--trace": str(path)}  # fmt: skip
    command = [sys.executable, "-m", "jaxserve", "serve", str(tiny), "--skip-warmup"]
    command += [part for pair in flags.items() for part in pair]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[2].rstrip(",")
        while not server.stdout.readline().startswith("ready:"):
            assert server.poll() is None
        body = {"model": "default", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            assert b"[DONE]" in response.read()
        time.sleep(0.05)
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=60)
        assert server.returncode == 0, output
    assert f"wrote {path}" in output
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert problems(trace) == [] and num_steps(trace) == 5
    (http,) = [e for e in trace["traceEvents"] if e["name"] == "POST /v1/completions"]
    (first,) = [e for e in trace["traceEvents"] if e["name"] == "first token"]
    assert http["args"]["status"] == 200 and http["ts"] < first["ts"] < http["ts"] + http["dur"]
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"requests 1", "jaxserve-step", "fences", "copies", "target"} <= threads
