"""Text completions: batches, choices, limits, streams, log-probabilities."""

from __future__ import annotations

from itertools import pairwise

import pytest
from api_client import Api, assert_error, events
from scripted_engine import ScriptedEngine

from jaxserve.core.sampling_params import SamplingParams


def test_choice_i_continues_prompt_i_over_n() -> None:
    body = Api(ScriptedEngine()).complete(prompt=["AAA", "BBB", "CCC"], n=2, max_tokens=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert body["object"] == "text_completion" and body["model"] == "scripted"
    assert body["usage"] == {"prompt_tokens": 9, "completion_tokens": 18, "total_tokens": 27}


def test_each_choice_belongs_to_its_own_prompt() -> None:
    class Echoing(ScriptedEngine):
        def generate(self, prompt, params, request_id=None):
            self.script = self.tokenizer.decode(prompt)
            steps = super().generate(prompt, params, request_id)
            return _with_script(self, self.script, steps)

    async def _with_script(engine, script, steps):
        engine.script = script
        async for delta in steps:
            yield delta
            engine.script = script

    body = Api(Echoing()).complete(prompt=["aaa", "bb", "c"], n=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["aaa", "aaa", "bb", "bb", "c", "c"]


def test_a_streamed_batch_has_one_finish_per_choice_and_one_done() -> None:
    fields = {"prompt": ["AAA", "BBB", "CCC"], "n": 2, "max_tokens": 3}
    api = Api(ScriptedEngine())
    *chunks, done = events(api.complete(stream=True, **fields))
    assert done == "[DONE]" and "[DONE]" not in chunks
    finishes = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"] is not None]
    assert sorted(finishes) == [0, 1, 2, 3, 4, 5]
    for choice in api.complete(**fields).json()["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert api.engine.running == {} and api.engine.aborted == []


@pytest.mark.parametrize("prompt", ["AB", ["AB"], [65, 66], [[65, 66]]])
def test_a_prompt_may_be_text_or_token_ids(prompt: object) -> None:
    assert Api(ScriptedEngine()).complete(prompt=prompt).json()["usage"]["prompt_tokens"] == 2


def test_max_tokens_one_gives_one_token_and_the_default_is_sixteen() -> None:
    api = Api(ScriptedEngine(script="x" * 40))
    one = api.complete(max_tokens=1).json()
    assert one["choices"][0]["text"] == "x" and one["choices"][0]["finish_reason"] == "length"
    assert api.complete().json()["usage"]["completion_tokens"] == 16


def test_near_the_end_of_the_context_a_default_limit_shrinks_and_a_given_one_is_refused() -> None:
    api = Api(ScriptedEngine(script="x" * 40, context_length=64))
    body = api.complete(prompt=["a" * 60, "a" * 10]).json()
    assert [len(choice["text"]) for choice in body["choices"]] == [4, 16]
    assert body["choices"][0]["finish_reason"] == "length"
    assert_error(api.complete(prompt="a" * 60, max_tokens=10), 400, code="context_length_exceeded")
    assert_error(api.complete(prompt="a" * 64), 400, code="context_length_exceeded")
    assert api.complete(prompt="a" * 63, max_tokens=1).json()["usage"]["completion_tokens"] == 1
    generated = api.post("/generate", {"text": "a" * 60}).json()
    assert generated["meta_info"]["completion_tokens"] == 4


def test_a_character_of_several_tokens_arrives_whole() -> None:
    api = Api(ScriptedEngine(script="A 世ab 🌶é한"))
    *chunks, _ = events(api.complete(stream=True, max_tokens=100))
    assert (
        "".join(c["choices"][0]["text"] for c in chunks)
        == "A 世ab 🌶é한"
        == api.complete(max_tokens=100).json()["choices"][0]["text"]
    )


def test_usage_in_a_stream_comes_last_and_only_when_asked_for() -> None:
    api = Api(ScriptedEngine())
    assert all("usage" not in chunk for chunk in events(api.complete(stream=True))[:-1])
    *chunks, last, done = events(api.complete(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"] == api.complete().json()["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


def test_continuous_usage_grows_by_the_tokens_of_each_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = events(Api(ScriptedEngine()).complete(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 4, 5, 6] and last["usage"]["completion_tokens"] == 6


def test_logprobs_have_one_entry_per_token_and_running_offsets() -> None:
    api = Api(ScriptedEngine(script="a世b"))
    logprobs = api.complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xe4", "bytes:\\xb8", "bytes:\\x96", "b", "</s>"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5] * 6
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    *chunks, _ = events(api.complete(logprobs=2, stream=True))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for key in logprobs:
        assert [entry for part in streamed for entry in part[key]] == logprobs[key]


def test_top_logprobs_fall_and_infinity_becomes_the_floor() -> None:
    body = Api(ScriptedEngine()).complete(logprobs=5, max_tokens=2)
    for top in body.json()["choices"][0]["logprobs"]["top_logprobs"]:
        assert all(a >= b for a, b in pairwise(top.values())) and min(top.values()) == -9999.0
    assert "Infinity" not in body.text and "NaN" not in body.text


def test_generate_speaks_sglang() -> None:
    api = Api(ScriptedEngine())
    one = api.post("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}).json()
    assert one["text"] == "Hel" and one["meta_info"]["finish_reason"] == {"type": "length"}
    assert one["meta_info"]["prompt_tokens"] == 2 and one["meta_info"]["completion_tokens"] == 3
    several = api.post("/generate", {"input_ids": [[1], [2]], "sampling_params": {"n": 2}}).json()
    assert [entry["index"] for entry in several] == [0, 1, 2, 3]
    *frames, done = events(api.post("/generate", {"text": "Hi", "stream": True}))
    assert done == "[DONE]" and [f["text"] for f in frames][:3] == ["H", "He", "Hel"]
    for bad, param in (({"max_new_tokens": 0}, "max_new_tokens"), ({"regex": ""}, "regex"), ({"tmp": 1}, "tmp")):
        assert_error(api.post("/generate", {"text": "a", "sampling_params": bad}), 400, f"sampling_params.{param}")
    assert_error(api.post("/generate", {}), 400, param="text")


def test_what_changes_logits_reaches_the_engine() -> None:
    seen: list[SamplingParams] = []

    class Watched(ScriptedEngine):
        def generate(self, prompt, params, request_id=None):
            seen.append(params)
            return super().generate(prompt, params, request_id)

    api = Api(Watched())
    fields = {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"97": -3}}
    wanted = SamplingParams(max_tokens=8, min_tokens=2, **fields)
    assert api.complete(max_tokens=8, min_tokens=2, **fields).status_code == 200
    assert api.chat(max_tokens=8, min_tokens=2, **fields).status_code == 200
    params = {"max_new_tokens": 8, "min_new_tokens": 2, **fields}
    assert api.post("/generate", {"text": "a", "sampling_params": params}).status_code == 200
    assert seen == [wanted] * 3
