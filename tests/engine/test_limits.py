"""Requests and settings that cannot be served: refused at once, with a message that says what to do."""

from __future__ import annotations

import pytest
from rig import add, check_alive, check_idle, generate, greedy, make_engine, prompt_of, run
from tiny import write_tiny

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CapacityError, ConfigError, InvalidRequest
from jaxserve.core.sampling_params import SamplingParams


@pytest.fixture
def engine(engines, tiny):
    return engines(tiny)


@pytest.fixture
def narrow(engines, tiny):
    return engines(tiny, context_length=64, page_size=1)


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, "16", True])
def test_max_tokens_must_be_a_positive_integer(max_tokens):
    with pytest.raises(InvalidRequest, match="max_tokens must be an integer >= 1") as error:
        SamplingParams(max_tokens=max_tokens)
    assert error.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "params", "message", "param"),
    [
        ([], {}, "the prompt has no tokens", "prompt"),
        ([260], {}, r"integers in \[0, 259\], got 260", "prompt"),
        ([-1], {}, "got -1", "prompt"),
        ([True], {}, "got True", "prompt"),
        ([1.0], {}, "got 1.0", "prompt"),
        (["a"], {}, "got 'a'", "prompt"),
        ([None], {}, "got None", "prompt"),
        ([1], {"stop_token_ids": [260]}, "token ids of stop_token_ids .* got 260", "stop_token_ids"),
        ([1], {"n": 128}, None, None),
    ],
    ids=str,
)
def test_bad_requests_are_refused_and_the_engine_lives(engine, oracle, prompt, params, message, param):
    request = SamplingParams(max_tokens=2, **params)
    if message is None:
        add(engine, prompt, request)
        run(engine)
    else:
        with pytest.raises(InvalidRequest, match=message) as error:
            add(engine, prompt, request)
        assert error.value.param == param and error.value.status == 400
    check_idle(engine)
    check_alive(engine, oracle)


@pytest.mark.parametrize("length", [60, 62, 63, 64, 65])
@pytest.mark.parametrize("max_tokens", [1, 2, 10, None])
def test_around_the_context_limit(narrow, oracle, length, max_tokens):
    """O-07: what is asked for must fit; without a limit the output takes the room there is. No position reaches 64."""
    prompt = prompt_of(length)
    wanted = max_tokens or 1
    if length + wanted > 64:
        with pytest.raises(
            InvalidRequest, match=f"has {length} tokens and asks for {wanted} more.*length is 64"
        ) as error:
            add(narrow, prompt, greedy(max_tokens))
        assert error.value.code == "context_length_exceeded"
        assert error.value.param == ("max_tokens" if length < 64 else "prompt")
        return
    count = max_tokens or 64 - length
    (output,) = generate(narrow, [(prompt, greedy(max_tokens))])
    assert output.token_ids == oracle(prompt, count)
    assert output.finish_reason == "length"


def test_one_token_is_one_token(engine, oracle):
    outputs = generate(engine, [(prompt_of(n), greedy(1)) for n in (1, 16, 17, 127)])
    assert [o.token_ids for o in outputs] == [oracle(prompt_of(n), 1) for n in (1, 16, 17, 127)]


def test_a_full_queue_is_refused_with_429(tiny, oracle):
    engine = make_engine(tiny, max_queued_requests=3, max_running_requests=1, decode_batch_buckets=(1,))
    for _ in range(4):  # one slot, three places
        add(engine, [1], greedy(3))
    with pytest.raises(CapacityError, match=r"limit is 3 .--max-queued-requests") as error:
        add(engine, [1], greedy(3))
    assert error.value.status == 429
    run(engine)
    add(engine, [1], greedy(2, n=4))
    with pytest.raises(InvalidRequest, match="n is 5, but this server holds 4") as too_many:
        engine.check([1], greedy(2, n=5))
    assert too_many.value.param == "n"
    run(engine)
    check_alive(engine, oracle)
    engine.close()


BAD_SETTINGS = {
    "page_size": (0, 65, "16", 1.0, True),
    "num_pages": (0, -1, "8"),
    "context_length": (0, 1, -5, 2.0),
    "max_running_requests": (0, None, "x"),
    "max_queued_requests": (0, -1),
    "chunked_prefill_size": (0, 3.5),
    "mem_fraction_static": (0, 1.5, -1, "a", float("nan"), None),
    "dtype": ("float16", None, "int8"),
    "load_format": ("gguf", ""),
    "prefill_token_buckets": ((), (0,), (1.5,), "16", 16, (True,)),
    "decode_batch_buckets": ((), (-1,), ("8",)),
    "shared_updates": ("copy",),
    "max_decode_gap_ms": (-1, "a", float("nan"), None),
    "fence_timeout_s": (0, -1, "a", float("nan"), None),
    "seed": ("x", 1.5, True),
    "disable_war_barrier": (True,),
    "compat_unsound_fallback": (True,),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, v) for name, values in BAD_SETTINGS.items() for v in values], ids=str
)
def test_bad_settings_are_named(name, value):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{name: value})
    assert name in str(error.value) or "--" + name.replace("_", "-") in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "flash"}, "unknown attention backend 'flash'; known are auto, xla"),
        ({"attention_backend": "hybrid", "prefill_attention_backend": "flash"}, "unknown attention backend 'flash'"),
        ({"prefill_attention_backend": "xla"}, "need --attention-backend hybrid"),
        ({"attention_backend": "native", "dtype": "bfloat16"}, "choose xla"),
        ({"context_length": 513}, "--context-length 513 exceeds the model's 512"),
        ({"num_pages": 10**9}, "--num-pages 1000000000 needs .* MiB are free; lower it"),
        ({"num_pages": 1, "page_size": 1}, "--num-pages 1 .*raise it"),
        ({"decode_batch_buckets": (8,)}, "larger than --max-running-requests 4"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_or_the_machine(tiny, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(tiny, **settings)


def test_memory_for_not_even_one_sequence(tiny, monkeypatch):
    monkeypatch.setattr("jaxserve.engine.assembly.available_memory_bytes", lambda platform: 1 << 14)
    with pytest.raises(ConfigError, match="lower --context-length"):
        make_engine(tiny)


def test_the_smallest_engine_there_is(tmp_path, tiny, oracle):
    """Two tokens of context, one slot, one page: it warms up, and serves one token after one."""
    engine = make_engine(
        tiny, context_length=2, num_pages=1, page_size=2, max_running_requests=1, chunked_prefill_size=1,
        prefill_token_buckets=None, decode_batch_buckets=None, skip_warmup=False, max_queued_requests=1,
    )  # fmt: skip
    assert [o.token_ids for o in generate(engine, [([7], greedy(1)), ([9], greedy(None))])] == [
        oracle([7], 1),
        oracle([9], 1),
    ]
    engine.close()


def test_the_tokenizer_may_know_fewer_ids_than_the_model(engines, tmp_path_factory):
    """Rows without a token have no text and were never trained: an output that held one would mean nothing."""
    padded = write_tiny(tmp_path_factory.mktemp("padded"), vocab_size=320)
    engine = engines(padded)
    settings = SamplingParams(max_tokens=100, temperature=5.0, ignore_eos=True, logprobs=20)
    outputs = generate(engine, [(prompt_of(4), settings) for _ in range(4)])
    assert max(token for output in outputs for token in output.token_ids) < 260
    assert max(t for output in outputs for entry in output.logprobs for t, _ in entry.top) < 260
