"""What responses tell of speculation: ``usage`` and ``meta_info``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from api_client import Api, events
from scripted_engine import ScriptedEngine

from jaxserve.core.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine

LIMIT = 5  # tokens per output: with the last one, four rows of three drafts, one of which held


def details(num_outputs: int, num_tokens: int = LIMIT) -> dict[str, int]:
    rows = num_outputs * (num_tokens - 1)
    return {"accepted_prediction_tokens": rows, "rejected_prediction_tokens": 2 * rows}


@pytest.fixture
def api() -> Api:
    return Api(ScriptedEngine(speculates=True))


@pytest.mark.parametrize("n", [1, 2])
def test_usage_tells_of_drafts(api: Api, n: int) -> None:
    for response in (api.chat(max_tokens=LIMIT, n=n), api.complete(max_tokens=LIMIT, n=n)):
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == n * LIMIT and usage["completion_tokens_details"] == details(n)
    two_prompts = api.complete(prompt=["Hi", "Ho"], max_tokens=LIMIT, n=n).json()["usage"]
    assert two_prompts["completion_tokens_details"] == details(2 * n)


@pytest.mark.parametrize("n", [1, 2])
def test_a_streams_usage_tells_of_drafts(api: Api, n: int) -> None:
    fields: dict[str, Any] = {"stream": True, "max_tokens": LIMIT, "n": n}
    for call in (api.chat, api.complete):
        *chunks, last, done = events(call(**fields, stream_options={"include_usage": True}))
        assert done == "[DONE]" and last["usage"]["completion_tokens_details"] == details(n)
        assert all(chunk["usage"] is None for chunk in chunks)
        *chunks, done = events(call(**fields, stream_options={"continuous_usage_stats": True}))
        told = [chunk["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] for chunk in chunks]
        assert told[0] == 0 and told == sorted(told) and told[-1] == details(n)["rejected_prediction_tokens"]


def test_meta_info_tells_of_drafts_per_output(api: Api) -> None:
    wanted = {
        "spec_verify_ct": 4, "spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 12,
        "spec_accept_rate": 1 / 3, "spec_accept_length": 2.0, "spec_correct_drafts_histogram": [0, 4],
    }  # fmt: skip
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": LIMIT, "n": 2}}
    answers = api.post("/generate", body).json()
    assert len(answers) == 2 and all(wanted.items() <= answer["meta_info"].items() for answer in answers)
    *frames, done = events(api.post("/generate", body | {"stream": True}))
    assert done == "[DONE]" and frames[0]["meta_info"]["spec_verify_ct"] == 0
    assert all(wanted.items() <= frame["meta_info"].items() for frame in frames[-2:])


def test_nothing_is_told_without_speculation() -> None:
    api = Api(ScriptedEngine())
    assert "completion_tokens_details" not in api.chat().json()["usage"]
    assert not any("spec" in key for key in api.post("/generate", {"text": "Hi"}).json()["meta_info"])


@pytest.fixture
def served(tmp_path) -> Iterator[Api]:
    from tiny import write_tiny

    config = EngineConfig(
        model=str(write_tiny(tmp_path)), context_length=128, page_size=4, max_running_requests=2,
        chunked_prefill_size=16, prefill_token_buckets=(16,), decode_batch_buckets=(2,), skip_warmup=True,
        speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, speculative_adaptive=False,
        speculative_ngram_capacity=10_000, compilation_cache_dir="",
    )  # fmt: skip
    engine = AsyncEngine.from_config(config)
    asyncio.run(engine.start())
    yield Api(engine)
    asyncio.run(engine.stop())


def test_ngram_repeats_what_it_has_answered_and_says_so(served: Api) -> None:
    fields = {"prompt": "figures of a served request", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    first = served.complete(**fields).json()
    again = served.complete(**fields).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    counted = again["usage"]["completion_tokens_details"]
    assert counted["accepted_prediction_tokens"] >= 15 and counted["rejected_prediction_tokens"] <= 3
    *_, last, _ = events(served.complete(**fields, stream=True, stream_options={"include_usage": True}))
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 15
    both = served.complete(**fields, n=2).json()["usage"]["completion_tokens_details"]
    assert both["accepted_prediction_tokens"] >= 30
    state = served.get("/get_server_info").json()["state"]
    assert {"algorithm": "NGRAM", "num_draft_tokens": 4, "adaptive": False, "fence": "coarse:ngram"}.items() <= (
        state["speculation"].items()
    )
    assert state["shared_reads"]["TARGET_VERIFY"]["fence"] == "coarse:ngram"
    assert state["shared_reads"]["DECODE"]["fence"] == "fine:marker"
    metrics = served.get("/metrics").text
    assert 'jaxserve:spec_decode_num_accepted_tokens_per_pos_total{model_name="' in metrics
    assert "jaxserve:spec_accept_length{" in metrics


def test_token_details_say_which_tokens_were_accepted_drafts(served: Api) -> None:
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": True, "return_token_details": True}
    served.chat(**fields)
    whole = served.chat(**fields).json()
    (choice,) = whole["choices"]
    details = choice["token_details"]
    accepted = whole["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert len(details) == 24 and sum(each["accepted_draft"] for each in details) == accepted > 10
    assert [each["token"] for each in details] == [each["token"] for each in choice["logprobs"]["content"]]
    chunks = [chunk["choices"][0] for chunk in events(served.chat(**fields, stream=True))[:-1]]
    assert [each for chunk in chunks for each in chunk.get("token_details", [])] == details
    for chunk in chunks:  # in step with the logprobs of the same chunk
        told = (chunk["logprobs"] or {"content": []})["content"]
        assert len(told) == len(chunk.get("token_details", []))
    assert "token_details" not in served.chat(max_tokens=4).json()["choices"][0]
