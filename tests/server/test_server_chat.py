"""Chat completions: shapes of answers and streams, log-probabilities, failures in mid-stream."""

from __future__ import annotations

import json

import pytest
from api_client import CHAT, Api, assert_error, events
from scripted_engine import ScriptedEngine


def test_an_answer_has_the_openai_shape() -> None:
    body = Api(ScriptedEngine()).chat().json()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 18, "completion_tokens": 6, "total_tokens": 24}


@pytest.mark.parametrize("include_usage", [True, False, None])
def test_the_shape_of_a_stream(include_usage: bool | None) -> None:
    """O-16."""
    api = Api(ScriptedEngine())
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    *chunks, done = events(api.chat(stream=True, n=2, **options))
    assert done == "[DONE]"
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"] == api.chat(n=2).json()["usage"]
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in mine[1:])
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello"


def test_an_engine_that_dies_in_mid_stream_gives_one_error_frame_and_no_done() -> None:
    """O-16."""
    engine = ScriptedEngine(fail_after=3)
    *chunks, last = events(Api(engine).chat(stream=True))
    assert len(chunks) == 4 and all("error" not in chunk for chunk in chunks)
    assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
    assert engine.running == {}


def test_an_unexpected_error_in_mid_stream_is_an_error_frame_too() -> None:
    class Breaking(ScriptedEngine):
        async def _steps(self, params, request_id):
            async for delta in super()._steps(params, request_id):
                yield delta
                raise OSError("disk on fire")

    *_, last = events(Api(Breaking()).chat(stream=True))
    assert last["error"]["code"] == "internal_error" and "disk" not in last["error"]["message"]


def test_an_output_that_fails_in_mid_stream_gives_one_error_frame() -> None:
    engine = ScriptedEngine(error_after=3)
    *chunks, last = events(Api(engine).chat(stream=True, n=2))
    assert "bad step" in last["error"]["message"] and all("choices" in chunk for chunk in chunks)
    assert engine.running == {}
    assert_error(Api(ScriptedEngine(error_after=3)).chat(), 500, code="generation_failed")


def test_a_failure_before_the_first_token_is_a_plain_http_error() -> None:
    assert_error(Api(ScriptedEngine(fail_after=0)).chat(stream=True), 503, code="engine_dead")
    assert_error(Api(ScriptedEngine(fail_after=0)).chat(), 503, code="engine_dead")


def test_logprobs_list_each_token_with_bytes_and_its_own_alternatives() -> None:
    api = Api(ScriptedEngine(script="a世"))
    content = api.chat(logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], [0xE4], [0xB8], [0x96], list(b"</s>")]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "b", "c"]
    assert [top["bytes"] for top in content[1]["top_logprobs"]] == [[0xE4], [0xE5], [0xE6]]
    *chunks, _ = events(api.chat(logprobs=True, top_logprobs=3, stream=True))
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert [entry for part in streamed if part for entry in part["content"]] == content


def test_logprobs_alone_or_with_zero_alternatives_list_none() -> None:
    api = Api(ScriptedEngine())
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        content = api.chat(**fields).json()["choices"][0]["logprobs"]["content"]
        assert len(content) == 6 and all(entry["top_logprobs"] == [] for entry in content)
    assert api.chat(logprobs=False).json()["choices"][0]["logprobs"] is None


def test_infinite_logprobs_become_the_floor() -> None:
    response = Api(ScriptedEngine()).chat(logprobs=True, top_logprobs=5, max_tokens=1)
    top = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [-0.5, -1.5, -2.5, -9999.0, -9999.0]


def test_text_parts_are_joined_and_developer_means_system() -> None:
    seen = []

    class Listening(ScriptedEngine):
        def encode_chat(self, messages, **options):
            seen.extend(messages)
            return super().encode_chat(messages, **options)

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    back = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}
    messages = [{"role": "developer", "content": "be brief"}, back, {"role": "user", "content": parts, "name": "me"}]
    assert Api(Listening()).chat(messages=messages).status_code == 200
    assert seen == [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "one\ntwo", "name": "me"},
    ]


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    api = Api(ScriptedEngine(script="x" * 100))
    assert api.chat().json()["usage"]["completion_tokens"] == 101


def test_the_openai_client_reads_answers_streams_and_errors() -> None:
    """O-16: it raises when a stream fails."""
    openai = pytest.importorskip("openai")
    from live_server import live

    with live(ScriptedEngine()) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        assert client.models.list().data[0].id == "scripted"
        answer = client.chat.completions.create(model="default", logprobs=True, top_logprobs=1, **CHAT)
        assert answer.choices[0].message.content == "Hello" and answer.usage.completion_tokens == 6
        stream = client.chat.completions.create(model="default", stream=True, **CHAT)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello"
        completion = client.completions.create(model="default", prompt=["a", "b"], n=2)
        assert [choice.text for choice in completion.choices] == ["Hello"] * 4
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="default", temperature=-1, **CHAT)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", **CHAT)
    with live(ScriptedEngine(fail_after=3)) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="scripted failure"):
            list(client.chat.completions.create(model="default", stream=True, **CHAT))
