"""Short prompts are read together, where that is cheaper, and mean the same as when they are read alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rig import add, greedy, make_engine, prompt_of, run

from jaxserve.core.config import EngineConfig
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.runner.buckets import make_buckets
from jaxserve.scheduler.prompt_groups import PromptGroups

GROUPED = {"chunked_prefill_size": 32, "prefill_token_buckets": (8, 32), "max_prefill_tokens": 64,
           "max_decode_gap_ms": 0.0}  # fmt: skip


def prompt_steps(engine):
    """A list to which every plan of a prompt step adds the ids of its requests."""
    steps, plan = [], engine.scheduler.planner.plan

    def recorded():
        batch = plan()
        if batch is not None and batch.mode is ForwardMode.EXTEND:
            steps.append([s.request.request_id for s in batch.owners])
        return batch

    engine.scheduler.planner.plan = recorded
    return steps


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {16: 8, 32: 8, 64: 4, 128: 2}),
        ({"max_prefill_tokens": 1024}, {16: 8, 32: 8, 64: 8, 128: 8, 256: 4}),
        ({"max_prefill_tokens": 100, "max_running_requests": 3}, {16: 2, 32: 2}),
        ({"max_prefill_tokens": 0}, {}),
        ({"max_running_requests": 1}, {}),
    ],
)
def test_one_program_for_each_size_with_the_rows_that_fit(settings, wanted):
    buckets = make_buckets(EngineConfig(**settings), 4096, width_buckets=False)
    assert buckets.prompt_rows == wanted
    extend = [size[1:3] for size in buckets.all_sizes() if size[0] is ForwardMode.EXTEND]
    assert extend == [*((1, tokens) for tokens in buckets.prefill_tokens), *((r, t) for t, r in wanted.items())]


def groups(left, most_tokens=256, alike=()):
    """Whom a prompt with ``left[0]`` tokens left is read with, by position; ``alike`` would share pages."""
    memory = SimpleNamespace(would_share=lambda first, second: {first.place, second.place} <= set(alike))
    residency = SimpleNamespace(memory=memory, reuse=lambda sequence: None)
    request = SimpleNamespace(params=SimpleNamespace(reads_prompt=False))
    sequences = [
        SimpleNamespace(
            place=i, rank=(0, i), prefill_len=n + 5, num_scheduled=5, index=0, num_output=0, request=request
        )
        for i, n in enumerate(left)
    ]
    chooser = PromptGroups(make_buckets(EngineConfig(), 4096, width_buckets=False), residency)
    return [s.place for s in chooser.around(sequences[0], sequences, most_tokens)]


@pytest.mark.parametrize(
    ("left", "wanted"),
    [
        ([60, 60, 60, 60], [0, 1, 2, 3]),
        ([60, 60, 60, 60, 10], [0, 1, 2, 3]),  # no room
        ([60], [0]),
        ([60, 60], [0]),  # two rows of padding would cost as much as two steps
        ([60, 60, 60], [0]),  # 256 tokens and a launch, or 192 and three launches
        ([120, 120], [0, 1]),
        ([10, 10, 10, 10], [0]),
        ([10] * 7, [0, 1, 2, 3, 4, 5, 6]),  # 128 tokens and a launch, or 112 and seven launches
        ([200, 10], [0]),
        ([60, 200, 60, 60, 60], [0, 2, 3, 4]),
        ([60, 10, 10, 10], [0]),  # padded to 64 each
        ([300, 20, 20], [0]),  # not the end of its prompt
    ],
)
def test_who_is_read_with_whom(left, wanted):
    assert groups(left) == wanted


def test_company_is_bounded_and_never_waits_for_what_it_could_share():
    assert groups([120, 120], most_tokens=128) == [0]
    assert groups([30] * 8, most_tokens=256) == list(range(8))
    assert groups([30] * 9, alike=(1, 2)) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert groups([120, 120, 120], alike=(0, 1)) == [0, 2]


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_those_of_prompts_read_alone(tiny, oracle, overlap):
    engine = make_engine(tiny, **GROUPED, disable_overlap_schedule=not overlap)
    try:
        steps = prompt_steps(engine)
        prompts = {f"p{n}": prompt_of(n) for n in (3, 8, 5, 7)} | {"long": prompt_of(50), "a": prompt_of(30, 1),
                                                                   "b": prompt_of(31, 2)}  # fmt: skip
        for name, prompt in prompts.items():
            add(engine, prompt, greedy(6), name)
        found = run(engine)
        assert steps[0] == ["p3", "p8", "p5", "p7"]
        assert ["a", "b"] in steps
        assert all(found.ids(name) == oracle(prompt, 6) for name, prompt in prompts.items())
        engine.scheduler.check_integrity()
    finally:
        engine.close()


def prompt_that_is_repeated(oracle):
    """A prompt whose likeliest continuation is a token of its own: a penalty that counts the prompt changes it."""
    for seed in range(50):
        prompt = prompt_of(8, seed)
        [prompt[0]] = oracle(prompt, 1)
        if oracle(prompt, 1) == prompt[:1]:
            return prompt
    raise AssertionError("no such prompt among 50")


def test_each_row_keeps_its_own_controls_seed_and_limit(tiny, oracle):
    """Penalties count the tokens of the row's own prompt, drawn tokens follow the row's own seed, and so on."""
    asked = {
        "plain": SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
        "penalised": SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=5.0, ignore_eos=True),
        "drawn": SamplingParams(max_tokens=6, temperature=1.5, seed=4, ignore_eos=True),
        "biased": SamplingParams(max_tokens=2, temperature=0.0, logit_bias={7: 60.0}, logprobs=3, ignore_eos=True),
    }
    prompts = {name: prompt_of(8, seed) for seed, name in enumerate(asked)}
    prompts["penalised"] = prompt_that_is_repeated(oracle)

    def outputs(**settings):
        engine = make_engine(tiny, **{**GROUPED, **settings})
        try:
            steps = prompt_steps(engine)
            for name, params in asked.items():
                add(engine, prompts[name], params, name)
            found = run(engine)
            return steps, {name: found.ids(name) for name in asked}, found
        finally:
            engine.close()

    steps, together, _ = outputs()
    assert steps == [list(asked)]
    alone_steps, alone, _ = outputs(max_prefill_tokens=0)
    assert len(alone_steps) == 4
    assert together == alone
    assert together["biased"] == [7, 7]
    assert together["penalised"][0] != prompts["penalised"][0]


def test_prompts_that_begin_alike_are_computed_once(tiny, oracle):
    prompt = prompt_of(8)
    engine = make_engine(tiny, **GROUPED)
    try:
        steps = prompt_steps(engine)
        other = prompt_of(8, 5)
        names = {"first": prompt, "same": prompt, "other": other, "third": prompt_of(7, 6)}
        for name, tokens in names.items():
            add(engine, tokens, greedy(4), name)
        found = run(engine)
        assert steps[0] == ["first", "other", "third"] or "same" not in steps[0]
        assert engine.scheduler.memory.num_hit == 4, "a page of the second one was not found"
        assert all(found.ids(name) == oracle(tokens, 4) for name, tokens in names.items())
    finally:
        engine.close()


@pytest.mark.parametrize("place", [0, 2])
def test_a_prompt_that_is_asked_about_is_read_alone(tiny, place):
    engine = make_engine(tiny, **GROUPED, disable_radix_cache=True)
    try:
        steps = prompt_steps(engine)
        for seed in range(4):
            asked = {"prompt_logprobs": 2} if seed == place else {}
            add(engine, prompt_of(8, seed), greedy(2, **asked), f"p{seed}")
        run(engine)
        others = [f"p{seed}" for seed in range(4) if seed != place]
        assert sorted(steps) == sorted([[f"p{place}"], others])
    finally:
        engine.close()


def test_an_abort_between_plan_and_result_leaves_the_others(tiny, oracle):
    engine = make_engine(tiny, **GROUPED)
    try:
        prompts = {f"p{seed}": prompt_of(8, seed) for seed in range(4)}
        for name, prompt in prompts.items():
            add(engine, prompt, greedy(6), name)
        engine.step()
        engine.abort("p2")
        found = run(engine)
        assert all(found.ids(name) == oracle(prompts[name], 6) for name in ("p0", "p1", "p3"))
        engine.scheduler.check_integrity()
    finally:
        engine.close()
