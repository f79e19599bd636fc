"""Requests whose prompts begin alike share pages, say what that spared, and get the tokens they would get alone."""

from __future__ import annotations

import numpy as np
import pytest
from rig import Collected, add, check_alive, check_idle, generate, greedy, make_engine, prompt_of, run
from tiny import byte_tokenizer_files, tiny_config, tiny_tensors, write_folder

from jaxserve.core.errors import CapacityError, InvalidRequest
from jaxserve.core.request import Request
from jaxserve.core.sequence import Sequence
from jaxserve.engine.request_checks import check_request
from jaxserve.scheduler.kv_memory import KVMemory
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_cache import PrefixCache


def ask(engine, prompt, max_tokens=4, salt=None, **params):
    """(cached tokens, token ids) of one request alone."""
    request = Request(f"ask-{np.random.randint(1 << 60)}", tuple(prompt), greedy(max_tokens, **params), cache_salt=salt)
    engine.add(request)
    output = run(engine)[request.request_id]
    assert output.error is None
    return output.cached_tokens, output.token_ids


# -- hits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_repeated_prompt_hits_whole_pages_but_never_all_of_itself(engines, tiny, oracle, page_size):
    """O-24: below a page nothing, at most the prompt without its last token, always a multiple of a page."""
    engine = engines(tiny, page_size=page_size)
    for length in range(1, 34):
        engine.flush_cache()
        prompt = prompt_of(length, seed=7)
        first, ids = ask(engine, prompt, 2)
        again, same = ask(engine, prompt, 2)
        assert first == 0 and again == (length - 1) // page_size * page_size
        assert ids == same == oracle(prompt, 2)
    engine.flush_cache()
    check_idle(engine)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prompts_that_share_their_beginning(engines, tiny, oracle, page_size):
    """O-24: pairs with 1 .. 33 tokens in common, one after the other and then both in one batch."""
    engine = engines(tiny, page_size=page_size)
    for shared in (1, 3, 4, 5, 15, 16, 17, 33):
        engine.flush_cache()
        begin = prompt_of(shared, seed=11)
        one, other = [*begin, 1, 2, 3], [*begin, 4, 5]
        assert ask(engine, one)[1] == oracle(one, 4)
        assert ask(engine, other) == (shared // page_size * page_size, oracle(other, 4))
        both = generate(engine, [(one, greedy(6)), (other, greedy(6))])
        assert [o.token_ids for o in both] == [oracle(one, 6), oracle(other, 6)]


def test_many_random_requests_lose_no_page(tiny, oracle):
    """O-24: 300 requests from few beginnings, in a pool that must evict, with the tree and all owners checked."""
    engine = make_engine(tiny, num_pages=40)
    random = np.random.default_rng(3)
    texts = [prompt_of(60, seed) for seed in range(6)]
    hits = 0
    try:
        for _ in range(50):
            requests = []
            for _ in range(6):
                text = texts[random.integers(6)]
                length = int(random.integers(1, 48))
                requests.append((text[:length], greedy(int(random.integers(1, 5)))))
            for (prompt, params), output in zip(requests, generate(engine, requests), strict=True):
                assert output.token_ids == oracle(prompt, params.max_tokens)
                hits += output.cached_tokens > 0
        assert hits > 100
        assert engine.scheduler.memory.num_hit > 1000
        engine.flush_cache()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    finally:
        engine.close()


def test_what_a_conversation_said_is_found_in_its_next_turn(engines, tiny, oracle):
    engine = engines(tiny)
    engine.flush_cache()
    prompt = prompt_of(14, seed=21)
    _, answer = ask(engine, prompt, 10)
    turn = [*prompt, *answer, 7, 8, 9]
    cached, ids = ask(engine, turn)
    assert cached == 20  # of 24 tokens the newest is not computed, and 4 make a page
    assert ids == oracle(turn, 4)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_the_token_in_flight_is_not_cached(tiny, oracle, overlap):
    """O-27: by length, stop id, stop string and abort, several at once; 6 tokens leave at most 5."""
    engine = make_engine(tiny, page_size=1, disable_overlap_schedule=not overlap)
    prompt = [10, 11, 12, 13]
    right = oracle(prompt, 12)
    text = engine.tokenizer.decode(right[:2])
    ends = [{"max_tokens": 2}, {"stop_token_ids": (right[1],)}, {"stop": (text,)}, {}]
    try:
        for _ in range(10):
            for chosen in (*[[end] for end in ends], ends):
                engine.flush_cache()
                ids = [add(engine, prompt, greedy(**{"max_tokens": 12, **end})) for end in chosen]
                collected = Collected()
                for request_id, end in zip(ids, chosen, strict=True):
                    if end == {}:
                        while engine._requests[request_id][0].num_output < 2:
                            collected.take(engine.step())
                        collected.take(engine.abort(request_id))
                run(engine, collected)
                for request_id, end in zip(ids, chosen, strict=True):
                    if end != {"stop": (text,)}:
                        assert collected.ids(request_id) == right[:2]
                cached, again = ask(engine, [*prompt, *right[:2], 14], 6)
                assert 3 <= cached <= 5
                assert again == oracle([*prompt, *right[:2], 14], 6)
    finally:
        engine.close()


@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_an_aborted_prefill_leaves_what_it_computed(engines, tiny, oracle, chunks):
    """O-20: the chunks that were launched, in whole pages; not the rest of the prompt."""
    engine = engines(tiny)
    engine.flush_cache()
    prompt = prompt_of(90, seed=31)
    victim = add(engine, prompt, greedy(4))
    (sequence,) = engine._requests[victim]
    while sequence.num_scheduled < min(16 * chunks, 90):
        engine.step()
    computed = sequence.num_scheduled
    engine.abort(victim)
    run(engine)
    cached, ids = ask(engine, prompt)
    assert cached == min(computed, 89) // 4 * 4
    assert ids == oracle(prompt, 4)


def test_penalties_count_cached_tokens_too(engines, tiny):
    """A hit computes less, and penalizes all the same."""
    engine = engines(tiny)
    engine.flush_cache()
    prompt = prompt_of(30, seed=41)
    params = {"repetition_penalty": 1.9, "frequency_penalty": 1.1}
    first, ids = ask(engine, prompt, 20, **params)
    again, same = ask(engine, prompt, 20, **params)
    assert (first, again) == (0, 28) and ids == same
    assert ids != ask(engine, prompt, 20)[1], "penalties change nothing here"


# -- prompts that are computed meanwhile -------------------------------------------------------------------------------


def chunks_of(engine):
    """A list to which every plan adds the request whose prompt it goes on with."""
    chunks, plan = [], engine.scheduler.planner._plan_prefill

    def recorded(sequence, others_decode):
        batch = plan(sequence, others_decode)
        chunks.append((sequence.request.request_id, batch.tokens.size))
        return batch

    engine.scheduler.planner._plan_prefill = recorded
    return chunks


@pytest.fixture
def chunked(engines, tiny):
    """An engine with nothing in its cache, and the chunks it computes."""
    engine = engines(tiny)
    engine.flush_cache()
    yield engine, chunks_of(engine)
    del engine.scheduler.planner._plan_prefill


def test_of_identical_prompts_that_arrive_together_one_is_computed(chunked, oracle):
    engine, chunks = chunked
    prompt = prompt_of(41, seed=81)
    ids = [add(engine, prompt, greedy(6, n=n)) for n in (1, 1, 2)]
    collected = run(engine, each_step=lambda step: engine.scheduler.check_integrity())
    assert [size for _, size in chunks] == [16, 16, 9, 1, 1, 1]
    assert [collected.outputs[key].cached_tokens for key in [(i, 0) for i in ids] + [(ids[2], 1)]] == [0, 40, 40, 40]
    assert all(output.token_ids == oracle(prompt, 6) for output in collected.outputs.values())
    assert engine.scheduler.memory.num_cached * 4 >= 40


def test_prompts_that_arrive_together_share_their_beginning(chunked, oracle):
    """A short one that goes its own way in the middle of a page of a long one, and one that never began alike."""
    engine, chunks = chunked
    begin = prompt_of(22, seed=82)
    prompts = [[*begin, *prompt_of(30, seed=83)], [*begin, 1, 2, 3], prompt_of(18, seed=84)]
    hits = engine.scheduler.memory.num_hit
    outputs = generate(engine, [(prompt, greedy(6)) for prompt in prompts])
    assert [o.token_ids for o in outputs] == [oracle(prompt, 6) for prompt in prompts]
    assert [o.cached_tokens for o in outputs] == [0, 20, 0]
    assert engine.scheduler.memory.num_hit == hits + 20
    assert sum(size for _, size in chunks) == sum(map(len, prompts)) - 20


def test_a_prompt_is_found_while_its_request_decodes(chunked, oracle):
    engine, chunks = chunked
    prompt = prompt_of(33, seed=85)
    first = add(engine, prompt, greedy(40))
    while engine._requests[first][0].num_output < 3:
        engine.step()
    second = add(engine, prompt, greedy(4))
    collected = run(engine)
    assert collected[second].cached_tokens == 32 and len(chunks) == 4
    assert collected.ids(second) == oracle(prompt, 4) and collected.ids(first) == oracle(prompt, 40)[3:]


def test_a_page_that_is_partly_computed_is_kept():
    """Chunks of 6 tokens, pages of 4: a prompt in the middle of a page does not take that page from another."""
    memory = KVMemory(PagePool(40, 4), PrefixCache(4))
    one, other = (Sequence(Request(name, tuple(range(20)), greedy(4)), 0, 0, 24, list(range(20))) for name in "ab")
    assert memory.admit(one) and memory.admit(other)
    one.num_scheduled = 6
    memory.share(one)
    assert memory.reuse(other) == (0, one.page_ids[:1]) and other.num_scheduled == other.num_cached_tokens == 4
    other.num_scheduled = 10
    memory.share(other)
    own = list(one.page_ids)
    assert memory.reuse(one) == (0, []) and one.num_scheduled == 6 and one.page_ids == own
    one.num_scheduled = 12
    memory.share(one)  # its second page is cached already: it keeps its own, and the third stays out, too
    assert memory.num_cached == 2 and memory.reuse(one) == (0, [])
    memory.check_integrity([one, other])
    one.token_ids.append(1)
    for sequence in (one, other):
        memory.release(sequence)
        memory.check_integrity([one, other])
    assert memory.num_cached == 3 and memory.num_available == memory.pool.num_usable


def test_who_asks_about_its_prompt_shares_it_and_takes_nothing(chunked, oracle):
    engine, _ = chunked
    prompt = prompt_of(20, seed=86)
    asking = [add(engine, prompt, greedy(3, prompt_logprobs=0)) for _ in range(2)]
    other = add(engine, prompt, greedy(3))
    collected = run(engine)
    assert [collected[i].cached_tokens for i in (*asking, other)] == [0, 0, 16]
    assert all(collected.ids(i) == oracle(prompt, 3) for i in (*asking, other))
    assert all(len(collected[i].prompt_logprobs) == 20 for i in asking)


def test_pages_of_logits_that_are_no_numbers_are_forgotten(tmp_path, oracle):
    """What was shared of a prompt before its result was known does not stay, nor does it harm others."""
    config = tiny_config()
    tensors = tiny_tensors(config)
    tensors["model.embed_tokens.weight"][7] = np.nan
    engine = make_engine(write_folder(byte_tokenizer_files(tmp_path), config, tensors))
    try:
        begin = [t for t in prompt_of(60, seed=87) if t != 7][:16]
        bad, good = [*begin, *[7] * 8, 1, 2], [*begin, 3, 4]
        ids = [add(engine, prompt, greedy(3)) for prompt in (bad, bad, good)]
        collected = run(engine)
        assert [collected[i].finish_reason for i in ids] == ["error", "error", "length"]
        assert collected.ids(ids[2]) == oracle(good, 3)
        assert ask(engine, good)[0] == 16  # those of the good one
        assert all(7 not in node.edge for node in engine.scheduler.memory.cache._nodes)
    finally:
        engine.close()


# -- namespaces --------------------------------------------------------------------------------------------------------


def test_salts_never_share(engines, tiny, oracle):
    """O-23: a, a, b, none, none."""
    engine = engines(tiny)
    engine.flush_cache()
    prompt = prompt_of(40, seed=51)
    found = [ask(engine, prompt, salt=salt) for salt in ("a", "a", "b", None, None)]
    assert [cached for cached, _ in found] == [0, 36, 0, 0, 36]
    assert all(ids == oracle(prompt, 4) for _, ids in found)


def test_a_salt_and_a_prompt_do_not_run_together(engines, tiny):
    """O-23: (a, bc) and (ab, c) are different things."""
    engine = engines(tiny, page_size=1)
    engine.flush_cache()
    assert ask(engine, b"bcd", salt="a")[0] == 0
    assert ask(engine, b"cd", salt="ab")[0] == 0
    assert ask(engine, b"bcd", salt="a")[0] == 2


# -- who asks for what -------------------------------------------------------------------------------------------------


def test_a_request_for_prompt_logprobs_takes_no_hits(engines, tiny, oracle):
    """All positions of its prompt must run, cached or not; what it computed serves others."""
    engine = engines(tiny)
    engine.flush_cache()
    prompt = prompt_of(20, seed=71)
    told = []
    for _ in range(2):
        request_id = add(engine, prompt, greedy(3, prompt_logprobs=0))
        output = run(engine)[request_id]
        assert output.cached_tokens == 0 and output.token_ids == oracle(prompt, 3)
        told.append([each and each.logprob for each in output.prompt_logprobs])
    assert len(told[0]) == 20 and told[0] == told[1]
    assert ask(engine, prompt)[0] == 16


def test_off_means_off(tiny, oracle):
    engine = make_engine(tiny, disable_radix_cache=True)
    try:
        prompt = prompt_of(20)
        for _ in range(2):
            assert ask(engine, prompt) == (None, oracle(prompt, 4))
        assert engine.flush_cache() == 0
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    finally:
        engine.close()


def test_the_cache_is_not_flushed_under_requests(engines, tiny, oracle):
    engine = engines(tiny)
    add(engine, prompt_of(8), greedy(4))
    with pytest.raises(CapacityError, match="while requests run"):
        engine.flush_cache()
    run(engine)
    engine.flush_cache()
    assert ask(engine, prompt_of(8))[0] == 0


def test_a_failed_step_forgets_everything(tiny, oracle, monkeypatch):
    """The pool is zeros then; a hit would be wrong."""
    engine = make_engine(tiny)
    try:
        prompt = prompt_of(30, seed=61)
        ask(engine, prompt)
        victim = add(engine, prompt_of(9, seed=62), greedy(9))
        with monkeypatch.context() as patch:
            patch.setattr(engine.parts.worker, "execute", lambda *a: 1 // 0)
            collected = Collected()
            collected.take(engine.step())
        run(engine, collected)
        assert collected[victim].finish_reason == "error"
        assert ask(engine, prompt) == (0, oracle(prompt, 4))
        check_alive(engine, oracle)
    finally:
        engine.close()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_preempted_requests_hit_their_own_pages(tiny, oracle):
    """O-22: resumed sequences do not start from nothing, and say nothing else."""
    engine = make_engine(tiny, num_pages=40, max_running_requests=6, decode_batch_buckets=(6,))
    memory = engine.scheduler.memory
    resumed = []
    admit = memory.admit

    def watched(sequence):
        done = admit(sequence)
        if done and sequence.num_preemptions:
            resumed.append(sequence.num_scheduled)
        return done

    memory.admit = watched
    try:
        prompts = [prompt_of(12, seed) for seed in range(6)]
        ids = [add(engine, prompt, greedy(60, logprobs=2)) for prompt in prompts]
        collected = run(engine, each_step=lambda step: engine.scheduler.check_integrity())
        assert engine.scheduler.num_preemptions > 0 and sum(hit > 0 for hit in resumed) > 1
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert collected.ids(request_id) == oracle(prompt, 60)
            assert collected[request_id].cached_tokens == 0, "its own pages are not the client's savings"
            assert len(collected[request_id].logprobs) == 60
    finally:
        engine.close()


def test_a_cached_pool_admits_what_an_empty_one_does(tiny, oracle):
    """O-21: cached pages are no reason to refuse or to wait."""
    engine = make_engine(tiny, num_pages=10)
    try:
        for seed in range(3):
            prompt = prompt_of(30, seed)
            assert ask(engine, prompt, 10)[1] == oracle(prompt, 10)
            assert engine.scheduler.memory.num_available == 10
        assert engine.scheduler.memory.num_cached > 0
    finally:
        engine.close()


def test_a_priority_is_refused_where_nobody_looks(engines, tiny):
    engine = engines(tiny)
    for wrong in (1, -1, True, "high", 2**40):
        with pytest.raises(InvalidRequest) as error:
            check_request([1], greedy(2), wrong, engine.config, engine.parts)
        assert error.value.param == "priority"
