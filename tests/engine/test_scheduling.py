"""Whatever is batched, chunked, preempted, aborted or recycled: each request gets the tokens it would get alone."""

from __future__ import annotations

import pytest
from rig import Collected, add, check_alive, check_idle, generate, greedy, make_engine, prompt_of, run

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams

MIXED = [(1, 9), (5, 3), (16, 12), (17, 1), (33, 7), (47, 20), (2, 30), (15, 2), (64, 5), (9, 16)]


def mixed_requests(seed: int = 0):
    return [(prompt_of(length, seed), greedy(output)) for length, output in MIXED]


def right_answers(oracle, requests):
    return [oracle(prompt, params.max_tokens) for prompt, params in requests]


CONFIGURATIONS = {
    "plain": {},
    "no overlap": {"disable_overlap_schedule": True},
    "page size 1": {"page_size": 1},
    "page size 16": {"page_size": 16},
    "page size 64": {"page_size": 64},
    "chunk 7": {"chunked_prefill_size": 7, "prefill_token_buckets": (3, 7), "page_size": 5},
    "one at a time": {"max_running_requests": 1, "decode_batch_buckets": (1,)},
    "three at a time, buckets 1 2 3": {"max_running_requests": 3, "decode_batch_buckets": (1, 2)},
    "xla": {"attention_backend": "xla"},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_batched_requests_equal_the_oracle(engines, tiny, oracle, name):
    engine = engines(tiny, **CONFIGURATIONS[name])
    requests = mixed_requests()
    outputs = generate(engine, requests)
    assert [o.token_ids for o in outputs] == right_answers(oracle, requests)
    assert all(o.finish_reason == "length" for o in outputs)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_staggered_arrivals_equal_the_oracle(engines, tiny, oracle, overlap):
    """Each arrives while others are anywhere in their lives; slots and pages are recycled in between."""
    engine = engines(tiny, **({} if overlap else {"disable_overlap_schedule": True}))
    for rounds in range(3):
        requests = mixed_requests(rounds)
        ids: list[str] = []

        def arrive(step: int, ids=ids, requests=requests, gap=rounds + 2) -> None:
            if step % gap == 0 and len(ids) < len(requests):
                ids.append(add(engine, *requests[len(ids)]))
                engine.scheduler.check_integrity()

        collected = run(engine, each_step=arrive)
        assert [collected.ids(i) for i in ids] == right_answers(oracle, requests)


def test_many_prefills_before_the_first_decode(engines, tiny, oracle):
    """O-25: the newest tokens of sequences that wait for their first decode must not be overwritten."""
    engine = engines(tiny)
    for rounds in range(5):
        requests = [(prompt_of(length, rounds), greedy(5)) for length in (4, 3, 6, 2, 9, 4, 12, 3, 5, 7, 2, 8)]
        outputs = generate(engine, requests)
        assert [o.token_ids for o in outputs] == right_answers(oracle, requests)


def test_request_ids_are_reused_after_the_end_and_refused_before(engines, tiny, oracle):
    engine = engines(tiny)
    prompt = prompt_of(6)
    for _ in range(3):
        add(engine, prompt, greedy(4), "same")
        with pytest.raises(InvalidRequest, match="'same' is already in use"):
            add(engine, prompt, greedy(4), "same")
        assert run(engine).ids("same") == oracle(prompt, 4)


# -- aborts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_abort_between_prefill_chunks(engines, tiny, oracle, chunks, overlap):
    """O-20: 90 tokens are 6 chunks of 16; the abort comes while the step that holds the chunk is in flight."""
    engine = engines(tiny, **({} if overlap else {"disable_overlap_schedule": True}))
    neighbours = [(prompt_of(length, 3), greedy(25)) for length in (3, 8, 14)]
    for _ in range(4):
        collected = Collected()
        ids = [add(engine, *request) for request in neighbours]
        while any(not s.num_output for s in engine.scheduler.running) or engine.scheduler.waiting:
            collected.take(engine.step())
        victim = add(engine, prompt_of(90), greedy(4))
        (sequence,) = engine._requests[victim]
        while sequence.num_scheduled < min(16 * chunks, 90):
            collected.take(engine.step())
        deltas = engine.abort(victim)
        assert [(d.finish_reason, d.token_ids) for d in deltas] == [("abort", ())]
        collected.take(deltas)
        engine.scheduler.check_integrity()
        run(engine, collected)
        assert [collected.ids(i) for i in ids] == [oracle(p, 25) for p, _ in neighbours]
        assert collected[victim].finish_reason == "abort"
        if overlap:  # otherwise the step that computed the last chunk has delivered its token
            assert collected.ids(victim) == []
    check_alive(engine, oracle)


def test_abort_queued_and_decoding_while_a_step_is_in_flight(engines, tiny, oracle):
    engine = engines(tiny)
    requests = mixed_requests(4)
    for abort_at in range(1, 24, 3):
        engine.flush_cache()  # hits would make the steps fewer
        ids = [add(engine, *request) for request in requests]
        victims = ids[abort_at % 3 :: 3]

        def strike(step: int, victims=victims, at=abort_at):
            if step == at:
                assert engine._in_flight is not None
                return [delta for victim in victims for delta in engine.abort(victim)]
            return []

        collected = run(engine, each_step=strike)
        for request_id, (prompt, params) in zip(ids, requests, strict=True):
            right = oracle(prompt, params.max_tokens)
            output = collected[request_id]
            if request_id in victims and output.finish_reason == "abort":
                assert output.token_ids == right[: len(output.token_ids)]
            else:
                assert output.token_ids == right
        assert any(collected[v].finish_reason == "abort" for v in victims)


def test_abort_of_everything_and_of_the_unknown(engines, tiny, oracle):
    engine = engines(tiny)
    ids = [add(engine, *request) for request in mixed_requests(5)]
    for _ in range(5):
        engine.step()
    assert [d.finish_reason for i in ids for d in engine.abort(i)] == ["abort"] * len(ids)
    assert engine.abort(ids[0]) == [] and engine.abort("never seen") == []
    check_idle(engine)
    assert run(engine).deltas == []  # the step that was in flight adds nothing
    check_alive(engine, oracle)


# -- preemption --------------------------------------------------------------------------------------------------------

SMALL_POOL = {"num_pages": 40, "max_running_requests": 6, "decode_batch_buckets": (6,)}  # 160 tokens


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_preempted_requests_resume_exactly(engines, tiny, oracle, overlap):
    """O-22: six requests of 12 + 60 tokens in a pool of 160."""
    engine = engines(tiny, **SMALL_POOL, **({} if overlap else {"disable_overlap_schedule": True}))
    before = engine.scheduler.num_preemptions
    prompts = [prompt_of(12, seed) for seed in range(6)]
    ids = [add(engine, prompt, greedy(60, logprobs=2)) for prompt in prompts]
    collected = run(engine, each_step=lambda step: engine.scheduler.check_integrity())
    assert engine.scheduler.num_preemptions > before
    alone = [generate(engine, [(prompt, greedy(60, logprobs=2))])[0] for prompt in prompts]
    for request_id, prompt, right in zip(ids, prompts, alone, strict=True):
        output = collected[request_id]
        assert output.token_ids == oracle(prompt, 60) == right.token_ids
        assert output.text == right.text
        assert len(output.logprobs) == 60
        for got, wanted in zip(output.logprobs, right.logprobs, strict=True):
            assert got.token_id == wanted.token_id
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [t for t, _ in got.top] == [t for t, _ in wanted.top]


def test_preemption_does_not_change_sampled_tokens(engines, tiny):
    engine = engines(tiny, **SMALL_POOL)
    requests = [
        (prompt_of(12, seed), SamplingParams(max_tokens=60, temperature=1.5, seed=40 + seed, ignore_eos=True))
        for seed in range(6)
    ]
    before = engine.scheduler.num_preemptions
    together = [o.token_ids for o in generate(engine, requests)]
    assert engine.scheduler.num_preemptions > before
    assert together == [generate(engine, [request])[0].token_ids for request in requests]


def test_abort_of_a_preempted_request(engines, tiny, oracle):
    engine = engines(tiny, **SMALL_POOL)
    prompts = [prompt_of(12, seed) for seed in range(6)]
    ids = [add(engine, prompt, greedy(60)) for prompt in prompts]
    aborted: list[str] = []

    def abort_preempted(step: int):
        preempted = [s for s in engine.scheduler.waiting if s.num_preemptions]
        if preempted and len(aborted) < 2:
            aborted.append(preempted[0].request.request_id)
            return engine.abort(aborted[-1])
        return []

    collected = run(engine, each_step=abort_preempted)
    assert len(aborted) == 2
    for request_id, prompt in zip(ids, prompts, strict=True):
        right = oracle(prompt, 60)
        got = collected.ids(request_id)
        assert got == (right[: len(got)] if request_id in aborted else right)


def test_oversized_request_is_refused_and_the_queue_goes_on(engines, tiny, oracle):
    """O-21: what the pool can never hold is refused at once; what only just fits is served alone."""
    engine = engines(tiny, num_pages=10)  # 40 tokens
    for prompt, max_tokens in ((prompt_of(60), 4), (prompt_of(30), 20), (prompt_of(40), None)):
        with pytest.raises(InvalidRequest, match="--num-pages") as error:
            add(engine, prompt, greedy(max_tokens))
        assert error.value.code == "pool_too_small"
    sizes = [(30, 10), (10, 30), (8, 5), (39, 1)]
    requests = [(prompt_of(length), greedy(output)) for length, output in sizes]
    outputs = generate(engine, requests)
    assert [o.token_ids for o in outputs] == right_answers(oracle, requests)
    (unlimited,) = generate(engine, [(prompt_of(10), greedy(None))])
    assert unlimited.token_ids == oracle(prompt_of(10), 30) and unlimited.finish_reason == "length"


# -- the extra step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_nothing_follows_the_end_of_an_output(tiny, oracle, overlap):
    """O-27: ends by length, stop id, stop string and abort in one step; the step in flight then adds nothing."""
    engine = make_engine(tiny, page_size=1, disable_overlap_schedule=not overlap)
    prompt = [10, 11, 12, 13]
    right = oracle(prompt, 12)
    stop_id = right[3]
    assert stop_id not in right[:3]
    for _ in range(10):
        by_length = add(engine, prompt, greedy(4))
        by_id = add(engine, prompt, greedy(12, stop_token_ids=(stop_id,)))
        by_abort = add(engine, prompt, greedy(12))
        runs_on = add(engine, prompt, greedy(12))
        collected = Collected()
        while by_abort in engine.open_requests:
            collected.take(engine.step())
            if by_abort in engine.open_requests and len(engine._requests[by_abort][0].token_ids) == 4 + 4:
                collected.take(engine.abort(by_abort))
        run(engine, collected)
        assert collected.ids(by_length) == collected.ids(by_id) == collected.ids(by_abort) == right[:4]
        assert [collected[i].finish_reason for i in (by_length, by_id, by_abort)] == ["length", "stop", "abort"]
        assert collected.ids(runs_on) == right
    (again,) = generate(engine, [([*prompt, *right[:2], 14], greedy(6))])
    assert again.token_ids == oracle([*prompt, *right[:2], 14], 6)
    engine.close()
