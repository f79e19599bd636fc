"""The corpus around the trie: sequences of any kind, insertion in the background, external files."""

from __future__ import annotations

import json
import logging
import threading

import numpy as np
import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.speculative import ngram_corpus
from jaxserve.speculative.ngram_corpus import NgramConfig, NgramCorpus

CONFIG = NgramConfig(capacity=10_000, max_depth=5, max_match=3, max_breadth=2)


@pytest.fixture
def corpus():
    made = NgramCorpus(CONFIG)
    yield made
    made.close()


def first_draft(corpus: NgramCorpus, *context: int, **options) -> int | None:
    drafts = corpus.propose([list(context)], 1, **options)
    return int(drafts.tokens[0, 0]) if drafts.counts[0] else None


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda t: np.array(t, np.int32), lambda t: np.array(t * 2)[:6]]
)
def test_any_sequence_of_integers_is_taken(corpus, kind):
    corpus.insert(kind([1, 2, 3, 4, 5, 6]), 6)
    drafts = corpus.propose([kind([9, 1, 2, 3, 4, 5]), kind([7, 7, 7, 7, 7, 1])], 2)
    assert drafts.tokens.tolist() == [[6, 0], [2, 3]]
    assert drafts.parents.tolist() == [[0, 0], [0, 1]]
    assert drafts.counts.tolist() == [1, 2]
    assert drafts.match_lengths.tolist() == [3, 1]


def test_only_new_tokens_are_counted_and_only_the_end_is_read(corpus):
    corpus.insert([-1] * 100 + [1, 2, 3, 4, 5, 6], 2)  # 4 tokens ahead of the new ones: [1 2 3 4]
    assert first_draft(corpus, 4) == 5
    assert corpus._trie.count(np.array([5], np.int32)) == 1
    assert corpus._trie.count(np.array([4], np.int32)) == 0
    assert corpus._trie.count(np.array([1, 2, 3, 4, 5], np.int32)) == 1
    assert first_draft(corpus, *[-1] * 50, 3, 4, 5) == 6


def test_no_contexts_give_no_drafts(corpus):
    assert [array.shape for array in corpus.propose([], 3)] == [(0, 3), (0, 3), (0,), (0,)]
    assert corpus.propose([[]], 3).counts.tolist() == [0]


@pytest.mark.parametrize("insert", ["insert", "insert_async"])
@pytest.mark.parametrize(
    ("tokens", "num_new", "message"),
    [
        ([1, -2], 2, r"wanted token ids 0 \.\. 2\^31 - 1, got -2 \.\. 1"),
        ([1, 1 << 31], 1, r"got 1 \.\. 2147483648"),
        ([1.5], 1, "wanted token ids as integers.*got float64"),
        (["a"], 1, "wanted token ids as integers"),
        (np.zeros((2, 2), np.int32), 2, "got int32 with 2 dimensions"),
        ([1, 2], 3, r"wanted num_new 0 \.\. 2, the length of the sequence, got 3"),
        ([1, 2], -1, "got -1"),
    ],
)
def test_bad_tokens_are_refused_at_the_call(corpus, insert, tokens, num_new, message):
    with pytest.raises(ValueError, match=message):
        getattr(corpus, insert)(tokens, num_new)
    corpus.flush()
    assert corpus.num_nodes == 0


def test_bad_contexts_are_refused(corpus):
    with pytest.raises(ValueError, match=r"got -2 \.\. 1"):
        corpus.propose([[1], [1, -2]], 2)
    with pytest.raises(ValueError, match="wanted num_nodes from 0, got -1"):
        corpus.propose([[1]], -1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(max_match=5), "wanted 1 <= max_match < max_depth"),
        (dict(capacity=3), "at least 15 nodes"),
        (dict(mode="BFS"), 'mode "bfs" or "prob"'),
        (dict(max_breadth="many"), "incompatible"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        NgramCorpus(NgramConfig(**{**vars(CONFIG), **wrong}))


# -- in the background -------------------------------------------------------------------------------------------------


class Gate:
    """Stands for the trie; its ``append`` waits until the gate is opened."""

    def __init__(self, trie):
        self._trie = trie
        self.opened = threading.Event()
        self.entered = threading.Event()

    def append(self, tokens, num_new):
        self.entered.set()
        assert self.opened.wait(20)
        self._trie.append(tokens, num_new)

    def __getattr__(self, name):
        return getattr(self._trie, name)


def test_propose_waits_for_what_is_queued_unless_told_otherwise(corpus):
    gate = corpus._trie = Gate(corpus._trie)
    tokens = np.array([1, 2, 3], np.int32)
    corpus.insert_async(tokens, 3)
    assert gate.entered.wait(20)
    tokens[1] = 9  # the queue holds a copy
    assert first_draft(corpus, 1, flush=False) is None
    opener = threading.Timer(0.05, gate.opened.set)
    opener.start()
    assert first_draft(corpus, 1) == 2
    assert gate.opened.is_set()
    opener.join()


def test_insertions_in_the_background_keep_their_order(corpus):
    for token in range(500):
        corpus.insert_async([7, token], 2)
    assert first_draft(corpus, 7) == 499


def test_flush_raises_what_failed_in_the_background_once(corpus):
    def fail(tokens, num_new):
        raise MemoryError("no more")

    trie, corpus._trie = corpus._trie, type("Failing", (), {"append": staticmethod(fail)})()
    corpus.insert_async([1, 2], 2)
    with pytest.raises(MemoryError, match="no more"):
        corpus.flush()
    corpus._trie = trie
    corpus.insert_async([1, 2], 2)
    assert first_draft(corpus, 1) == 2


def test_close_does_what_is_queued_and_ends_the_thread(corpus):
    corpus.insert_async([1, 2], 2)
    thread = corpus._thread
    corpus.close()
    assert not thread.is_alive()
    assert first_draft(corpus, 1) == 2
    corpus.close()
    corpus.insert_async([1, 3], 2)
    assert first_draft(corpus, 1) == 3


def test_clear_forgets_what_is_queued_too(corpus):
    corpus.insert_async(list(range(2000)), 2000)
    corpus.clear()
    assert corpus.num_nodes == 0 and first_draft(corpus, 5) is None


# -- external corpora --------------------------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def write(tmp_path):
    def write(name: str, content: str | bytes):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def continuation(corpus: NgramCorpus, text: str) -> str | None:
    draft = first_draft(corpus, *letters(text))
    return None if draft is None else chr(draft)


def test_a_txt_file_holds_a_document_per_line(corpus, write):
    assert corpus.load(write("a.txt", "abc\n\n  \r\nxyz\r\né"), letters) == 7
    assert continuation(corpus, "ab") == "c" and continuation(corpus, "y") == "z"
    assert continuation(corpus, "c") is None  # nothing joins documents, nor is the end of a line read
    assert continuation(corpus, "z") is None


def test_a_jsonl_file_holds_a_document_per_object(corpus, write):
    lines = [json.dumps({"text": "ab\ncd", "id": 4}), "", json.dumps({"text": "x"})]
    assert corpus.load(str(write("a.JSONL", "\n".join(lines))), letters) == 6
    assert continuation(corpus, "b") == "\n" and continuation(corpus, "d") is None


def test_a_byte_order_mark_is_no_text(corpus, write):
    assert corpus.load(write("a.txt", b"\xef\xbb\xbfab\n"), letters) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nb\xffd\n", "a.txt, line 2: is not UTF-8.*at byte 1"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": ', "a.jsonl, line 3: is not JSON"),
        ("a.jsonl", '{"text": "a"}\n{"texts": "b"}', 'line 2: wanted an object with a string "text", got {"texts'),
        ("a.jsonl", '{"text": 4}', 'line 1: wanted an object with a string "text"'),
        ("a.jsonl", '["text"]', "line 1: wanted an object"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1: is not JSON"),
        ("a.txt", "\n\n", "a.txt holds no tokens"),
        ("a.csv", "a,b", r"wanted a \.txt file.*got \.csv"),
        ("corpus", "a,b", "got no suffix"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(corpus, write, name, content, message):
    with pytest.raises(ConfigError, match=message):
        corpus.load(write(name, content), letters)


def test_a_missing_file_is_named(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.txt cannot be read: No such file"):
        corpus.load(tmp_path / "gone.txt", letters)
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.txt cannot be read: Is a directory"):
        corpus.load(tmp_path / "folder.txt", letters)


def test_a_tokenizer_that_gives_no_token_ids_is_named(corpus, write):
    with pytest.raises(ConfigError, match=r"line 2: the tokenizer's output cannot be used: wanted token ids 0"):
        corpus.load(write("a.txt", "a\nb"), lambda text: [-1] if text == "b" else [1])


def test_the_rest_of_a_large_corpus_is_left_out_and_the_log_says_so(corpus, write, caplog, monkeypatch):
    monkeypatch.setattr(ngram_corpus, "LOG_EVERY_TOKENS", 3)
    caplog.set_level(logging.INFO, "jaxserve.speculative")
    assert corpus.load(write("a.txt", "abc\ndefgh\nijk\n"), letters, max_tokens=5) == 5
    assert continuation(corpus, "d") == "e" and continuation(corpus, "e") is None
    assert "3 tokens taken, line 1" in caplog.text
    assert "the limit of 5 tokens ends in line 2" in caplog.text
    with pytest.raises(ConfigError, match="at least 1 token of the external corpus, got 0"):
        corpus.load(write("a.txt", "abc"), letters, max_tokens=0)


def test_a_corpus_that_does_not_fit_is_warned_of(write, caplog):
    small = NgramCorpus(NgramConfig(capacity=30, max_depth=5, max_match=3))
    small.load(write("a.txt", "abcdefghijklmnopqrstuvwxyz"), letters)
    assert small.num_nodes == 30 and "don't fit into 30 nodes" in caplog.text
