"""Speculation within limits: lengths, ends of sequence, logprobs, sampling, interruptions."""

from __future__ import annotations

import numpy as np
import pytest
from drafters import Prophet
from harness import make_engine, run, workload
from oracle import full_recompute_logits, greedy_full_recompute
from tiny import BYTE_VOCAB, write_kinds

from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import OutputDelta, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model
from jaxserve.speculative.trees import depths_of

SPECULATIVE = {"speculative_algorithm": "LIVE-PROPHET", "speculative_adaptive": False}


@pytest.fixture(scope="module")
def loaded(tiny_model):
    import jax.numpy as jnp

    return load_model(open_checkpoint(tiny_model), jnp.float32)


@pytest.fixture
def engine(tiny_model, prophets):
    built = make_engine(tiny_model, **SPECULATIVE)
    yield built
    built.close()


@pytest.fixture
def knowing(monkeypatch):
    """``knowing(answers)``: what the prophets draft from, all of it right."""

    def know(answers: list[list[int]]) -> None:
        monkeypatch.setattr(Prophet, "answers", answers)
        monkeypatch.setattr(Prophet, "wrong", 0.0)

    return know


def serve(
    engine: Engine, prompt: list[int], tag: str, others: list[OutputDelta] | None = None, **params
) -> list[OutputDelta]:
    """Deltas of a request; those of requests that wait already go to ``others``."""
    engine.add(Request(tag, tuple(prompt), SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})))
    deltas = []
    while engine.has_work:
        for delta in engine.step():
            (deltas if delta.request_id == tag or others is None else others).append(delta)
    engine.scheduler.check_integrity()
    assert engine.scheduler.memory.num_available == engine.scheduler.pool.num_usable
    return deltas


def tokens_of(deltas: list[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_never_more_tokens_than_asked_for(engine, loaded, knowing):
    """Drafts would be accepted beyond every limit; a neighbour decodes meanwhile, and keeps its own tokens."""
    prompt = list(b"abc" * 20)
    neighbour = list(b"some other text")
    answer = greedy_full_recompute(loaded, prompt, 68)
    right = greedy_full_recompute(loaded, neighbour, 40)
    knowing([prompt + answer, neighbour + right])
    for max_tokens in (1, 2, 3, 4, 7, 68):
        engine.add(Request(f"n{max_tokens}", tuple(neighbour), SamplingParams(max_tokens=40, temperature=0.0)))
        other: list[int] = []
        engine.add(Request(f"l{max_tokens}", tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0)))
        got: list[int] = []
        while engine.has_work:
            for delta in engine.step():
                (got if delta.request_id[0] == "l" else other).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    assert delta.finish_reason == "length"
        assert got == answer[:max_tokens] and other == right
    assert engine.scheduler.speculation.figures.num_accepted > 150


def test_the_context_length_ends_it(tiny_model, prophets, loaded, knowing):
    engine = make_engine(tiny_model, context_length=64, **SPECULATIVE)
    prompt = list(b"abc" * 20)
    knowing([prompt + greedy_full_recompute(loaded, prompt, 30)])
    deltas = serve(engine, prompt, "r", max_tokens=None)
    assert len(tokens_of(deltas)) == 4 and deltas[-1].finish_reason == "length"
    engine.close()


def test_ids_the_model_does_not_have_are_never_sent(engine, loaded, knowing):
    prompt = list(b"drafts from elsewhere")
    answer = greedy_full_recompute(loaded, prompt, 12)
    knowing([[*prompt, *answer[:5], 260, 5000, *answer[7:]], [*prompt, -3]])
    assert tokens_of(serve(engine, prompt, "r", max_tokens=12)) == answer


def test_tokens_behind_the_end_are_dropped(engine, loaded, knowing):
    prompt = list(b"an end in the middle")
    answer = greedy_full_recompute(loaded, prompt, 24)
    knowing([prompt + answer])
    stop = answer[5]
    first = answer.index(stop)
    deltas = serve(engine, prompt, "r", max_tokens=24, stop_token_ids=(stop,))
    assert tokens_of(deltas) == answer[: first + 1]
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == stop


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_those_without_speculation(temperature, tiny_model, prophets, knowing):
    prompt = list(b"abcabcabcabcabc")
    params = {"max_tokens": 24, "logprobs": 3, "temperature": temperature, "seed": 11, "top_k": 40}
    plain = make_engine(tiny_model)
    wanted = serve(plain, prompt, "r", **params)
    plain.close()
    answer = tokens_of(wanted)
    knowing([prompt + answer[:7] + [(answer[7] + 1) % 250] + answer[8:], prompt + answer])  # one draft fails
    engine = make_engine(tiny_model, **SPECULATIVE)
    found = serve(engine, prompt, "r", **params)
    assert tokens_of(found) == answer
    assert engine.scheduler.speculation.figures.num_accepted >= 12
    engine.close()
    for got, want in zip(found, wanted, strict=True):
        assert got.logprobs[0].token_id == want.logprobs[0].token_id
        assert abs(got.logprobs[0].logprob - want.logprobs[0].logprob) < 1e-4
        assert [token for token, _ in got.logprobs[0].top] == [token for token, _ in want.logprobs[0].top]
        np.testing.assert_allclose([p for _, p in got.logprobs[0].top], [p for _, p in want.logprobs[0].top], atol=1e-4)


def test_sampling_is_that_of_plain_decoding(tiny_model, prophets, knowing):
    """Random numbers come from seed and position, so under the same seed even sampled tokens are the same."""
    params = {"temperature": 1.0, "top_p": 0.95, "min_p": 0.01, "seed": 3}
    plain = make_engine(tiny_model)
    wanted = run(plain, params=params)
    plain.close()
    knowing([prompt + output for (prompt, _), output in zip(workload(), wanted, strict=True)])
    engine = make_engine(tiny_model, **SPECULATIVE)
    assert run(engine, params=params) == wanted
    assert engine.scheduler.speculation.figures.num_accepted > 60
    engine.close()


def test_an_abort_in_flight_leaves_the_others_alone(engine, right_tokens):
    prompts = [prompt for prompt, _ in workload()][:4]
    right = right_tokens[:4]
    for round_number in range(6):
        got: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            name = f"{round_number}-{i}"
            got[name] = []
            params = SamplingParams(max_tokens=len(right[i]), temperature=0.0, ignore_eos=True)
            engine.add(Request(name, tuple(prompt), params))
        steps = 0
        while engine.has_work:
            for delta in engine.step():
                got[delta.request_id] += delta.token_ids
            steps += 1
            if steps == 3 + round_number:
                engine.abort(f"{round_number}-1")
        for i in (0, 2, 3):
            assert got[f"{round_number}-{i}"] == right[i]
        aborted = got[f"{round_number}-1"]
        assert aborted == right[1][: len(aborted)]
        engine.scheduler.check_integrity()
        assert engine.scheduler.memory.num_available == engine.scheduler.pool.num_usable
    assert not engine.scheduler.speculation._records and not engine.scheduler.speculation._sent


@pytest.mark.parametrize("disable_overlap_schedule", [False, True])
@pytest.mark.parametrize("speculative_adaptive", [False, True])
def test_a_prompt_is_observed_once_and_whole(tiny_model, prophets, disable_overlap_schedule, speculative_adaptive):
    engine = make_engine(
        tiny_model, speculative_algorithm="PROPHET", speculative_adaptive=speculative_adaptive,
        disable_overlap_schedule=disable_overlap_schedule,
    )  # fmt: skip
    seen: list[int] = []
    engine.scheduler.speculation.algorithm.observe = lambda ids, num_new: seen.extend(ids[-num_new:])
    prompt = list(b"a prompt of several chunks, all of it new")
    tokens = tokens_of(serve(engine, prompt, "r", max_tokens=9))
    assert seen == prompt + tokens
    assert not engine.scheduler.speculation._observed
    engine.close()


# -- the same with NGRAM -----------------------------------------------------------------------------------------------

NGRAM = {"speculative_algorithm": "NGRAM", "speculative_adaptive": False, "speculative_ngram_capacity": 10_000}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def kinds_of(deltas: list[OutputDelta]) -> list[str]:
    """How each token came to be: a draft that held, the model's own behind one that failed, or behind all of them."""
    kinds: list[str] = []
    num_drafted = 0
    for delta in deltas:  # one token each; the one that no draft brought is the last of its step
        drafted = delta.speculation.num_drafted - num_drafted
        held = next((i for i, kind in enumerate(reversed(kinds)) if kind != "accepted"), len(kinds))
        own = "plain" if not drafted else "bonus" if held == drafted else "replaced"
        kinds += ["accepted" if any(delta.from_drafts) else own]
        num_drafted += drafted
    return kinds


@pytest.mark.parametrize("name", ["TINY", "MARKOV"])
def test_logprobs_of_accepted_replaced_and_bonus_tokens(name, tiny_model, loaded, tmp_path):
    """O-11. The first answer teaches the trie, so the second is made of drafts."""
    prompt = list(b"abcabcabcabcabc")
    kinds, table = np.zeros(BYTE_VOCAB, int), np.random.default_rng(4).normal(0, 1, (7, BYTE_VOCAB))
    for kind, (token, following) in enumerate(zip(b"abcdef", b"dcaefb", strict=True), 1):  # not "b" behind "a"
        kinds[token], table[kind, following] = kind, 6.0
    engine = make_engine(tiny_model if name == "TINY" else write_kinds(tmp_path, kinds, table), **NGRAM)
    seen: list[str] = []
    try:
        for _ in range(2):
            deltas = serve(engine, prompt, "r", max_tokens=24, logprobs=1)
            known = prompt + tokens_of(deltas)
            logits = full_recompute_logits(loaded, known) if name == "TINY" else table[kinds[known]]
            right = log_softmax(logits[len(prompt) - 1 : -1])
            assert tokens_of(deltas) == right.argmax(-1).tolist()
            said = [each for delta in deltas for each in delta.logprobs]
            assert len(said) == 24
            for each, row in zip(said, right, strict=True):
                assert each.token_id == row.argmax() and abs(each.logprob - row.max()) < 1e-4
                assert [token for token, _ in each.top] == [each.token_id]
            seen += kinds_of(deltas)
    finally:
        engine.close()
    assert set(seen) == {"plain", "accepted", "bonus"} | ({"replaced"} if name == "MARKOV" else set())
    assert seen.count("accepted") > 16


def watch_writes(engine: Engine) -> dict[str, int]:
    """Looks at every launch: draft ids, and which pages change. Counts drafts, and the furthest position computed."""
    runner, rows, worker = engine.parts.worker.model_runner, engine.scheduler.rows, engine.parts.worker
    execute, found = worker.execute, {"drafts": 0, "furthest": 0}

    def watched(batch, *arguments):
        before = np.array(runner.pool.data)
        for slot in batch.slots if batch.mode is ForwardMode.TARGET_VERIFY else ():
            parents = rows.mirror("draft_parents")[slot, : batch.queries - 1]
            parents = parents[parents >= 0].tolist()
            drafts = rows.mirror("draft_tokens")[slot, : len(parents)]
            assert all(0 <= token < BYTE_VOCAB for token in drafts)
            last = int(rows.mirror("lengths")[slot, 0]) + max(depths_of(parents), default=0)
            found["drafts"] += len(parents)
            found["furthest"] = max(found["furthest"], last)
        launch = execute(batch, *arguments)
        changed = np.flatnonzero((np.asarray(runner.pool.data) != before).any(axis=(0, 1, 2, 4, 5)))
        own = {0, *(page for sequence in batch.owners for page in sequence.page_ids)}
        assert set(changed.tolist()) <= own, "a page of another request, or of nobody, was written"
        return launch

    worker.execute = watched
    return found


def test_ngram_does_not_draft_past_a_limit(tiny_model, loaded):
    """O-28. Each prompt is first served with all the room there is: NGRAM then has drafts beyond every later limit."""
    engine = make_engine(tiny_model, context_length=64, disable_overlap_schedule=True, **NGRAM)
    found = watch_writes(engine)
    neighbour = list(b"someone else")
    right = greedy_full_recompute(loaded, neighbour, 40)
    prompts = [(list(b"abc" * 20), 4), (list(b"abc" * 6 + b"ab"), 6), ([5, 9], 6), (list(range(255, BYTE_VOCAB)), 6)]
    try:
        for prompt, most in prompts:
            answer = greedy_full_recompute(loaded, prompt, 64 - len(prompt))
            assert tokens_of(serve(engine, prompt, "all", max_tokens=None)) == answer
            for max_tokens in range(1, most + 1):
                other: list[OutputDelta] = []
                engine.add(Request("n", tuple(neighbour), SamplingParams(max_tokens=40, temperature=0.0)))
                deltas = serve(engine, prompt, "r", others=other, max_tokens=max_tokens)
                assert tokens_of(deltas) == answer[:max_tokens] and deltas[-1].finish_reason == "length"
                assert tokens_of(other) == right
        assert found["drafts"] > 300 and found["furthest"] == 62  # a last token is not computed
        assert engine.scheduler.speculation.figures.num_accepted > 200
    finally:
        engine.close()
