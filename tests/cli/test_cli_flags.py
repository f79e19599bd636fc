"""Flags: every setting has one, aliases work, mistakes get one helpful line and exit code 2."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys

import pytest

from jaxserve.cli.flags import FLAGS, add_engine_flags, engine_config
from jaxserve.cli.main import build_parser, main
from jaxserve.cli.serve import how_to_use, server_settings
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError


def config_of(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, positional_model=True)
    return engine_config(parser.parse_args(arguments))


def problem(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message on stderr; checks that the exit code is 2."""
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_every_field_of_the_engine_config_has_a_flag() -> None:
    assert {flag.field for flag in FLAGS} == {field.name for field in dataclasses.fields(EngineConfig)}


def test_without_flags_every_default_is_the_engine_configs() -> None:
    assert config_of() == EngineConfig()


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("folder", "model", "folder"),
        ("--model folder", "model", "folder"),
        ("--model-path folder", "model", "folder"),
        ("--max-num-seqs 3", "max_running_requests", 3),
        ("--max-running-requests 3", "max_running_requests", 3),
        ("--max-model-len 64", "context_length", 64),
        ("--gpu-memory-utilization 0.5", "mem_fraction_static", 0.5),
        ("--cuda-graph-bs 4,1,2", "decode_batch_buckets", (1, 2, 4)),
        ("--precompile-bs-paddings 4", "decode_batch_buckets", (4,)),
        ("--precompile-token-paddings 16,64", "prefill_token_buckets", (16, 64)),
        ("--disable-overlap-schedule", "disable_overlap_schedule", True),
        ("--force-coarse-war-barrier", "force_coarse_war_barrier", True),
        ("--no-shared-read-marker", "shared_read_marker", False),
        ("--disable-war-barrier --allow-unsafe", "disable_war_barrier", True),
        ("--dtype bfloat16", "dtype", "bfloat16"),
        ("--fence-timeout 3", "fence_timeout_s", 3.0),
        ("--seed 0", "seed", 0),
    ],
)
def test_a_flag_sets_its_field(arguments: str, field: str, value: object) -> None:
    assert getattr(config_of(*arguments.split()), field) == value


@pytest.mark.parametrize("field", ["force_coarse_war_barrier", "disable_overlap_schedule"])
def test_an_environment_variable_is_the_twin_of_a_switch(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    for value, wanted in (("1", True), ("true", True), ("0", False), ("", False), ("off", False)):
        monkeypatch.setenv(f"JAXSERVE_{field.upper()}", value)
        assert getattr(config_of(), field) is wanted
    monkeypatch.setenv(f"JAXSERVE_{field.upper()}", "maybe")
    with pytest.raises(ConfigError, match="'maybe'"):
        config_of()


def test_two_different_models_contradict() -> None:
    assert config_of("a", "--model", "a").model == "a"
    with pytest.raises(ConfigError, match=r"'a'.*'b'"):
        config_of("a", "--model", "b")


def test_an_unknown_flag_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --max-num-seqs?" in problem(capsys, "serve", "--max-num-sequences", "3")
    assert "did you mean --temperature?" in problem(capsys, "generate", "Hi", "--temprature=0")
    assert "unknown argument: --max-num" in problem(capsys, "serve", "--max-num", "3")  # no abbreviations


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve --page-size 0", "--page-size"),
        ("serve --page-size many", "--page-size"),
        ("serve --dtype int8", "float32"),
        ("serve --cuda-graph-bs 1,x", "1,2,4"),
        ("serve --cuda-graph-bs 0", "decode_batch_buckets"),
        ("serve --port 70000", "--port"),
        ("serve --drain-timeout -1", "--drain-timeout"),
        ("serve --disable-war-barrier", "--allow-unsafe"),
        ("serve a --model b", "MODEL"),
        ("generate Hi --temperature -1", "temperature"),
        ("generate Hi --max-tokens 0", "max_tokens"),
        ("chat --url http://x --page-size 4", "--page-size"),
        ("serv", "serve"),
        ("", "COMMAND"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    text = problem(capsys, *arguments.split())
    assert said in text and len(text.splitlines()) <= 2


def test_the_key_may_come_from_the_environment_but_not_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_API_KEY", "secret")
    parser = build_parser()
    assert server_settings(parser.parse_args(["serve"])).api_keys == ("secret",)
    assert server_settings(parser.parse_args(["serve", "--api-key", "a", "--api-key", "b"])).api_keys == ("a", "b")
    monkeypatch.setenv("JAXSERVE_API_KEY", "")
    with pytest.raises(ConfigError, match="JAXSERVE_API_KEY"):
        server_settings(parser.parse_args(["serve"]))
    with pytest.raises(ConfigError, match="--api-key"):
        server_settings(parser.parse_args(["serve", "--api-key", ""]))


def test_the_server_says_how_to_use_it() -> None:
    class Engine:
        model_name, context_length, config = "m", 64, EngineConfig(served_model_name="chat")

    text = how_to_use(Engine(), "http://localhost:8000", False)  # type: ignore[arg-type]
    assert "curl http://localhost:8000/v1/chat/completions" in text and '"model": "chat"' in text
    assert 'OpenAI(base_url="http://localhost:8000/v1"' in text and "Authorization" not in text
    assert "Authorization: Bearer" in how_to_use(Engine(), "http://localhost:8000", True)  # type: ignore[arg-type]


def test_help_and_version_do_not_import_jax() -> None:
    code = (
        "import sys\nfrom jaxserve.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert not {'jax', 'fastapi', 'numpy'} & set(sys.modules), 'slow import'"
    )
    for arguments in (["--help"], ["serve", "--help"], ["generate", "--help"], ["chat", "--help"], ["version"]):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=30)
