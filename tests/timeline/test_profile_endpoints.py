"""``/start_profile`` and ``/stop_profile``."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from api_client import Api, assert_error
from scripted_engine import ScriptedEngine
from trace_rules import problems

from jaxserve.core.errors import ConfigError
from jaxserve.server.settings import ServerSettings
from jaxserve.timeline.recorder import RECORDER


def test_a_profile_holds_the_requests_between_start_and_stop(tmp_path: Path) -> None:
    api = Api(ScriptedEngine(), profile_dir=str(tmp_path))
    api.chat()
    started = api.post("/start_profile", b"").json()
    assert started["status"] == "recording" and RECORDER.on
    api.chat()
    stopped = api.post("/stop_profile", b"").json()
    assert stopped == {"status": "written", "path": started["path"]} and not RECORDER.on
    trace = json.loads(gzip.decompress(Path(stopped["path"]).read_bytes()))
    assert problems(trace) == []
    names = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert names.count("POST /v1/chat/completions") == 1


def test_a_folder_in_the_profile_folder_may_be_chosen_and_no_other(tmp_path: Path) -> None:
    api = Api(ScriptedEngine(), profile_dir=str(tmp_path))
    for outside in ("..", "/etc", "a/../../b"):
        assert_error(api.post("/start_profile", {"output_dir": outside}), 400, param="output_dir")
    path = Path(api.post("/start_profile", {"output_dir": "monday"}).json()["path"])
    assert path.parent == tmp_path.resolve() / "monday"
    assert_error(api.post("/start_profile", b""), 409, code="profiling_failed")
    api.post("/stop_profile")
    assert path.exists()
    assert_error(api.post("/stop_profile"), 409, code="no_profile")


def test_without_a_folder_there_are_no_profiles() -> None:
    api = Api(ScriptedEngine())
    response = api.post("/start_profile", b"")
    assert_error(response, 400, code="profiling_disabled")
    assert "--profile-dir" in response.text
    with pytest.raises(ConfigError, match="--profile-dir"):
        ServerSettings(profile_dir="/no/such/folder")


def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    api = Api(ScriptedEngine(), profile_dir=str(tmp_path))
    assert_error(api.post("/start_profile", {"num_steps": 3}), 400, param="num_steps")
    assert not RECORDER.on
