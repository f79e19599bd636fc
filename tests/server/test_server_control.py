"""Health that generates, aborting by name, request ids, log lines."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import httpx
import pytest
from api_client import CHAT, Api, assert_error
from live_server import eventually, live
from scripted_engine import ScriptedEngine

from jaxserve.server.log_format import ACCESS_LOG, JsonFormatter


def test_health_generate_wants_a_token() -> None:
    api = Api(ScriptedEngine())
    assert api.get("/health_generate").status_code == 200 and api.engine.num_generated == 1
    assert api.engine.running == {}
    assert_error(Api(ScriptedEngine(fail_after=0)).get("/health_generate"), 503, code="engine_dead")
    assert_error(Api().get("/health_generate"), 503, code="loading")


def test_health_generate_gives_up_on_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve.server import control_api

    monkeypatch.setattr(control_api, "HEALTH_TIMEOUT_S", 0.05)
    api = Api(ScriptedEngine(step_s=30))
    assert_error(api.get("/health_generate"), 503, code="no_token")
    assert len(api.engine.aborted) == 1


@pytest.mark.parametrize(
    ("by", "path"),
    [("rid", "/v1/chat/completions"), ("header", "/v1/completions"), ("rid", "/generate"), ("all", "/generate")],
)
def test_a_request_is_aborted_by_its_name(by: str, path: str) -> None:
    engine = ScriptedEngine(script="x" * 400, step_s=0.02)
    answers: list[httpx.Response] = []
    body: dict[str, Any] = {"text": "Hi"} if path == "/generate" else CHAT if "chat" in path else {"prompt": "Hi"}
    limit: dict[str, Any] = {"sampling_params": {"max_new_tokens": 400}} if path == "/generate" else {"max_tokens": 400}
    with live(engine) as port:
        url = f"http://127.0.0.1:{port}"

        def ask() -> None:
            headers = {"x-request-id": "mine"} if by == "header" else {}
            answers.append(httpx.post(url + path, json=body | limit | {"rid": "mine-too"}, headers=headers, timeout=20))

        asking = threading.Thread(target=ask)
        asking.start()
        assert eventually(lambda: engine.steps > 2)
        assert httpx.post(url + "/abort_request", json={"rid": "other"}).json() == {"aborted": 0}
        name = {"abort_all": True} if by == "all" else {"rid": "mine" if by == "header" else "mine-too"}
        assert httpx.post(url + "/abort_request", json=name).json() == {"aborted": 1}
        asking.join(10)
        [answer] = answers
        assert answer.status_code == 200
        if path == "/generate":
            assert answer.json()["meta_info"]["finish_reason"] == {"type": "abort"}
        else:
            assert answer.json()["choices"][0]["finish_reason"] == "abort"
        assert httpx.post(url + "/abort_request", json={}).status_code == 400
    assert engine.running == {}


def test_embeddings_are_refused_where_the_server_makes_none() -> None:
    message = assert_error(Api(ScriptedEngine()).post("/v1/embeddings", {"input": "a"}), 400, code="no_embeddings")
    assert "--is-embedding" in message


@pytest.mark.parametrize("dimensions", [0, -1, 7, 9])
def test_embeddings_of_another_size_are_refused_before_any_work(dimensions: int) -> None:
    api = Api(ScriptedEngine(embedding_size=8), embedding_pooling="last")
    answer = api.post("/v1/embeddings", {"input": "a", "dimensions": dimensions})
    assert "must be 8" in assert_error(answer, 400, param="dimensions") and api.engine.num_generated == 0


def test_access_lines_name_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, ACCESS_LOG):
        Api(ScriptedEngine()).chat()
        Api(ScriptedEngine()).get("/v1/models?secret=1", headers={"x-request-id": "mine"})
    first, second = caplog.records
    line = json.loads(JsonFormatter().format(second))
    assert line["request_id"] == "mine" and line["status"] == 200 and line["level"] == "info"
    assert line["path"] == "/v1/models" and line["seconds"] >= 0 and "secret" not in json.dumps(line)
    assert "POST /v1/chat/completions 200" in first.getMessage()


def test_log_lines_hold_exceptions() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "it %s", ("broke",), (ValueError, error, None))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["message"] == "it broke" and "two\nlines" in fields["exception"] and fields["level"] == "error"
