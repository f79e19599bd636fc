"""The blocking Python interface."""

from __future__ import annotations

import concurrent.futures

import pytest
from rig import SETTINGS, check_idle, greedy, prompt_of
from tiny import write_tiny

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.llm import LLM
from jaxserve.runner.launch import Launch


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(str(tiny), **{**SETTINGS, "max_queued_requests": 2}) as llm:
        yield llm
        check_idle(llm.engine)


def test_every_form_of_prompt(llm, oracle):
    text, ids = "prompt", list(b"prompt")
    right = oracle(ids, 5)
    for prompt in (text, ids, tuple(ids), {"prompt": text}, {"prompt": ids}, {"prompt_token_ids": ids}):
        (output,) = llm.generate(prompt, greedy(5))
        assert output.outputs[0].token_ids == right and output.prompt_token_ids == ids and output.finished
        assert output.prompt == (text if prompt in (text, {"prompt": text}) else None)
    many = llm.generate([text, ids, {"prompt_token_ids": ids, "prompt": "label"}, {"prompt": text}], greedy(5))
    assert [o.outputs[0].token_ids for o in many] == [right] * 4
    assert [o.prompt for o in many] == [text, None, "label", text]
    assert llm.generate([]) == [] and llm.generate([], []) == []


@pytest.mark.parametrize(
    "prompts",
    ["", [""], [[]], [[], [1]], ["a", ""], [1, "a"], ["a", 1], None, 5, {}, [{}], {"prompt_token_ids": "ab"},
     {"prompt_token_ids": 5}, [[1.0]], [[True]], [[260]], [None]],
    ids=str,
)  # fmt: skip
def test_bad_prompts_are_refused_before_anything_runs(llm, prompts):
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, greedy(2))
    check_idle(llm.engine)


def test_one_parameter_set_or_one_per_prompt(llm, oracle):
    outputs = llm.generate([[1], [2]], [greedy(2), greedy(4)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 4]
    for params in ([greedy(2)], [greedy(2)] * 3, "hot", [1, 2], {"max_tokens": 3}):
        with pytest.raises(InvalidRequest):
            llm.generate([[1], [2]], params)


def test_salts_reach_the_cache_by_every_way_in(llm):
    prompt, conversation = prompt_of(20, seed=5), [{"role": "user", "content": "a new conversation"}]

    def streamed(deltas) -> int:
        return next(d.cached_tokens for d in deltas if d.finish_reason)

    ways = {
        "generate": lambda salt: llm.generate(prompt, greedy(3), cache_salt=salt)[0].num_cached_tokens,
        "stream": lambda salt: streamed(llm.stream(prompt, greedy(3), cache_salt=salt)),
        "chat": lambda salt: llm.chat(conversation, greedy(3), cache_salt=salt)[0].num_cached_tokens,
        "chat_stream": lambda salt: streamed(llm.chat_stream(conversation, greedy(3), cache_salt=salt)),
    }
    for name, cached in ways.items():
        found = [cached(salt) for salt in ("a", "a", "b", None, None)]
        assert [tokens > 0 for tokens in found] == [False, True, False, False, True], name
        llm.engine.flush_cache()
    outputs = llm.generate([prompt, prompt], greedy(3), cache_salt=["a", None])
    outputs += llm.generate([prompt] * 3, greedy(3), cache_salt=["b", None, "a"])
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 16, 16]


def test_prompts_are_served_in_order_of_priority(tiny):
    """Those that wait for room in the queue, too; the outputs come in the order of the prompts."""
    with LLM(str(tiny), **{**SETTINGS, "max_queued_requests": 2, "schedule_policy": "priority"}) as llm:
        ended, finish = [], llm.engine.scheduler.finish

        def recorded(sequence, reason):
            ended.append(sequence.request.priority)
            finish(sequence, reason)

        llm.engine.scheduler.finish = recorded
        prompts = [prompt_of(6, seed) for seed in range(9)]
        outputs = llm.generate(prompts, greedy(3), priority=[3, 1, -4, 0, 1, 5, -6, -5, 5])
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert ended == [-6, -5, -4, 0, 1, 1, 3, 5, 5]
        for call in (llm.chat, llm.chat_stream, llm.stream):
            list(call(prompts[0] if call == llm.stream else [{"role": "user", "content": "x"}], greedy(1), priority=7))
        assert ended[9:] == [7] * 3


def test_a_salt_or_priority_that_would_be_ignored_is_refused(llm):
    for wrong in ({"priority": 1}, {"priority": "high"}, {"priority": [0, 0]}, {"cache_salt": ""}, {"cache_salt": 5},
                  {"cache_salt": []}, {"cache_salt": ["a", "b"]}):  # fmt: skip
        for call in (llm.generate, llm.stream):
            with pytest.raises(InvalidRequest, match=next(iter(wrong))):
                call([1, 2], greedy(2), **wrong)
    with pytest.raises(InvalidRequest, match="cache_salt are arguments"):
        llm.generate({"prompt": "a", "cache_salt": "b"}, greedy(2))


def test_more_prompts_than_the_queue_holds(llm, oracle):
    prompts = [prompt_of(length) for length in range(1, 20)]
    outputs = llm.generate(prompts, greedy(3))
    assert [o.outputs[0].token_ids for o in outputs] == [oracle(p, 3) for p in prompts]
    several = llm.generate([prompts[4]] * 5, greedy(3, n=6))  # as many as slots and queue together
    assert all(o.token_ids == oracle(prompts[4], 3) for request in several for o in request.outputs)
    assert [o.index for o in several[0].outputs] == list(range(6))
    with pytest.raises(InvalidRequest, match="n is 7"):
        llm.generate([prompts[4]], greedy(3, n=7))


def test_default_length_fits_itself_into_the_context(llm):
    """Parameters that are not given give way near the end of the context; given ones are refused."""
    for length, count in ((100, 16), (112, 16), (120, 8), (127, 1)):
        (output,) = llm.generate([prompt_of(length)])
        (same,) = [sum(len(d.token_ids) for d in llm.stream(prompt_of(length)))]
        assert len(output.outputs[0].token_ids) <= count and same <= count
        if output.outputs[0].finish_reason == "length":
            assert len(output.outputs[0].token_ids) == count
    with pytest.raises(InvalidRequest, match="128 tokens and asks for 1 more"):
        llm.generate([prompt_of(128)])
    with pytest.raises(InvalidRequest, match="asks for 16 more"):
        llm.generate([prompt_of(120)], SamplingParams())
    with pytest.raises(InvalidRequest, match="asks for 16 more"):
        llm.stream(prompt_of(120), SamplingParams())


def test_a_failure_is_reported_on_the_output(llm, monkeypatch, oracle):
    def broken(self):
        monkeypatch.undo()
        raise RuntimeError("planted failure")

    monkeypatch.setattr(Launch, "collect", broken)
    (failed,) = llm.generate([[1, 2, 3]], greedy(3))
    assert failed.finished
    assert failed.outputs[0].finish_reason == "error" and "planted failure" in failed.outputs[0].error
    (served,) = llm.generate([[1, 2, 3]], greedy(3))
    assert served.outputs[0].error is None and served.outputs[0].token_ids == oracle([1, 2, 3], 3)


def test_streams_and_calls_may_interleave(llm, oracle):
    """A stream that is read slowly holds nobody up, and closing one aborts its request only."""
    one = llm.stream(prompt_of(5), greedy(20))
    other = llm.stream(prompt_of(6), greedy(20))
    tokens = list(next(one).token_ids)
    abandoned = llm.stream(prompt_of(7), greedy(100))
    next(abandoned)
    assert llm.generate([prompt_of(8)], greedy(6))[0].outputs[0].token_ids == oracle(prompt_of(8), 6)
    abandoned.close()
    assert [t for d in other for t in d.token_ids] == oracle(prompt_of(6), 20)
    assert tokens + [t for d in one for t in d.token_ids] == oracle(prompt_of(5), 20)
    check_idle(llm.engine)
    assert not llm._inboxes and not llm.engine.has_work


def test_a_call_leaves_the_engine_idle(llm, oracle):
    """Where a stop id ends the last output, one more step is already in flight."""
    right = oracle(prompt_of(9), 6)
    (output,) = llm.generate([prompt_of(9)], greedy(50, stop_token_ids=(right[3],)))
    assert output.outputs[0].token_ids == right[: right.index(right[3]) + 1]
    assert not llm.engine.has_work


def test_threads_share_an_engine(llm, oracle):
    def ask(length: int) -> list[int]:
        return llm.generate([prompt_of(length)], greedy(8))[0].outputs[0].token_ids

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, range(1, 13)))
    assert answers == [oracle(prompt_of(length), 8) for length in range(1, 13)]


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch, oracle):
    steps = []
    real = llm.engine.step

    def interrupted():
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt_of(5)] * 9, greedy(50))
    monkeypatch.undo()
    check_idle(llm.engine)
    assert llm.generate([prompt_of(5)], greedy(3))[0].outputs[0].token_ids == oracle(prompt_of(5), 3)


def test_chat(llm, oracle):
    conversation = [{"role": "user", "content": "hi"}]
    ids = llm.engine.encode_chat(conversation)
    assert ids.count(256) == 1
    (one,) = llm.chat(conversation, greedy(4))
    two = llm.chat([conversation, conversation], greedy(4))
    assert [o.outputs[0].token_ids for o in (one, *two)] == [oracle(ids, 4)] * 3
    assert [t for d in llm.chat_stream(conversation, greedy(4)) for t in d.token_ids] == oracle(ids, 4)


def test_tools_get_the_template_that_was_made_for_them(tmp_path):
    path = write_tiny(tmp_path, chat_template="{{ messages[0].content }}")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    tool = {"type": "function", "function": {"name": "f"}}
    with LLM(str(path), **SETTINGS) as llm:

        def prompt(**template) -> bytes:
            (output,) = llm.chat([{"role": "user", "content": "Hi"}], greedy(1), **template)
            return bytes(output.prompt_token_ids)

        assert prompt() == b"Hi" and prompt(tools=[tool]) == b"1 tools"
        assert prompt(tools=[tool], template="{{ tools[0].function.name }}") == b"f"
