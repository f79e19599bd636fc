"""The server in front of the real engine and a tiny checkpoint."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_client import CHAT
from live_server import connect, eventually, http_post
from real_server import Refused, Served, serving

CHECKPOINT = Path(__file__).parent.parent / "fixtures" / "gqa"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(str(CHECKPOINT)) as served:
        yield served


GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_says_the_same_as_an_answer(served: Served, path: str) -> None:
    fields = GREEDY | (CHAT if "chat" in path else {"prompt": "Hello"})
    whole = served.post(path, **fields)
    chunks = served.stream(path, **fields, stream_options={"include_usage": True})
    parts = [chunk["choices"][0] for chunk in chunks[:-1]]
    text = "".join(part["delta"].get("content", "") if "chat" in path else part["text"] for part in parts)
    choice = whole["choices"][0]
    assert text == (choice["message"]["content"] if "chat" in path else choice["text"])
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    usages = whole["usage"], chunks[-1]["usage"]
    cached = [usage.pop("prompt_tokens_details")["cached_tokens"] for usage in usages]
    assert cached[1] > 0 and cached[1] >= cached[0]  # the answer left its pages
    assert usages[0] == usages[1]


def test_a_batch_answers_each_prompt_as_it_does_alone(served: Served) -> None:
    prompts = ["AAA", "BBB", "CCC"]
    batch = served.post("/v1/completions", prompt=prompts, n=2, **GREEDY)
    alone = [served.post("/v1/completions", prompt=prompt, **GREEDY)["choices"][0]["text"] for prompt in prompts]
    assert [choice["text"] for choice in batch["choices"]] == [text for text in alone for _ in range(2)]
    assert batch["usage"]["prompt_tokens"] == sum(
        served.post("/tokenize", prompt=prompt)["count"] for prompt in prompts
    )


def test_every_token_has_its_logprob(served: Served) -> None:
    body = served.post("/v1/completions", prompt="Hello", logprobs=3, **GREEDY)
    logprobs = body["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == body["usage"]["completion_tokens"]
    for own, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert own == pytest.approx(max(top.values()))  # greedy takes the most likely one


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_priority_is_refused_where_nobody_looks(served: Served, path: str) -> None:
    """Policy fcfs: 0 asks for nothing, all else is an error that names the flag."""
    fields = CHAT if "chat" in path else {"text": "Hi"} if path == "/generate" else {"prompt": "Hi"}
    served.post(path, priority=0, **fields)
    for stream in (False, True):
        with pytest.raises(Refused, match="--schedule-policy priority") as refused:
            served.post(path, priority=-1, stream=stream, **fields)
        assert refused.value.status == 400 and refused.value.error["param"] == "priority"


def test_answers_follow_a_schema(served: Served) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    fields = CHAT | {"response_format": form, "temperature": 1, "seed": 3, "max_tokens": 60}
    message = served.post("/v1/chat/completions", **fields)["choices"][0]["message"]
    assert isinstance(json.loads(message["content"])["ok"], bool)
    chunks = served.stream("/v1/chat/completions", **fields)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == message["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_pages_back(served: Served, stream: bool) -> None:
    served.post("/v1/completions", prompt="Hello", **GREEDY)
    assert eventually(served.idle)
    body = {"prompt": "Hi", "max_tokens": 240, "ignore_eos": True, "n": 4, "stream": stream}
    for _ in range(5):
        with connect(served.port) as connection:
            connection.sendall(http_post("/v1/completions", json.dumps(body).encode()))
            assert eventually(lambda: served.engine.state()["running"] > 0, 10)
        assert eventually(served.idle)
    state = served.engine.state()
    assert state["pages_free"] + state["pages_evictable"] == state["pages_total"]


def test_metrics_hold_the_engines_and_the_servers(served: Served) -> None:
    served.post("/v1/completions", prompt="Hello", **GREEDY)
    with urllib.request.urlopen(served.url + "/metrics") as response:
        text = response.read().decode()
    assert "jaxserve:generation_tokens_total" in text and "jaxserve:http_requests_total" in text
    assert 'jaxserve:fences_total{kind="fine",' in text and "jaxserve:row_writes_held_up_seconds_bucket{" in text
    assert "jaxserve:program_graph_splits{" not in text  # not known on the CPU, which is not the same as 0


def test_server_info_tells_the_fence_in_use(served: Served) -> None:
    with urllib.request.urlopen(served.url + "/get_server_info") as response:
        state = json.load(response)["state"]
    assert state["shared_reads"] == {
        "EXTEND": {"declared": "UNKNOWN", "resolved": "UNKNOWN", "fence": "coarse:extend"},
        "DECODE": {"declared": "IN_REPLAY", "resolved": "IN_REPLAY", "fence": "fine:marker"},
    }
    assert state["graph_splits"] == "not known"
