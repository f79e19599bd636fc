"""After warm-up nothing is compiled, whatever is asked for."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from rig import add, check_idle, generate, greedy, make_engine, prompt_of, run

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.runner.program_cache import RetraceError

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: _events.append(name))

SMALL = {
    "context_length": 40,
    "max_running_requests": 3,
    "decode_batch_buckets": None,
    "prefill_token_buckets": None,
    "chunked_prefill_size": 17,
    "skip_warmup": False,
}


@pytest.fixture(scope="module", params=["native", "planned"])
def warm(request, tiny):
    engine = make_engine(tiny, attention_backend=request.param, **SMALL)
    yield engine
    engine.close()


def test_the_counter_counts():
    before = _events.count(COMPILE_EVENT)
    jax.jit(lambda x: x * 3 + before)(np.arange(5))
    assert _events.count(COMPILE_EVENT) > before


def test_nothing_compiles_after_warm_up(warm):
    """O-36 (b)."""
    before = _events.count(COMPILE_EVENT)
    for length in range(1, 40):
        generate(warm, [(prompt_of(length), greedy(1))])
    for size in (1, 2, 3, 7):
        generate(warm, [(prompt_of(length), greedy(None)) for length in range(1, size + 1)])
    sampled = {"max_tokens": 4, "temperature": 0.9, "ignore_eos": True}
    for extra in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"seed": 2**63 - 1}, {"logprobs": 0},
                  {"logprobs": 20},  {"n": 3}, {"stop": ("ab",)}, {"stop_token_ids": (5,)},
                  {"prompt_logprobs": 3}, {"pooling": "mean"}, {"allowed_token_ids": [1, 2], "bad_words": ["ab"]},
                  {"frequency_penalty": 1.0}, {"repetition_penalty": 2.0, "logit_bias": {5: 9}, "min_tokens": 2},
                  {"structured_outputs": {"regex": "[a-z]{9}"}},
                  {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1, "logprobs": 2, "n": 2}):  # fmt: skip
        generate(warm, [(prompt_of(5), SamplingParams(**sampled, **extra)), (prompt_of(6), greedy(2))])
    request_id = add(warm, prompt_of(30), greedy(5))
    warm.step()
    warm.abort(request_id)
    run(warm)
    assert _events.count(COMPILE_EVENT) == before
    assert warm.num_late_compiles == 0


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({"context_length": 256, "chunked_prefill_size": 128, "prefill_token_buckets": (16, 64)}, 100),
        ({"context_length": 317, "chunked_prefill_size": 317, "prefill_token_buckets": (64,), "num_pages": 159}, 300),
        ({"context_length": 317, "chunked_prefill_size": 53, "prefill_token_buckets": None}, 311),
    ],
    ids=["chunk above the largest bucket", "odd context", "odd chunk"],
)
def test_limits_beyond_the_buckets_become_buckets(tiny, limits, length):
    """O-36 (a): served, and with the tokens of an engine whose limits are even."""
    plain = make_engine(tiny, context_length=512, num_pages=260)
    wanted = generate(plain, [(prompt_of(length), greedy(5))])[0].token_ids
    plain.close()
    engine = make_engine(tiny, **limits)
    assert generate(engine, [(prompt_of(length), greedy(5))])[0].token_ids == wanted
    check_idle(engine)
    engine.close()


def test_recovery_compiles_nothing(warm, monkeypatch):
    from jaxserve.runner.launch import Launch

    before = _events.count(COMPILE_EVENT)
    add(warm, prompt_of(5), greedy(3))
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "collect", lambda self: (_ for _ in ()).throw(RuntimeError("planted failure")))
        run(warm)
    generate(warm, [(prompt_of(5), greedy(3))])
    assert _events.count(COMPILE_EVENT) == before


@pytest.mark.parametrize(
    ("position", "wrong", "named"),
    [
        (2, "relay", r"relay\.tokens int32\[9\], was int32\[4\]"),
        (3, np.zeros(16, np.int32), r"ticket int32\[16\], was uint32\[16\]"),
        (5, "tokens", r"inputs.tokens int32\[1, 99\]"),
    ],
    ids=["relay", "ticket", "tokens"],
)
def test_a_retrace_names_the_argument(warm, position, wrong, named):
    step_runner = warm.parts.worker.step_runner
    cache = step_runner.steps
    key = cache.keys()[0]
    arguments = list(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), cache._arguments(key)))
    if isinstance(wrong, str):
        wrong = arguments[position]._replace(tokens=np.zeros(9 if wrong == "relay" else (1, 99), np.int32))
    arguments[position] = wrong
    with pytest.raises(RetraceError, match=named):
        cache.call(key, *arguments)


def test_a_program_outside_the_buckets_is_counted(warm):
    step_runner = warm.parts.worker.step_runner
    key = step_runner.steps.keys()[0]
    before, events = warm.num_late_compiles, _events.count(COMPILE_EVENT)
    step_runner.steps._compiled.pop(key)
    step_runner.steps.get(key)
    assert warm.num_late_compiles == before + 1
    assert _events.count(COMPILE_EVENT) > events  # also where the program came from the persistent cache
    warm._late_compiles = before
