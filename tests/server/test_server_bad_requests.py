"""A client's mistake is a 4xx in the OpenAI error shape that names the field, and the next request works."""

from __future__ import annotations

import json

import pytest
from api_client import CHAT, Api, assert_error
from scripted_engine import ScriptedEngine

from jaxserve.core.errors import CapacityError


@pytest.fixture
def api() -> Api:
    return Api(ScriptedEngine())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"x",}',
        b"",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt":"x\\ud83d"}',
        b'{"stop":["\\udc00"]}',
        b'{"prompt":"\xff"}',
        b'{"temperature":NaN}',
        b'{"temperature":1e999}',
        b"[" * 5000,
    ],
)
def test_a_body_that_is_not_a_json_object_is_a_400(api: Api, path: str, body: bytes) -> None:
    assert_error(api.post(path, body), 400, code="invalid_json")
    assert api.complete().status_code == 200


def test_a_surrogate_pair_is_a_character(api: Api) -> None:
    response = api.post("/v1/completions", b'{"prompt":"\\ud83d\\ude00"}')
    assert response.json()["usage"]["prompt_tokens"] == 4


BAD_FIELDS = [
    ("temperature", "hot"),
    ("temperature", -1),
    ("temperature", True),
    ("temperature", "0.5"),
    ("top_p", -1),
    ("top_p", 2),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.01),
    ("n", -1),
    ("n", 0),
    ("n", 129),
    ("n", 1.0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 2**64),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 5),
    ("stop", [5]),
    ("stop_token_ids", [-1]),
    ("ignore_eos", 1),
    ("min_tokens", -1),
    ("min_tokens", 2.5),
    ("frequency_penalty", 2.01),
    ("presence_penalty", "0"),
    ("repetition_penalty", 0),
    ("repetition_penalty", True),
    ("logit_bias", {"98": 101}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"97": True}),
    ("logit_bias", [97]),
    ("stream", "yes"),
    ("stream_options", 1),
    ("stream_options", {"include_usage": "yes"}),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_a_bad_value_names_its_field(api: Api, field: str, value: object) -> None:
    for send in (api.chat, api.complete):
        response = send(**{field: value})
        message = assert_error(response, 400)
        assert response.json()["error"]["param"].startswith(field)
        assert field in message
    assert api.complete().status_code == 200


UNSUPPORTED = [
    ("length_penalty", True),
    ("suffix", "end"),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED)
def test_a_field_that_would_change_the_output_is_refused_not_ignored(api: Api, field: str, value: object) -> None:
    for send in (api.chat, api.complete):
        assert "not supported" in assert_error(send(**{field: value}), 400, param=field, code="unsupported_field")


def test_fields_that_ask_for_nothing_are_accepted(api: Api) -> None:
    nothing = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "min_tokens": 0,
        "best_of": 2,
        "n": 2,
        "echo": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "suffix": None,
        "seed": None,
        "stop": None,
        "temperature": None,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "stream_options": {"include_usage": True},
    }
    assert api.chat(**nothing).status_code == 200
    assert api.complete(**nothing).status_code == 200


def test_an_unknown_field_is_refused_with_the_nearest_name(api: Api) -> None:
    assert "did you mean 'temperature'" in assert_error(api.chat(temprature=1), 400, param="temprature")
    assert "did you mean 'max_completion_tokens'" in assert_error(api.chat(max_completion_token=1), 400)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "Hi",
        ["Hi"],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": "robot", "content": "Hi"}],
        [{"role": "tool", "content": "Hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": "Hi", "tool_calls": [{}]}],
        [{"role": "user", "content": "forbidden"}],
    ],
)
def test_bad_messages_are_a_400(api: Api, messages: object) -> None:
    assert_error(api.chat(messages=messages), 400, param="messages")


def test_missing_messages_and_prompt_are_named(api: Api) -> None:
    assert "messages is required" in assert_error(api.post("/v1/chat/completions", {}), 400, param="messages")
    assert "prompt is required" in assert_error(api.post("/v1/completions", {}), 400, param="prompt")


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], ["a", ""], None, 5, [1.5], [True], [-1], ["a", [1]], [[1], []], [[1], "a"], [999], {}],
)
def test_an_empty_or_misshapen_prompt_is_a_400(api: Api, prompt: object) -> None:
    assert_error(api.complete(prompt=prompt), 400, param="prompt")
    assert_error(api.complete(prompt=prompt, stream=True), 400, param="prompt")
    assert api.complete().status_code == 200
    assert api.engine.running == {}


def test_an_empty_prompt_within_a_batch_is_named(api: Api) -> None:
    assert "prompt[1]" in assert_error(api.complete(prompt=["a", ""]), 400, param="prompt")
    assert "prompt[0]" in assert_error(api.complete(prompt=[[], [1]]), 400, param="prompt")


def test_one_bad_prompt_of_a_batch_aborts_the_others(api: Api) -> None:
    assert_error(api.complete(prompt=[[1], [2], [999]]), 400)
    assert len(api.engine.aborted) == 2 and api.engine.running == {} and api.lifecycle.active == set()


def test_a_prompt_longer_than_the_context_is_a_400(api: Api) -> None:
    message = assert_error(api.complete(prompt="a" * 600), 400, code="context_length_exceeded")
    assert "600" in message and "512" in message
    assert_error(api.complete(prompt="a" * 20000), 400, code="context_length_exceeded")  # tokenized in a thread


def test_contradicting_limits_are_a_400(api: Api) -> None:
    assert_error(api.chat(max_tokens=3, max_completion_tokens=4), 400, param="max_tokens")
    assert api.chat(max_tokens=3, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert_error(api.chat(max_completion_tokens=0), 400, param="max_completion_tokens")


def test_top_logprobs_need_logprobs(api: Api) -> None:
    assert_error(api.chat(top_logprobs=3), 400, param="top_logprobs")
    assert_error(api.chat(logprobs=True, top_logprobs=21), 400, param="top_logprobs")
    assert_error(api.complete(logprobs=True), 400, param="logprobs")
    assert_error(api.complete(logprobs=21), 400, param="logprobs")


def test_another_model_is_a_404(api: Api) -> None:
    for send in (api.chat, api.complete):
        assert "'scripted'" in assert_error(send(model="gpt-4"), 404, param="model", code="model_not_found")
        assert send(model="scripted").status_code == send(model="default").status_code == send().status_code == 200


def test_unknown_paths_and_methods_have_the_error_shape(api: Api) -> None:
    assert_error(api.get("/v1/nope"), 404)
    assert_error(api.post("/v1/completions/", {}), 404)
    response = api.get("/v1/completions")
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_body_over_the_limit_is_a_413() -> None:
    api = Api(ScriptedEngine(), max_body_bytes=100)
    assert "--max-body-bytes" in assert_error(api.complete(prompt="a" * 100), 413)
    assert api.complete().status_code == 200


def test_a_full_engine_is_a_503_with_retry_after() -> None:
    api = Api(ScriptedEngine(refuse=CapacityError("2048 requests wait already", retry_after_s=7), refuse_from=2))
    response = api.complete(prompt=["a", "b", "c"])
    assert_error(response, 503, code="server_overloaded")
    assert response.headers["retry-after"] == "7"
    assert api.engine.running == {} and len(api.engine.aborted) == 2
    assert_error(Api(ScriptedEngine(refuse=CapacityError("slow down", status=429))).chat(), 429)


def test_an_unexpected_error_is_a_500_that_keeps_its_secrets() -> None:
    response = Api(ScriptedEngine(refuse=RuntimeError("secret path"))).chat()
    assert "secret" not in assert_error(response, 500)
    assert response.headers["x-request-id"]


def test_no_charset_or_content_type_is_needed(api: Api) -> None:
    body = json.dumps(CHAT).encode()
    assert api.post("/v1/chat/completions", body, headers={"content-type": "text/plain"}).status_code == 200
