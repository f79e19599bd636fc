"""Models, health, metrics, keys, CORS, request ids, tokenizing."""

from __future__ import annotations

import pytest
from api_client import Api, assert_error
from scripted_engine import ScriptedEngine


def test_the_model_is_listed_under_all_its_names() -> None:
    api = Api(ScriptedEngine(served_model_name="team/chat"))
    assert [entry["id"] for entry in api.get("/v1/models").json()["data"]] == ["team/chat", "scripted", "default"]
    for name in ("team/chat", "scripted", "default"):
        assert api.get(f"/v1/models/{name}").json()["id"] == name
        assert api.chat(model=name).json()["model"] == "team/chat"
    assert_error(api.get("/v1/models/other"), 404, code="model_not_found")


def test_while_loading_it_lives_but_is_not_ready() -> None:
    api = Api()
    assert api.get("/health").json() == {"status": "ok", "stage": "loading"}
    assert api.get("/health/ready").status_code == api.call("HEAD", "/health/ready").status_code == 503
    response = api.chat()
    assert_error(response, 503, code="loading")
    assert response.headers["retry-after"] == "1"
    assert api.get("/metrics").status_code == api.get("/version").status_code == 200
    api.lifecycle.serve_with(ScriptedEngine())
    assert api.get("/health/ready").status_code == api.chat().status_code == 200


def test_a_warming_engine_is_not_ready_and_a_dead_one_is_not_alive() -> None:
    api = Api(ScriptedEngine(ready=False))
    assert api.get("/health/ready").status_code == 503 and api.get("/health").status_code == 200
    api.engine.ready, api.engine.dead = True, "lost"
    assert api.get("/health/ready").status_code == 503 and api.get("/health").status_code == 503
    assert_error(api.chat(), 503, code="engine_dead")


def test_a_draining_server_refuses_new_requests() -> None:
    api = Api(ScriptedEngine())
    api.lifecycle.begin_drain()
    assert_error(api.chat(), 503, code="shutting_down")
    assert api.get("/health").status_code == 200 and api.get("/health/ready").status_code == 503


def test_metrics_count_requests_by_route_and_include_the_engines() -> None:
    api = Api(ScriptedEngine())
    api.chat()
    api.get("/v1/models/other")
    api.get("/made/up/path")
    text = api.get("/metrics").text
    assert 'jaxserve:http_requests_total{method="POST",path="/v1/chat/completions",status="200"} 1.0' in text
    assert 'path="/v1/models/{model:path}",status="404"} 1.0' in text
    assert 'path="unmatched",status="404"} 1.0' in text and "made/up" not in text
    assert "jaxserve:generation_tokens_total" in text


def test_a_key_is_wanted_everywhere_but_on_health_and_metrics() -> None:
    api = Api(ScriptedEngine(), api_keys=("one", "two"))
    for path in ("/v1/models", "/get_server_info", "/docs", "/nope"):
        assert_error(api.get(path), 401, code="invalid_api_key")
    for bad in ("Bearer three", "Bearer", "Basic one", "one", "Bearer oné".encode()):
        assert_error(api.get("/v1/models", headers={"authorization": bad}), 401)
    for key in ("one", "two"):
        assert api.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    for path in ("/health", "/health/ready", "/metrics", "/version"):
        assert api.get(path).status_code == 200


def test_cors_is_off_by_default_and_answers_preflights_when_on() -> None:
    ask = {"origin": "https://page.test", "access-control-request-method": "POST"}
    assert_error(Api(ScriptedEngine()).call("OPTIONS", "/v1/chat/completions", headers=ask), 405)
    assert "access-control-allow-origin" not in Api(ScriptedEngine()).get("/health", headers=ask).headers
    api = Api(ScriptedEngine(), cors_origins=("https://page.test",), api_keys=("k",))
    allowed = api.call("OPTIONS", "/v1/chat/completions", headers=ask)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://page.test"
    assert api.get("/v1/models", headers=ask).headers["access-control-allow-origin"] == "https://page.test"
    assert "x-request-id" in api.get("/v1/models", headers=ask).headers["access-control-expose-headers"]


def test_every_answer_has_a_request_id_the_clients_own_if_it_is_harmless() -> None:
    api = Api(ScriptedEngine())
    assert api.chat().headers["x-request-id"].startswith("req-")
    assert api.get("/nope", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert api.get("/health", headers={"x-request-id": "a b<c>"}).headers["x-request-id"].startswith("req-")


def test_tokenize_and_detokenize_are_inverse() -> None:
    api = Api(ScriptedEngine())
    tokens = api.post("/tokenize", {"prompt": "é!", "return_token_strs": True}).json()
    assert tokens["tokens"] == [0xC3, 0xA9, 33] and tokens["count"] == 3 and tokens["max_model_len"] == 512
    assert tokens["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert api.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "é!"}
    assert api.post("/detokenize", {"tokens": [257]}).json() == {"prompt": "</s>"}
    chat = api.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["count"] == api.chat().json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("tokens", [[-1], [999], ["a"], "abc", [2**70], None])
def test_detokenize_refuses_what_is_no_token(tokens: object) -> None:
    response = Api(ScriptedEngine()).post("/detokenize", {"tokens": tokens})
    assert_error(response, 400)
    assert response.json()["error"]["param"].startswith("tokens")


def test_server_info_and_openapi_are_json() -> None:
    api = Api(ScriptedEngine())
    assert api.get("/get_server_info").json()["state"]["running"] == 0
    assert api.get("/get_model_info").json()["is_generation"] is True
    schema = api.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    assert "messages" in schema["components"]["schemas"][name]["properties"]
