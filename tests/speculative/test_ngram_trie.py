"""The n-gram trie of csrc/common against dictionaries, and its bounds: nodes, breadth, time."""

from __future__ import annotations

import random
import re
import threading

import numpy as np
import pytest
from ngram_oracle import NgramOracle

from jaxserve.barrier.native import native_module

native = native_module("cpu")

PLENTY = 1_000_000  # nodes; nothing is evicted
MODES = ("bfs", "prob")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def trie(capacity=PLENTY, max_depth=6, max_match=4, min_breadth=1, max_breadth=4, mode="bfs"):
    return native.NgramTrie(capacity, max_depth, max_match, min_breadth, max_breadth, mode)


def drafts(found) -> tuple[list[int], list[int], int]:
    tokens, parents, match_length = found
    assert tokens.dtype == parents.dtype == np.int32
    return tokens.tolist(), parents.tolist(), match_length


def random_text(rng: random.Random, num_tokens: int, vocab_size: int) -> np.ndarray:
    return ids(*(rng.randrange(vocab_size) for _ in range(num_tokens)))


def append_in_pieces(grown, rng: random.Random, text: np.ndarray) -> None:
    end = 0
    while end < len(text):
        piece = min(rng.choice((1, 1, 2, 3, 7, 40)), len(text) - end)
        end += piece
        grown.append(text[:end], piece)


def children(parents: list[int], node: int) -> list[int]:
    return [i for i, parent in enumerate(parents) if parent == node]


def levels(parents: list[int]) -> list[int]:
    """Level of the root and of every draft, the root's being 0."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


# -- what is drafted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_continuation_of_the_longest_suffix_comes_first(mode):
    grown = trie(mode=mode)
    grown.append(ids(1, 2, 3, 4, 9, 2, 3, 5, 9, 9), 10)
    assert drafts(grown.match(ids(7, 1, 2, 3), 1)) == ([4], [0], 3)
    assert drafts(grown.match(ids(7, 2, 3), 1)) == ([5], [0], 2)


def test_a_chain_when_the_breadth_is_one():
    grown = trie(max_breadth=1)
    grown.append(ids(1, 2, 3, 4, 5, 6, 7, 8, 1, 2), 10)
    assert drafts(grown.match(ids(1, 2), 4)) == ([3, 4, 5, 6], [0, 1, 2, 3], 2)


def test_shorter_suffixes_lengthen_the_drafts_of_longer_ones():
    grown = trie(max_depth=4, max_match=3, max_breadth=1)
    grown.append(ids(1, 2, 3, 4, 5, 6), 6)
    # [1 2 3] knows one more token, [3] knows three.
    assert drafts(grown.match(ids(1, 2, 3), 8)) == ([4, 5, 6], [0, 1, 2], 3)


def test_shorter_suffixes_fill_what_longer_ones_leave_free():
    grown = trie()
    grown.append(ids(1, 3, 4), 3)
    grown.append(ids(2, 3, 5), 3)
    assert drafts(grown.match(ids(1, 3), 8)) == ([4, 5], [0, 0], 2)


def test_the_end_of_the_context_itself_is_no_match():
    grown = trie()
    grown.append(ids(1, 2, 3), 3)
    assert drafts(grown.match(ids(1, 2, 3), 8)) == ([], [], 0)
    assert drafts(grown.match(ids(4), 8)) == ([], [], 0)
    assert drafts(grown.match(ids(), 8)) == ([], [], 0)


def test_bfs_prefers_the_most_recent_and_prob_the_most_frequent():
    for mode, expected in (("bfs", [3, 2]), ("prob", [2, 3])):
        grown = trie(mode=mode)
        for token in (2, 2, 3):
            grown.append(ids(1, token), 2)
        assert drafts(grown.match(ids(1), 2))[0] == expected


def test_prob_follows_the_most_probable_path():
    grown = trie(mode="prob")
    for text, times in (([1, 2, 5], 3), ([1, 2, 6], 3), ([1, 3, 7], 4)):
        for _ in range(times):
            grown.append(ids(*text), 3)
    # P(2) = 6/10, P(3) = 4/10 = P(3 7), P(2 5) = P(2 6) = 3/10, 6 the more recent.
    assert drafts(grown.match(ids(1), 8)) == ([2, 3, 7, 6, 5], [0, 0, 2, 1, 1], 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vocab_size", [2, 3, 8])
@pytest.mark.parametrize("max_breadth", [1, 3, 8])
def test_drafts_equal_the_oracle(mode, vocab_size, max_breadth):
    rng = random.Random(f"{mode} {vocab_size} {max_breadth}")
    for _ in range(6):
        depth = rng.randint(2, 7)
        shape = dict(max_depth=depth, max_match=rng.randint(1, depth - 1), mode=mode)
        shape |= dict(min_breadth=rng.randint(1, max_breadth), max_breadth=max_breadth)
        grown, oracle = trie(**shape), NgramOracle(**shape)
        for _ in range(3):
            text = random_text(rng, rng.randint(1, 60), vocab_size)
            append_in_pieces(grown, rng, text)
            oracle.append(text.tolist(), len(text))
            grown.check_integrity()
        assert grown.num_nodes == len(oracle.num_seen)
        assert all(grown.count(ids(*ngram)) == times for ngram, times in oracle.num_seen.items())
        for _ in range(20):
            context = random_text(rng, rng.randint(1, 8), vocab_size)
            num_nodes = rng.randint(0, 20)
            assert drafts(grown.match(context, num_nodes)) == oracle.match(context.tolist(), num_nodes)


@pytest.mark.parametrize("mode", MODES)
def test_every_tree_is_a_tree_within_its_bounds(mode):
    rng = random.Random(5)
    grown = trie(max_depth=8, max_match=5, min_breadth=2, max_breadth=5, mode=mode)
    append_in_pieces(grown, rng, random_text(rng, 3000, 6))
    oracle = NgramOracle(8, 5, 2, 5, mode)
    num_full = 0
    for _ in range(200):
        num_nodes = rng.randint(1, 40)
        tokens, parents, match_length = drafts(grown.match(random_text(rng, 6, 6), num_nodes))
        assert len(tokens) == len(parents) <= num_nodes and 1 <= match_length <= 5
        assert all(0 <= parent <= i for i, parent in enumerate(parents))
        for node, level in enumerate(levels(parents)):
            siblings = [tokens[i] for i in children(parents, node)]
            assert len(set(siblings)) == len(siblings) <= oracle.breadth(level)
        num_full += len(tokens) == num_nodes
    assert num_full > 150


def test_appending_in_pieces_equals_appending_at_once():
    rng = random.Random(11)
    text = random_text(rng, 5000, 4)  # more than one hold of the lock
    at_once, in_pieces = trie(mode="prob"), trie(mode="prob")
    at_once.load(text)
    append_in_pieces(in_pieces, rng, text)
    assert at_once.num_nodes == in_pieces.num_nodes
    for _ in range(300):
        ngram = random_text(rng, rng.randint(1, 6), 4)
        assert at_once.count(ngram) == in_pieces.count(ngram)
        assert drafts(at_once.match(ngram, 12)) == drafts(in_pieces.match(ngram, 12))


def test_old_tokens_that_were_never_appended_are_stored_unseen():
    grown = trie()
    grown.append(ids(1, 2, 3, 4), 1)
    assert [grown.count(ids(*n)) for n in ((4,), (3, 4), (1, 2, 3, 4), (3,), (1, 2))] == [1, 1, 1, 0, 0]
    assert drafts(grown.match(ids(2, 3), 8)) == ([4], [0], 2)
    grown.check_integrity()


def test_only_the_last_tokens_of_a_context_matter():
    grown, same = trie(), trie()
    grown.append(ids(*range(40)), 1)
    same.append(ids(*range(34, 40)), 1)
    assert grown.num_nodes == same.num_nodes


def test_a_batch_answers_as_its_contexts_do_one_by_one():
    rng = random.Random(3)
    grown = trie()
    grown.load(random_text(rng, 300, 5))
    contexts = [random_text(rng, rng.randint(0, 9), 5) for _ in range(7)] + [ids(4000)]
    tokens, parents, counts, match_lengths = grown.match_batch(contexts, 9)
    assert tokens.shape == parents.shape == (8, 9) and counts.shape == match_lengths.shape == (8,)
    assert {a.dtype for a in (tokens, parents, counts, match_lengths)} == {np.dtype(np.int32)}
    for row, context in enumerate(contexts):
        count = counts[row]
        found = (tokens[row, :count], parents[row, :count], match_lengths[row])
        assert drafts(found) == drafts(grown.match(context, 9))
        assert not tokens[row, count:].any() and not parents[row, count:].any()
    assert counts.max() == 9 and counts[-1] == 0
    assert [a.shape for a in grown.match_batch([], 9)] == [(0, 9), (0, 9), (0,), (0,)]


# -- bounded memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [21, 22, 40, 300])
@pytest.mark.parametrize("mode", MODES)
def test_never_more_nodes_than_the_capacity_and_all_links_hold(capacity, mode):
    rng = random.Random(capacity)
    small, oracle = trie(capacity=capacity, mode=mode), NgramOracle(6, 4, 1, 4, mode)
    for _ in range(60):
        text = random_text(rng, rng.randint(1, 30), rng.choice((2, 5, 1000)))
        oracle.append(text.tolist(), len(text))
        end = 0
        while end < len(text):
            piece = min(rng.randint(1, 5), len(text) - end)
            end += piece
            small.append(text[:end], piece)
            assert small.num_nodes <= capacity
            small.check_integrity()
            context = text[:end] if rng.random() < 0.5 else random_text(rng, 5, 5)
            tokens, parents, match_length = drafts(small.match(context, 7))
            small.check_integrity()
            for i in children(parents, 0):
                assert (*context[len(context) - 1 :].tolist(), tokens[i]) in oracle.num_seen
            assert (match_length > 0) == (len(tokens) > 0)
    assert small.num_nodes == capacity == small.capacity
    assert small.num_evictions > 1000


def test_the_longest_ngrams_that_stay_are_the_last_seen():
    rng = random.Random(2)
    small, oracle = trie(capacity=400), NgramOracle(6, 4, 1, 4, "bfs")
    text = random_text(rng, 900, 3)
    append_in_pieces(small, rng, text)
    oracle.append(text.tolist(), len(text))
    longest = sorted((g for g in oracle.num_seen if len(g) == 6), key=oracle.last_seen.__getitem__, reverse=True)
    stays = [small.count(ids(*ngram)) > 0 for ngram in longest]
    num_staying = sum(stays)
    assert 20 < num_staying < len(longest)
    assert stays == [True] * num_staying + [False] * (len(longest) - num_staying)


def test_the_least_recently_used_goes_first():
    small = trie(capacity=21)
    for token in range(21):
        small.load(ids(token))
    order = list(range(21))
    rng = random.Random(4)
    for token in range(21, 200):
        used = rng.choice(order)
        order.remove(used)
        small.load(ids(used))
        small.load(ids(token))
        order = [*order[1:], used, token]
        assert [t for t in range(token + 1) if small.count(ids(t))] == sorted(order)


def flood(grown, rng: random.Random, between) -> None:
    for _ in range(50):
        grown.load(random_text(rng, 40, 1 << 30))
        between()


@pytest.mark.parametrize("use", ["append", "match", "nothing"])
def test_a_hot_ngram_survives_a_flood_and_a_cold_one_does_not(use):
    small = trie(capacity=1000, mode="prob")
    hot = ids(1, 2, 3, 4, 5)
    small.load(hot)
    uses = {"append": lambda: small.load(hot), "match": lambda: small.match(hot[:2], 3), "nothing": lambda: None}
    flood(small, random.Random(1), uses[use])
    assert small.num_nodes == 1000 and small.num_evictions > 5000
    assert drafts(small.match(hot[:2], 3))[0] == ([] if use == "nothing" else [3, 4, 5])
    assert small.count(hot) == {"append": 51, "match": 1, "nothing": 0}[use]


def test_clear_forgets_everything_and_counts_on():
    small = trie(capacity=50)
    small.load(random_text(random.Random(0), 200, 4))
    num_evictions = small.num_evictions
    small.clear()
    small.check_integrity()
    assert (small.num_nodes, small.num_evictions) == (0, num_evictions) and num_evictions > 0
    assert drafts(small.match(ids(1), 4)) == ([], [], 0)
    small.load(ids(1, 2))
    assert drafts(small.match(ids(1), 4)) == ([2], [0], 1)


# -- large and concurrent ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nodes_with_many_children_stay_usable(mode):
    grown = trie(max_depth=3, max_match=2, mode=mode)
    tokens = np.arange(1, 50_001, dtype=np.int32)
    text = np.stack([np.zeros_like(tokens), tokens], 1).reshape(-1)  # 0 1 0 2 0 3 ...: the root and [0] are wide
    grown.load(text)
    grown.append(ids(0, 777), 2)
    assert drafts(grown.match(ids(0), 3))[0][0] == 777
    assert grown.count(ids(0, 31_000)) == 1 and grown.count(ids(0)) == 50_001
    for _ in range(20_000):  # minutes, if any of these looked at every child
        grown.match(ids(0), 8)
        grown.append(ids(0, 40_000), 1)
    assert drafts(grown.match(ids(0), 2))[0][0] == 40_000
    grown.check_integrity()


def test_threads_may_append_and_match_at_once():
    shared = trie(capacity=2000)
    errors: list[Exception] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                text = random_text(rng, 60, 5)
                shared.append(text, 60)
                tokens, parents, _ = shared.match(text[:-3], 10)
                assert len(tokens) == len(parents) <= 10 and shared.num_nodes <= 2000
                shared.match_batch([text[:5], text[:7]], 4)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    shared.check_integrity()


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(max_depth=1, max_match=1), "wanted max_depth 2 .. 256, got 1"),
        (dict(max_depth=257), "wanted max_depth 2 .. 256, got 257"),
        (dict(max_match=6), "wanted 1 <= max_match < max_depth, got max_match 6, max_depth 6"),
        (dict(max_match=0), "got max_match 0, max_depth 6"),
        (dict(min_breadth=0), "wanted 1 <= min_breadth <= max_breadth, got min_breadth 0, max_breadth 4"),
        (dict(min_breadth=5), "got min_breadth 5, max_breadth 4"),
        (dict(capacity=20), "a capacity of at least 21 nodes"),
        (dict(capacity=-1), "got -1"),
        (dict(capacity=1 << 40), "below 2^31, got 1099511627776"),
        (dict(mode="dfs"), 'wanted mode "bfs" or "prob", got "dfs"'),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, message):
    with pytest.raises(native.NativeError, match=re.escape(message)):
        trie(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.array([1, 2]), "got int64 with 1 dimensions"),
        (np.array([1.0], np.float32), "got float32 with 1 dimensions"),
        (np.zeros((2, 2), np.int32), "got int32 with 2 dimensions"),
        (np.zeros(8, np.int32)[::2], "wanted tokens as a contiguous int32 array [n]"),
        ([1, 2], "got <class 'list'>"),
        (None, "got <class 'NoneType'>"),
        (ids(3, -1), "wanted token ids from 0, got -1 at position 1"),
    ],
)
def test_tokens_that_are_no_token_ids_are_refused(wrong, message):
    grown = trie()
    calls = [
        lambda: grown.append(wrong, 1),
        lambda: grown.load(wrong),
        lambda: grown.match(wrong, 4),
        lambda: grown.match_batch([ids(1), wrong], 4),
        lambda: grown.count(wrong),
    ]
    for call in calls:
        with pytest.raises(native.NativeError, match=re.escape(message)):
            call()
    assert grown.num_nodes == 0


def test_numbers_out_of_range_are_refused():
    grown = trie()
    for num_new in (-1, 3):
        with pytest.raises(native.NativeError, match=rf"wanted num_new 0 \.\. 2.*got {num_new}"):
            grown.append(ids(1, 2), num_new)
    for call in (lambda: grown.match(ids(1), -1), lambda: grown.match_batch([ids(1)], -1)):
        with pytest.raises(native.NativeError, match="wanted num_nodes from 0, got -1"):
            call()
    grown.append(ids(1, 2), 0)
    assert grown.num_nodes == 0
