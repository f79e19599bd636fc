"""What responses tell of speculation: ``usage`` and ``meta_info``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from api_client import Api, events
from live_server import eventually
from real_server import Refused, Served, serving
from scripted_engine import ScriptedEngine
from tiny import write_tiny

from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import init_draft, save_draft
from jaxserve.models.loading.weights import load_model

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


DRAFTERS: dict[str, dict[str, Any]] = {
    "NGRAM": {"speculative_adaptive": False, "speculative_ngram_capacity": 10_000},
    "EAGLE3": {"speculative_num_steps": 3, "speculative_adaptive": False},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def drafting(tiny: Path, algorithm: str | None, folder: Path) -> Iterator[Served]:
    """A server; EAGLE3 drafts quotes and commas alone, which an answer must go on with now and then."""
    settings = {"speculative_num_draft_tokens": 4, **DRAFTERS[algorithm]} if algorithm else {}
    if algorithm == "EAGLE3":
        target = load_model(open_checkpoint(tiny), jnp.float32)
        save_draft(folder / "head", init_draft("EAGLE3", target, jnp.float32, target_ids=list(b'",')))
        settings["speculative_draft_model_path"] = str(folder / "head")
    with serving(
        str(tiny), context_length=512, chunked_prefill_size=16, prefill_token_buckets=(16,),
        speculative_algorithm=algorithm, **settings,
    ) as served:  # fmt: skip
        yield served


@pytest.fixture(scope="module")
def ngram(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with drafting(tiny, "NGRAM", tmp_path_factory.mktemp("ngram")) as served:
        yield served


@pytest.fixture
def served(ngram: Served) -> Api:
    """The same engine, called within the process."""
    return Api(ngram.engine)


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


# -- O-18 --------------------------------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
WHOLE = '{"status":"ok","items":[1,2,3]}'
NUMBER = "-?(0|[1-9][0-9]*)"
FORM = re.compile(rf'\{{"status":"ok","items":\[{NUMBER},{NUMBER},{NUMBER}\]\}}')

SCHEMA = {
    "type": "object",
    "properties": {
        "status": {"enum": ["ok"]},
        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
    },
    "required": ["status", "items"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def chat(schema: dict[str, Any], content: str, max_tokens: int = 200) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    return {"messages": [{"role": "user", "content": content}], "response_format": form, "temperature": 0,
            "max_tokens": max_tokens}  # fmt: skip


def eight_at_once(served: Served) -> list[tuple[str, str]]:
    """Text and finish reason of eight answers, half of them cut off, twice: NGRAM has seen them the second time."""
    found = []
    for _ in range(2):
        with ThreadPoolExecutor(8) as threads:
            bodies = [chat(SCHEMA, f"{number}: {WHOLE} {WHOLE}", (200, 27)[number % 2]) for number in range(8)]
            answers = list(threads.map(lambda body: served.post(CHAT, **body), bodies))
        found += [
            (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) for answer in answers
        ]
    return found


@pytest.fixture(scope="module")
def plain_answers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Without speculation."""
    with drafting(tiny, None, tmp_path_factory.mktemp("plain")) as served:
        return eight_at_once(served)


def check_schemas(served: Served, wanted: list[tuple[str, str]]) -> None:
    found = eight_at_once(served)
    assert found == wanted and {reason for _, reason in found} == {"stop", "length"}
    for text, reason in found:
        if reason == "stop":
            assert FORM.fullmatch(text), text
        else:  # cut off: what is there can be completed
            assert reason == "length" and any(FORM.fullmatch(text + WHOLE[i:]) for i in range(len(WHOLE))), text
    for bad in ({"type": "nonsense"}, {"type": "object", "minProperties": 3, "maxProperties": 1}):
        with pytest.raises(Refused) as caught:
            served.post(CHAT, **chat(bad, "x"))
        assert caught.value.status == 400
    assert served.post("/v1/completions", prompt="ok", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    assert eventually(served.idle)
    state = served.engine.state()
    assert state["pages_free"] + state["pages_evictable"] == state["pages_total"]


def test_json_schemas_and_ngram(ngram: Served, plain_answers: list[tuple[str, str]]) -> None:
    """O-18: eight requests at once, with overlap, in a batch of four."""
    before = ngram.engine.state()["speculation"]["num_accepted"]
    check_schemas(ngram, plain_answers)
    assert ngram.engine.state()["speculation"]["num_accepted"] > before + 50


def test_json_schemas_and_a_draft_model(tiny: Path, plain_answers: list[tuple[str, str]], tmp_path: Path) -> None:
    """O-18 with EAGLE3: no mask fits what stands behind a draft, so none may hold, not even a right one."""
    with drafting(tiny, "EAGLE3", tmp_path) as served:
        check_schemas(served, plain_answers)
