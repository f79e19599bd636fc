"""``generate``, ``chat`` and ``collect-env`` without a model."""

from __future__ import annotations

import io
import json
import sys
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_llm import FakeLLM, install

from jaxserve.cli.answerers import RemoteAnswerer
from jaxserve.cli.chat import talk
from jaxserve.cli.main import main
from jaxserve.cli.program_reports import graph_splits
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, JaxserveError, ModelLoadError
from jaxserve.core.speculation_counts import SpeculationCounts

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))  # the scripted engine lives there

from live_server import eventually, live
from scripted_engine import ScriptedEngine


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    return install(monkeypatch)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_generate_prints_the_continuation(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hi", "--max-tokens", "64", "--temperature", "0", "--seed", "3", "--page-size", "4"]) == 0
    assert capsys.readouterr().out == "Hi!\n"
    (made,) = llm.made
    ((_, params),) = made.asked
    assert (params.max_tokens, params.temperature, params.seed) == (64, 0.0, 3)
    assert made.config["page_size"] == 4 and made.config["seed"] is None
    assert made.config["skip_warmup"] is made.config["greedy_programs"] is True and made.closed
    main(["generate", "Hi", "--temperature", "0.5"])
    assert not llm.made[-1].config["greedy_programs"]  # both kinds would take longer to compile than one for all


def test_a_terminal_without_the_character_gets_a_question_mark(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main(["generate", "é"]) == 0
    sys.stdout.flush()
    assert printed.getvalue() == b"?!\n"


def test_generate_prints_several_prompts_in_order(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "one", "two"])
    assert capsys.readouterr().out == "--- 'one'\none!\n--- 'two'\ntwo!\n"


def test_generate_json_is_one_object_per_output(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "é", "two", "--n", "2", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt"], line["index"], line["text"]) for line in lines] == [
        ("é", 0, "é!"),
        ("é", 1, "é!"),
        ("two", 0, "two!"),
        ("two", 1, "two!"),
    ]
    assert lines[0]["finish_reason"] == "stop" and lines[0]["prompt_tokens"] == 2 and "speculation" not in lines[0]


def test_generate_json_tells_of_speculation(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm, "speculation", SpeculationCounts(6, 4, (0, 2)))
    main(["generate", "Hi", "--json"])
    counts = {"num_drafted": 6, "num_accepted": 2, "num_emitted": 4, "num_rows": 2, "rows_by_accepted": [0, 2]}
    assert json.loads(capsys.readouterr().out)["speculation"] == counts | {"mean_accepted_length": 2.0}


def test_generate_reads_stdin(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "from a pipe\n")
    main(["generate"])
    assert capsys.readouterr().out == "from a pipe!\n"


def test_generate_chat_sends_a_users_message(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "--chat", "Hi"])
    assert llm.made[0].asked[0][0] == [{"role": "user", "content": "Hi"}]
    main(["generate", "--chat", "one", "two"])
    assert [asked for asked, _ in llm.made[1].asked] == [[{"role": "user", "content": text}] for text in ("one", "two")]


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    llm.failure = ModelLoadError("no such folder: nowhere")
    assert main(["generate", "Hi", "--model", "nowhere"]) == 1
    assert capsys.readouterr().err == "jaxserve generate: error: no such folder: nowhere\n"


@pytest.mark.parametrize(
    ("failure", "code"), [(ModelLoadError("no such folder: nowhere"), 1), (ConfigError("--num-pages is too small"), 2)]
)
def test_serve_with_a_model_that_cannot_be_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception, code: int
) -> None:
    install(monkeypatch)
    module = ModuleType("jaxserve.engine.async_engine")

    class AsyncEngine:
        @staticmethod
        def from_config(config: EngineConfig, progress: object) -> None:
            raise failure

    module.AsyncEngine = AsyncEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.engine.async_engine", module)
    assert main(["serve", "nowhere", "--port", "0"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"jaxserve serve: error: {failure}\n"
    assert captured.out.startswith("listening on http://127.0.0.1:")


def test_chat_remembers_the_conversation_until_cleared(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "one\n\ntwo\n/clear\nthree\n/exit\nnever\n")
    assert main(["chat", "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "one!\ntwo!\nthree!\n"
    contents = [[message["content"] for message in asked] for asked, _ in llm.made[0].asked]
    assert contents == [["be brief", "one"], ["be brief", "one", "one!", "two"], ["be brief", "three"]]
    assert llm.made[0].closed


def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[Any] = []
    closed: list[bool] = []

    class Interrupted:
        name = "m"

        def answer(self, messages):
            heard.append([message["content"] for message in messages])
            try:
                yield "half"
                if len(heard) == 1:
                    raise KeyboardInterrupt
            finally:
                closed.append(True)

        def close(self):
            pass

    type_in(monkeypatch, "one\ntwo\n")
    talk(Interrupted())
    assert "half [stopped]" in capsys.readouterr().out
    assert heard == [["one"], ["one", "half", "two"]] and closed == [True, True]


def test_a_failed_answer_is_reported_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[Any] = []
    with live(ScriptedEngine(error_after=2)) as port:
        answerer = RemoteAnswerer(f"http://127.0.0.1:{port}", {})
        answer = answerer.answer
        monkeypatch.setattr(answerer, "answer", lambda messages: heard.append(list(messages)) or answer(messages))
        type_in(monkeypatch, "one\ntwo\n")
        talk(answerer)
    assert "error: bad step" in capsys.readouterr().err
    assert [[message["content"] for message in messages] for messages in heard] == [["one"], ["two"]]


def test_chat_talks_to_a_running_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with live(ScriptedEngine(), api_keys=("k",)) as port:
        for url in (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}/v1/"):
            type_in(monkeypatch, "one\n")
            assert main(["chat", "--url", url, "--api-key", "k", "--temperature", "0"]) == 0
            assert capsys.readouterr().out == "Hello\n"
        assert main(["chat", "--url", url, "--api-key", "wrong"]) == 1
        assert "wrong API key" in capsys.readouterr().err


def test_leaving_a_remote_answer_aborts_it() -> None:
    engine = ScriptedEngine(script="x" * 5000, step_s=0.005)
    with live(engine) as port:
        answer = RemoteAnswerer(f"http://127.0.0.1:{port}", {}).answer([{"role": "user", "content": "Hi"}])
        while next(answer) == "":
            pass
        answer.close()
        assert eventually(lambda: engine.running == {})


def test_no_server_is_one_clear_line() -> None:
    with pytest.raises(JaxserveError, match="is the server running"):
        RemoteAnswerer("http://127.0.0.1:9", {})
    with pytest.raises(JaxserveError, match=r"nothing answers at http://127\.0\.0\.1:9/v1"):
        RemoteAnswerer("127.0.0.1:9", {})
    with pytest.raises(JaxserveError, match="nothing answers"):
        RemoteAnswerer("http://127.0.0.1:port", {})
    with pytest.raises(ConfigError, match="--url"):
        RemoteAnswerer("file:///etc", {})


def test_a_server_that_is_something_else_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for reply in (b"<html>", b"[]", b'{"data": []}'):
        monkeypatch.setattr(urllib.request, "urlopen", lambda request, reply=reply: io.BytesIO(reply))
        with pytest.raises(JaxserveError, match="--url"):
            RemoteAnswerer("http://x", {})


def test_a_cut_connection_is_not_a_finished_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [b'{"data": [{"id": "m"}]}', b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n']
    monkeypatch.setattr(urllib.request, "urlopen", lambda request: io.BytesIO(replies.pop(0)))
    with pytest.raises(JaxserveError, match="in the middle"):
        list(RemoteAnswerer("http://x", {}).answer([]))


def test_collect_env_shows_versions_but_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXSERVE_API_KEY", "hush")
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    for fact in ("python: 3", "jax ", "flax ", "cpu: ", "devices: ", "XLA FFI API: 0.", "extension: "):
        assert fact in text
    assert "attention backend: native\n" in text
    assert "few-row products: the extension's, for up to 16 rows of float32\n" in text
    assert "shared reads: EXTEND UNKNOWN (coarse:extend), DECODE IN_REPLAY (fine:marker), TARGET_VERIFY" in text
    assert "hush" not in text and "env JAXSERVE_API_KEY: (set, not shown)" in text and "env JAX_ENABLE_X64: 0" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--attention-backend", "planned"],
            "EXTEND PRE_REPLAY (fine:pre_replay), DECODE PRE_REPLAY (fine:pre_replay)",
        ),
        (["--no-shared-read-marker"], "DECODE IN_REPLAY -> PRE_REPLAY (fine:pre_replay)"),
        (["--force-coarse-war-barrier"], "DECODE IN_REPLAY (coarse:forced)"),
        (["--disable-war-barrier", "--allow-unsafe"], "DECODE IN_REPLAY (none:disabled)"),
        (["--speculative-algorithm", "ngram"], "TARGET_VERIFY IN_REPLAY (coarse:ngram)"),
        (
            ["--speculative-algorithm", "NGRAM", "--speculative-ngram-fence", "relay"],
            "TARGET_VERIFY IN_REPLAY (fine:marker)",
        ),
        (["--attention-backend", "nobody's"], "unknown (ConfigError: unknown attention backend"),
    ],
)
def test_collect_env_shows_the_fence_a_configuration_gets(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(["collect-env", *flags]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("shared reads: ")]
    assert said in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "off"),
        (["--speculative-algorithm", "NGRAM"], "NGRAM, 8 draft tokens, chains, adaptive, fence coarse:ngram"),
        (
            ["--speculative-algorithm", "NGRAM", "--no-speculative-adaptive", "--speculative-ngram-fence", "relay",
             "--speculative-ngram-max-bfs-breadth", "4", "--speculative-num-draft-tokens", "16"],
            "NGRAM, 16 draft tokens, trees, not adaptive, fence fine:marker",
        ),
        (["--speculative-algorithm", "nobody's"], "unknown (ConfigError: "),
    ],
)  # fmt: skip
def test_collect_env_shows_speculation(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main(["collect-env", *flags]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("speculation: ")]
    assert line.removeprefix("speculation: ").startswith(said)


def test_collect_env_heeds_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("JAXSERVE_FORCE_COARSE_WAR_BARRIER", "1")
    assert main(["collect-env"]) == 0
    assert "(coarse:forced)" in capsys.readouterr().out


REPORT = {"name": "step decode[batch=8,tokens=1,width=16]", "graphs": {"splits": ["jaxserve_snapshot", "gather"]}}


def test_graph_splits_come_from_a_program_report(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    path.write_text(json.dumps(REPORT) + "\n" + json.dumps({"name": "prep", "graphs": None}) + "\n")
    assert graph_splits(path) == {"step decode[batch=8,tokens=1,width=16]": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("a table\n", "not the output of check-programs --json"),
        ('{"name": "step"}\n', "not the output of check-programs --json"),
        ('{"name": "step", "graphs": null}\n', "names no program with CUDA graphs"),
    ],
)
def test_a_program_report_that_is_none_is_refused_before_the_port_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "report.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["serve", "--port", "0", "--program-report", str(path)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and "--target h100" in captured.err and captured.out == ""


def test_serve_hands_the_graph_splits_to_the_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch)
    module = ModuleType("jaxserve.engine.async_engine")
    taken: list[dict[str, int]] = []

    class AsyncEngine:
        metrics = SimpleNamespace(set_graph_splits=taken.append)

        @classmethod
        def from_config(cls, config: EngineConfig, progress: object) -> AsyncEngine:
            return cls()

    class ServerProcess:
        url = "http://nowhere"

        def __init__(self, load: Any, *others: object):
            self.run = lambda: 0 if load() else 1

    module.AsyncEngine = AsyncEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.engine.async_engine", module)
    monkeypatch.setattr("jaxserve.server.launch.ServerProcess", ServerProcess)
    path = tmp_path / "report.jsonl"
    path.write_text(json.dumps(REPORT) + "\n")
    assert main(["serve", "--program-report", str(path)]) == 0
    assert taken == [{REPORT["name"]: 2}]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tool-call-parser", "xml"], "--tool-call-parser must be one of hermes"),
        (["--reasoning-parser", "x"], "--reasoning-parser must be one of deepseek_r1"),
        (["--chat-template", "nowhere"], "cannot be read"),
        (["--chat-template", "broken"], "is not a jinja template: line 1"),
    ],
)
def test_serve_refuses_what_it_could_not_parse_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken").write_text("{% for %}")
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["serve", "--port", "0", *flags]))
    assert ended.value.code not in (0, None) and said in capsys.readouterr().err
