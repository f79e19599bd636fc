"""Random requests: no 500s, and every error has the OpenAI shape.

``JAXSERVE_FUZZ_SECONDS`` says how long each of the two tests takes; ``make fuzz`` takes a minute each.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from real_server import Served, serving
from tiny import write_tiny

from jaxserve.server.openapi import BODIES
from jaxserve.server.settings import ServerSettings

LEAST = 150  # requests
SECONDS = float(os.environ.get("JAXSERVE_FUZZ_SECONDS", "5"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = ServerSettings(port=0, tool_call_parser="hermes", reasoning_parser="qwen3", embedding_pooling="mean")
    with serving(str(write_tiny(tmp_path_factory.mktemp("tiny"))), settings, context_length=64) as served:
        yield served


def check(status: int, answer: Any, request: str) -> None:
    assert status < 500, (answer, request)
    if status >= 400:
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, request
        assert isinstance(answer["error"]["message"], str) and answer["error"]["message"], request


# What each endpoint answers, and values that some field somewhere may not expect.
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/embeddings": {"input": "Hi"},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
    "/abort_request": {"rid": "x"},
}
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 63, 300, 2**31, 2**63, 2**70, -0.5, 0.5, 1e-300, 1e300, "", "x", "\x00", "é" * 70,
    "auto", "required", [], [1], [""], ["x"], [[1]], [None], [{}], {}, {"a": 1}, {"1": 5}, {"type": "json_object"},
    {"type": "function", "function": {"name": "f"}}, [TOOL], [TOOL, TOOL], {"regex": "a("}, {"json": {"type": 5}},
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
]  # fmt: skip


def test_valid_requests_with_wrong_fields_are_answered_or_refused(served: Served) -> None:
    choose = random.Random(7)
    deadline = time.monotonic() + SECONDS
    seen: Counter[int] = Counter()
    while time.monotonic() < deadline or seen.total() < LEAST:  # a busy machine takes longer
        path = choose.choice(list(VALID))
        body = json.loads(json.dumps(VALID[path]))
        names = [name for name in BODIES[path].known_fields() if name != "stream"]
        for name in choose.sample(names, min(len(names), choose.choice((0, 1, 1, 2, 4)))):
            body[name] = choose.choice(VALUES)
        if choose.random() < 0.1 and "sampling_params" in body and isinstance(body["sampling_params"], dict):
            body["sampling_params"][choose.choice(["n", "temperature", "stop", "regex", "x"])] = choose.choice(VALUES)
        raw = json.dumps(body).encode()
        status, answer = served.post_raw(path, raw)
        check(status, answer, f"{path} {raw.decode()}")
        seen[status] += 1
    assert seen[200] > 20 and seen[400] > 20, seen


def test_requests_that_the_schema_allows_are_answered_or_refused(served: Served) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="pip install -e '.[clients]'")
    hypothesis = pytest.importorskip("hypothesis")
    schema = schemathesis.openapi.from_url(served.url + "/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    deadline = time.monotonic() + SECONDS
    seen: Counter[int] = Counter()

    def try_one(case: Any) -> None:
        if time.monotonic() < deadline:
            response = case.call(timeout=30)
            check(response.status_code, response.json() if response.status_code >= 400 else {}, case.as_curl_command())
            seen[response.status_code] += 1

    few = hypothesis.settings(
        max_examples=3, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    round_number = 0
    while time.monotonic() < deadline:
        for operation in operations:
            run = hypothesis.given(case=operation.as_strategy())(try_one)
            hypothesis.seed(round_number)(few(run))()
        round_number += 1
    assert seen, "nothing was tried"
