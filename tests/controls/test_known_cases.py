"""Cases whose outcome is known without a model: logits are a table."""

from __future__ import annotations

import numpy as np
import pytest
from rig import add, generate, greedy, make_engine, run
from tiny import BYTE_VOCAB, EOS, write_markov

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams

X, Y, Z, Q = b"xyzq"
U, E = b"uE"
LETTERS = list(b"abcdefghijklmnop")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    table = np.full((BYTE_VOCAB, BYTE_VOCAB), -20.0, np.float32)
    table[:, [X, Y, Z]] = 5.0, 4.5, 4.2
    for token in (U, *LETTERS):  # uniform
        table[token] = -40.0
        table[token, LETTERS] = 0.0
    table[E] = -40.0
    table[E, [EOS, E]] = 6.0, 5.0
    made = make_engine(
        write_markov(tmp_path_factory.mktemp("markov"), table), max_running_requests=8, decode_batch_buckets=(8,)
    )
    yield made
    made.close()


def say(engine, prompt: bytes, max_tokens: int = 6, **params) -> str:
    (output,) = generate(engine, [(list(prompt), greedy(max_tokens, **params))])
    return bytes(output.token_ids).decode()


PENALTIES = [
    ("q", {}, "xxxxxx"),
    ("q", {"presence_penalty": 1.0}, "xyzxxx"),
    ("xxxx", {"presence_penalty": 1.0}, "xyzxxx"),
    ("q", {"frequency_penalty": 1.0}, "xyzxyzx"),
    ("xxxx", {"frequency_penalty": 1.0}, "xyzxyzx"),
    ("x", {"repetition_penalty": 2.0}, "yzxxxx"),
    ("q", {"repetition_penalty": 2.0}, "xyzxxx"),
    ("xxyz", {"repetition_penalty": 2.0, "frequency_penalty": 0.45}, "xyzxyz"),
]


@pytest.mark.parametrize(("prompt", "params", "text"), PENALTIES)
def test_penalties(engine, prompt, params, text):
    """O-13. Frequency and presence do not count the prompt; repetition does."""
    assert say(engine, prompt.encode(), len(text), **params) == text


def test_neighbours_have_their_own(engine):
    """O-13, one batch; whoever asks for nothing gets nothing, in whichever slot."""
    for order in (PENALTIES, PENALTIES[::-1]):
        outputs = generate(engine, [(list(p.encode()), greedy(len(text), **params)) for p, params, text in order])
        assert [bytes(output.token_ids).decode() for output in outputs] == [text for _, _, text in order]


def test_logit_bias(engine):
    """O-15."""
    assert say(engine, b"u", logit_bias={98: 100}) == "bbbbbb"
    assert say(engine, b"u", logit_bias={"99": 1.5}) == "cccccc"
    sampled = {"max_tokens": 60, "temperature": 1.0, "ignore_eos": True}
    rows = [{}, {"logit_bias": {97: -100, 98: -100.0}}, {"logit_bias": {}}, {"logit_bias": None}]
    outputs = generate(engine, [([U], SamplingParams(seed=3, **sampled, **row)) for row in rows])
    free, banned, empty, null = (output.token_ids for output in outputs)
    assert {97, 98} & set(free) and not {97, 98} & set(banned)
    assert free == empty == null


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"260": 5}), ("logit_bias", {"-1": 5}), ("logit_bias", {"abc": 1}), ("logit_bias", {97: 1000}),
        ("logit_bias", {97: float("nan")}), ("logit_bias", [97]), ("logit_bias", {97: True}), ("logit_bias", "97"),
        ("logit_bias", {**{str(i): 1 for i in range(250)}, **{i: 1 for i in range(60)}}),
        ("logit_bias", {i: 1 for i in range(301)}), ("frequency_penalty", 2.1), ("presence_penalty", -2.1),
        ("repetition_penalty", 0), ("repetition_penalty", 10.5), ("min_tokens", -1), ("min_tokens", 7),
        ("presence_penalty", True),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_out_of_range_is_refused(engine, field, value):
    with pytest.raises(InvalidRequest) as caught:
        add(engine, [U], SamplingParams(max_tokens=6, **{field: value}))
    assert caught.value.param == field and field in str(caught.value)


def test_too_many_ids_to_hold_back(engine):
    with pytest.raises(InvalidRequest, match="at most 64 ids, got 65") as caught:
        add(engine, [U], SamplingParams(max_tokens=6, min_tokens=1, stop_token_ids=tuple(range(64))))
    assert caught.value.param == "stop_token_ids"
    request_id = add(engine, [U], greedy(2, min_tokens=1, stop_token_ids=tuple(range(64))))
    assert run(engine)[request_id].finish_reason == "length"


def test_300_biases_at_once(engine):
    bias = {i: -50.0 for i in range(BYTE_VOCAB) if i != LETTERS[-1]}
    assert say(engine, b"u", logit_bias=bias) == "pppppp"


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": (EOS, Q)}])
def test_min_tokens_holds_the_end_back(engine, params):
    for min_tokens in (0, 1, 4):
        (output,) = generate(
            engine, [([E], SamplingParams(max_tokens=9, temperature=0.0, min_tokens=min_tokens, **params))]
        )
        assert output.token_ids == [E] * min_tokens + [EOS] and output.finish_reason == "stop"


def test_min_tokens_has_no_say_in_ends_that_are_ignored(engine):
    (output,) = generate(engine, [([E], greedy(3, min_tokens=2))])
    assert output.token_ids == [EOS, X, X]


def test_min_tokens_and_stop_strings(engine):
    """Within so many tokens a stop string is text; one that such text begins may still be completed later."""
    cyclic = {"frequency_penalty": 1.0, "max_tokens": 12}  # xyzxyzx...
    text = say(engine, b"q", 12, frequency_penalty=1.0)
    assert text.startswith("xyzxyzx")
    for stop, min_tokens, wanted in (
        (("yz",), 0, "x"), (("yz",), 3, "xyzx"), (("yz",), 2, "x"), (("zx",), 3, "xy"), (("zx",), 4, "xyzxy"),
        (("zxyz", "x"), 5, "xy"), (("zxq", "x"), 4, "xyzxyz"),
    ):  # fmt: skip
        (output,) = generate(
            engine,
            [([Q], SamplingParams(temperature=0.0, stop=stop, min_tokens=min_tokens, ignore_eos=True, **cyclic))],
        )
        assert (output.text, output.finish_reason) == (wanted, "stop"), (stop, min_tokens)


def test_logprobs_are_of_the_raw_logits(engine):
    params = {"max_tokens": 4, "temperature": 0.0, "logprobs": 2, "ignore_eos": True}
    plain, biased = generate(
        engine, [([Q], SamplingParams(**params)), ([Q], SamplingParams(logit_bias={Z: 9}, **params))]
    )
    assert biased.token_ids == [Z] * 4
    for token, other in zip(biased.logprobs, plain.logprobs, strict=True):
        assert [i for i, _ in token.top] == [X, Y] and abs(token.top[0][1] - other.top[0][1]) < 1e-5
        assert abs(token.logprob - (other.logprob - 0.8)) < 1e-5
