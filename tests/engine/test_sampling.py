"""Sampling against exact distributions: MARKOV's logits are a table, so every probability is known."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from rig import LOW, add, generate, log_softmax, markov_table, prompt_of, run
from tiny import BYTE_VOCAB, byte_tokenizer_files, tiny_config, tiny_tensors, write_folder, write_markov

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import MAX_SEED, SamplingParams

A, B, C = b"abc"
U, R = b"ur"  # uniform over 16 letters; rising logits
LETTERS = b"defghijklmopqstv"
RISING = {32 + i: 0.25 * i for i in range(64)}


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    three = {A: np.log(0.4), B: np.log(0.3), C: np.log(0.3)}
    table = markov_table((R, RISING), (U, dict.fromkeys(LETTERS, 0.0)), default=three)
    for letter in LETTERS:
        table[letter] = table[U]
    return table


@pytest.fixture(scope="module")
def markov(tmp_path_factory, table):
    return write_markov(tmp_path_factory.mktemp("markov"), table)


@pytest.fixture(scope="module")
def engine(engines, markov):
    return engines(markov, context_length=512, max_running_requests=8, decode_batch_buckets=(8,), page_size=16)


def draws(engine, count: int = 304, prompt: bytes = b"a", **params) -> list[int]:
    """``count`` tokens sampled with fixed seeds; every row of the table is the same for a, b and c."""
    size = count // 8
    settings = {"temperature": 1.0, "max_tokens": size, "ignore_eos": True, **params}
    requests = [(list(prompt), SamplingParams(seed=i, **settings)) for i in range(8)]
    return [token for output in generate(engine, requests) for token in output.token_ids]


def assert_frequencies(tokens: list[int], wanted: dict[int, float]) -> None:
    """Within 3 sigma each, and nothing else."""
    assert set(tokens) <= set(wanted)
    for token, p in wanted.items():
        sigma = (len(tokens) * p * (1 - p)) ** 0.5
        assert abs(tokens.count(token) - len(tokens) * p) <= 3 * sigma, (chr(token), tokens.count(token))


ALL = {A: 0.4, B: 0.3, C: 0.3}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1e-3},
        {"temperature": 1e-5},
        {"temperature": 1e-12},
        {"temperature": 1e-38},
        {"temperature": 5e-324},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"min_p": 1},
        {"top_k": 1, "top_p": 0.8, "temperature": 0.01},
        {"top_k": 400, "top_p": 0.39},
    ],
    ids=str,
)
def test_extreme_values_are_greedy(engine, params):
    """O-12."""
    assert set(draws(engine, 80, **params)) == {A}


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, ALL),
        ({"top_p": 1, "min_p": 0}, ALL),
        ({"top_k": 0}, ALL),
        ({"top_k": -1}, ALL),
        ({"top_k": BYTE_VOCAB}, ALL),
        ({"top_k": 400}, ALL),
        ({"top_k": 2}, ALL),  # b and c tie for the second place: ties at a threshold all stay
        ({"top_k": 3}, ALL),
        ({"top_p": 0.5}, ALL),  # the same rule: a alone does not reach 0.5, and b and c tie
        ({"min_p": 0.7}, ALL),
        ({"min_p": 0.76}, {A: 1.0}),
        ({"temperature": 2.0}, {A: 0.366, B: 0.317, C: 0.317}),
        ({"temperature": 0.5}, {A: 0.4706, B: 0.2647, C: 0.2647}),
    ],
    ids=str,
)
def test_frequencies(engine, params, wanted):
    """O-12: what keeps all tokens keeps their frequencies; ties at a threshold all stay."""
    assert_frequencies(draws(engine, **params), wanted)


def test_infinite_temperature_is_uniform_and_finite(engine):
    tokens = draws(engine, 304, temperature=1e300)
    assert len(set(tokens)) > 100


def test_top_k_applies_before_top_p(engine):
    """Of p_i ~ exp(i / 4) over 64 tokens, top_k 4 leaves 0.358 .279 .217 .146, of which top_p 0.5 keeps two; top_p
    first would keep three of the whole distribution's (0.221 .172 .134)."""
    assert_frequencies(draws_at(engine, R, top_k=4, top_p=0.5), normalised([95, 94]))
    assert_frequencies(draws_at(engine, R, top_k=4), normalised([95, 94, 93, 92]))
    assert_frequencies(draws_at(engine, R, top_p=0.5), normalised([95, 94, 93]))
    assert_frequencies(draws_at(engine, R, min_p=0.7), normalised([95, 94]))


def draws_at(engine, token: int, count: int = 240, **params) -> list[int]:
    """First tokens after ``token`` under ``count`` seeds."""
    requests = [([token], SamplingParams(seed=i, max_tokens=1, ignore_eos=True, **params)) for i in range(count)]
    return [output.token_ids[0] for output in generate(engine, requests)]


def normalised(tokens: list[int]) -> dict[int, float]:
    total = sum(np.exp(RISING[t]) for t in tokens)
    return {t: float(np.exp(RISING[t]) / total) for t in tokens}


def test_chi_square_of_a_wide_distribution(engine):
    tokens = draws_at(engine, R, count=1600)
    wanted = normalised(list(RISING))
    kept = [t for t in RISING if 1600 * wanted[t] >= 5]
    rest = 1600 * (1 - sum(wanted[t] for t in kept))
    chi_square = sum((tokens.count(t) - 1600 * wanted[t]) ** 2 / (1600 * wanted[t]) for t in kept)
    chi_square += (sum(t not in kept for t in tokens) - rest) ** 2 / rest
    degrees = len(kept)
    assert chi_square < degrees + 3.7 * (2 * degrees) ** 0.5 + 5  # about 1e-4


@pytest.mark.parametrize(
    "params", [{"top_p": -1}, {"top_p": 2}, {"temperature": -1}, {"min_p": 1.5}, {"top_k": -2}, {"temperature": "hot"},
               {"top_p": float("nan")}, {"seed": -1}, {"seed": 2**63}, {"n": 0}, {"top_k": True}], ids=str
)  # fmt: skip
def test_out_of_range_is_refused(params):
    """O-12, O-14."""
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**params)
    assert error.value.param == next(iter(params)) and error.value.status == 400


# -- logits that are not numbers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["native", "xla"])
def poisoned(request, engines, tmp_path_factory):
    """TINY whose embedding of token 7 is NaN: hidden states, keys and values of that request turn to NaN."""
    tensors = tiny_tensors(tiny_config())
    tensors["model.embed_tokens.weight"][7] = np.nan
    path = write_folder(byte_tokenizer_files(tmp_path_factory.mktemp("nan")), tiny_config(), tensors)
    # Few pages, so that those of the poisoned request are used again at once.
    return engines(path, attention_backend=request.param, num_pages=40)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_fails_its_own_request_only(poisoned, oracle, temperature):
    """O-12."""
    prompts = [[t for t in prompt_of(20, seed) if t != 7] for seed in range(4)]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    broken = SamplingParams(max_tokens=10, temperature=temperature, seed=3, ignore_eos=True)
    for position in (0, 6, 19):
        planted = [*prompts[3][:position], 7, *prompts[3][position:]]
        outputs = generate(poisoned, [(p, params) for p in prompts[:3]] + [(planted, broken)])
        for prompt, output in zip(prompts, outputs[:3], strict=False):
            assert output.error is None
            assert output.token_ids == oracle(prompt, 10)
        assert outputs[3].finish_reason == "error" and "not numbers" in outputs[3].error
        assert outputs[3].token_ids == []
        after = generate(poisoned, [(p, params) for p in prompts])  # on the same pages
        assert [o.token_ids for o in after] == [oracle(p, 10) for p in prompts]


def test_minus_infinity_is_a_value(engines, tmp_path):
    """A row of -inf and one number leaves one choice, sampled or not."""
    from jaxserve.runner.sampler import sample

    logits = np.full((2, 32), -np.inf, np.float32)
    logits[0, 5] = 1.0  # row 1 stays all -inf
    floats = np.array([[1.0, 0.5, 0.1, 0], [1.0, 1.0, 0.0, 0]], np.float32)
    result = sample(jnp.asarray(logits), jnp.asarray(floats), jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32))
    assert int(result.tokens[0]) == 5
    assert result.finite.tolist() == [True, False]


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-12, 1e-30, 1e-38, 1e-45])
def test_small_temperatures_are_told_apart_from_zero_by_nobody(temperature):
    from jaxserve.runner.sampler import sample

    logits = np.zeros((64, 32), np.float32)
    logits[:, 1:] = -0.005
    floats = np.tile(np.array([temperature, 1.0, 0.0, 0], np.float32), (64, 1))
    result = sample(jnp.asarray(logits), jnp.asarray(floats), jnp.zeros((64, 4), jnp.int32), jnp.arange(64))
    assert not result.tokens.any() and result.finite.all()


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_ids_without_a_token_are_impossible(temperature):
    from jaxserve.runner.sampler import sample

    logits = np.zeros((64, 32), np.float32)
    logits[:, 30:] = [9.0, np.nan]
    floats = np.tile(np.array([temperature, 1.0, 0.0, 0], np.float32), (64, 1))
    ints = np.tile(np.array([0, 5, 0, 1], np.int32), (64, 1))
    result = sample(jnp.asarray(logits), jnp.asarray(floats), jnp.asarray(ints), jnp.arange(64), num_ids=30)
    assert result.tokens.max() < 30 and result.finite.all()
    assert np.allclose(result.logprobs, -np.log(30), atol=1e-5)
    assert result.top_ids.max() < 30


# -- seeds -------------------------------------------------------------------------------------------------------------

SEEDED = SamplingParams(max_tokens=16, temperature=0.8, seed=42, ignore_eos=True)
UNSEEDED = SamplingParams(max_tokens=16, temperature=0.8, ignore_eos=True)


def test_seeded_tokens_do_not_depend_on_the_batch(engine):
    """O-14."""
    alone = generate(engine, [([U], SEEDED)])[0].token_ids
    assert set(alone) <= set(LETTERS) and len(set(alone)) > 4
    assert generate(engine, [([U], SEEDED), ([U], UNSEEDED)])[0].token_ids == alone
    assert generate(engine, [([U], UNSEEDED)] * 3 + [([U], SEEDED)])[3].token_ids == alone
    mates = [([U] * (i + 1), UNSEEDED) for i in range(7)]
    assert generate(engine, [*mates, ([U], SEEDED), *mates])[7].token_ids == alone


def test_unseeded_twins_differ(engine):
    """O-14."""
    twins = generate(engine, [([U], UNSEEDED), ([U], UNSEEDED)])
    assert twins[0].token_ids != twins[1].token_ids
    assert generate(engine, [([U], UNSEEDED)])[0].token_ids not in [t.token_ids for t in twins]


def test_outputs_of_one_seeded_request_differ_and_repeat(engine):
    """O-14."""

    def choices() -> list[list[int]]:
        params = SamplingParams(max_tokens=16, temperature=0.8, seed=42, n=3, ignore_eos=True)
        request_id = add(engine, [U], params)
        collected = run(engine)
        return [collected.ids(request_id, i) for i in range(3)]

    first = choices()
    assert len({tuple(ids) for ids in first}) == 3
    assert first == choices()
    assert first[0] == generate(engine, [([U], SEEDED)])[0].token_ids


def test_every_seed_in_range_works_and_is_its_own(engine):
    """O-14."""
    seeds = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, MAX_SEED - 1, MAX_SEED]
    params = [SamplingParams(max_tokens=16, temperature=0.8, seed=seed, ignore_eos=True) for seed in seeds]
    first = [tuple(o.token_ids) for o in generate(engine, [([U], p) for p in params])]
    assert len(set(first)) == len(seeds)
    assert first == [tuple(o.token_ids) for o in generate(engine, [([U], p) for p in params])]


# -- logprobs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ladder(engines, tmp_path_factory):
    """Every row different: row i prefers (7 i + 3) % 256, and its other logits are its own random numbers."""
    table = np.random.default_rng(3).normal(0, 1.5, (BYTE_VOCAB, BYTE_VOCAB)).astype(np.float32)
    table[:, 256:] = LOW
    for token in range(BYTE_VOCAB):
        table[token, (7 * token + 3) % 256] = 9.0
    return engines(write_markov(tmp_path_factory.mktemp("ladder"), table), attention_backend="native"), table


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"temperature": 3.0, "seed": 5}, {"temperature": 1.0, "top_p": 0.3, "seed": 1},
     {"temperature": 2.0, "top_k": 1, "seed": 1}, {"temperature": 4.0, "min_p": 0.1, "seed": 9}],
    ids=str,
)  # fmt: skip
def test_logprobs_are_those_of_the_raw_logits_at_their_own_step(ladder, params):
    """O-10."""
    engine, table = ladder
    settings = {"max_tokens": 6, "ignore_eos": True, **params}
    requests = [([i], SamplingParams(logprobs=count, **settings)) for i, count in enumerate((0, 1, 3, 20))]
    requests.insert(2, ([99], SamplingParams(**settings)))  # a neighbour that asked for none
    outputs = generate(engine, requests)
    assert outputs.pop(2).logprobs == []
    requests.pop(2)
    for (prompt, asked), output in zip(requests, outputs, strict=True):
        assert len(output.logprobs) == len(output.token_ids) == 6
        for last, entry in zip([*prompt, *output.token_ids], output.logprobs, strict=False):
            right = log_softmax(table[last])
            assert entry.logprob == pytest.approx(right[entry.token_id], abs=1e-4)
            order = np.argsort(-right, kind="stable")[: asked.logprobs]
            assert [token for token, _ in entry.top] == order.tolist()
            values = [value for _, value in entry.top]
            assert values == pytest.approx(right[order].tolist(), abs=1e-4)
            assert values == sorted(values, reverse=True)
        assert [entry.token_id for entry in output.logprobs] == output.token_ids


def test_greedy_is_the_argmax(ladder):
    engine, table = ladder
    (output,) = generate(engine, [([5], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))])
    last = 5
    for token in output.token_ids:
        assert token == int(table[last].argmax())
        last = token
