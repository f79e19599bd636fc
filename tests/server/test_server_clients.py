"""The official client and LangChain against a real server process with a tiny model."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from live_server import HERE, ROOT
from tiny import CHAT_TEMPLATE, write_tiny

openai = pytest.importorskip("openai")

WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + CHAT_TEMPLATE
FLAGS = ["--tool-call-parser", "hermes", "--is-embedding", "--api-key", "secret", "--log-format", "json"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
]
# The model is random: it may end at any token, or go on with white space for ever.
NO_END = {"ignore_eos": True}
COMPACT: Any = {"x-guidance": {"whitespace_flexible": False}}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), chat_template=WITH_TOOLS)
    child = subprocess.Popen(
        [sys.executable, str(HERE / "serve_tiny.py"), str(folder), *FLAGS],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        found = next((m[1] for line in child.stdout if (m := re.search(r"at (http://\S+/v1)$", line))), None)
        assert found is not None, "the server did not become ready"
        yield found
    finally:
        child.terminate()
        child.communicate(timeout=20)


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="secret", max_retries=0)


def test_chat_and_stream_say_the_same(client: Any) -> None:
    fields: Any = {"model": "default", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    answer = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields))
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert content == answer.choices[0].message.content
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.completion_tokens == 12 and answer.choices[0].finish_reason == "length"


def test_the_shape_of_a_stream_as_the_client_reads_it(client: Any) -> None:
    """O-16."""
    for include in (True, False, None):
        options = {} if include is None else {"stream_options": {"include_usage": include}}
        chunks = list(
            client.chat.completions.create(
                model="default", messages=MESSAGES, n=2, stream=True, max_tokens=4, extra_body=NO_END, **options
            )
        )
        assert len({(c.id, c.object, c.created, c.model) for c in chunks}) == 1
        if include:
            last = chunks.pop()
            assert last.choices == [] and last.usage.completion_tokens == 8
        for index in (0, 1):
            mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
            assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
            assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert all(chunk.usage is None for chunk in chunks)


def test_n_logprobs_and_completions(client: Any) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=MESSAGES,
        n=3,
        logprobs=True,
        top_logprobs=2,
        max_tokens=5,
        temperature=1.5,
        seed=1,
        extra_body=NO_END,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 5
        assert all(len(entry.top_logprobs) == 2 and entry.bytes for entry in choice.logprobs.content)
    completion = client.completions.create(
        model="default", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=2, temperature=0
    )
    assert [choice.text[0] for choice in completion.choices] == ["a", "b"]
    assert completion.choices[0].logprobs.token_logprobs[0] is None


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: Any, stream: bool) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        fields: Any = {
            "model": "default", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 99,
            "seed": 4, "parallel_tool_calls": False,
        }  # fmt: skip
        if stream:
            with client.chat.completions.stream(stream_options={"include_usage": True}, **fields) as events:
                completion = events.get_final_completion()
        else:
            completion = client.chat.completions.create(**fields)
        [answer] = completion.choices
        assert answer.finish_reason == "tool_calls"
        call = answer.message.tool_calls[0]
        assert call.function.name == "weather" and call.id
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        history = [*MESSAGES, answer.message.model_dump(exclude_none=True), result]
        for message in history:
            message.pop("parsed", None)
        again = client.chat.completions.create(model="default", messages=history, tools=TOOLS, max_tokens=2)
        assert again.usage.prompt_tokens > completion.usage.prompt_tokens


def test_json_schema_parsed_into_a_model(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(json_schema_extra=COMPACT)
        ok: bool
        size: int = pydantic.Field(ge=0, le=99)

    completion = client.chat.completions.parse(
        model="default", messages=MESSAGES, response_format=Answer, max_tokens=200, temperature=0.8, seed=2
    )
    assert isinstance(completion.choices[0].message.parsed, Answer)


def test_embeddings(client: Any) -> None:
    texts = ["Hello there.", "x" * 200, "Hello there."]
    found = client.embeddings.create(model="default", input=texts)  # the client asks for base64
    vectors = np.array([entry.embedding for entry in found.data])
    assert vectors.shape == (3, 64) and [entry.index for entry in found.data] == [0, 1, 2]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-6)
    assert abs(float(vectors[0] @ vectors[1])) < 0.99
    as_floats = client.embeddings.create(model="default", input=texts[0], encoding_format="float", dimensions=64)
    np.testing.assert_allclose(as_floats.data[0].embedding, vectors[0], atol=1e-6)
    raw = client.embeddings.with_raw_response.create(model="default", input=[72, 105], encoding_format="base64")
    body = json.loads(raw.text)
    assert len(base64.b64decode(body["data"][0]["embedding"])) == 4 * 64
    assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    many = client.embeddings.create(model="default", input=["a", "b"] * 20)
    assert len(many.data) == 40
    for bad in ({"input": []}, {"input": ""}, {"input": "a", "dimensions": 8}, {"input": "a" * 600}):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="default", **bad)


def test_errors_are_typed(client: Any, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    answer = client.with_options(default_headers={"x-request-id": "mine"}).chat.completions.create(
        model="default", messages=MESSAGES, max_tokens=1
    )
    assert answer._request_id == "mine"


def test_langchain_chats_streams_calls_and_embeds(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install -e '.[clients]'")
    settings: Any = {"model": "default", "base_url": url, "api_key": "secret", "max_retries": 0}
    chat = langchain.ChatOpenAI(temperature=0, max_tokens=12, **settings)
    answer = chat.invoke("Hi")
    assert "".join(chunk.content for chunk in chat.stream("Hi")) == answer.content
    assert answer.usage_metadata["output_tokens"] == 12
    with_tools = langchain.ChatOpenAI(temperature=0, max_tokens=120, **settings).bind_tools(
        TOOLS, tool_choice="weather"
    )
    message = with_tools.invoke("Weather?")
    [call] = message.tool_calls
    assert call["name"] == "weather" and set(call["args"]) == {"city", "days"}
    from langchain_core.messages import HumanMessage, ToolMessage

    history = [HumanMessage("Weather?"), message, ToolMessage("Rain.", tool_call_id=call["id"])]
    assert chat.invoke(history).usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
    structured = langchain.ChatOpenAI(max_tokens=120, **settings).with_structured_output(
        {"title": "weather", **PARAMETERS, **COMPACT}, method="json_schema"
    )
    assert set(structured.invoke("Weather?")) == {"city", "days"}
    embedder = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **settings)
    assert len(embedder.embed_query("Hi")) == 64 and len(embedder.embed_documents(["a", "b"])) == 2
