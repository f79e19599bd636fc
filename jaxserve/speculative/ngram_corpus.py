"""The text that NGRAM drafts from: what requests said so far, and an external corpus."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxserve.barrier.native import native_module
from jaxserve.core.errors import ConfigError
from jaxserve.speculative.corpus_file import documents

log = logging.getLogger("jaxserve.speculative")

MAX_QUEUED_INSERTS = 4096  # a further one waits: the queue must not outgrow what it feeds
LOG_EVERY_TOKENS = 1_000_000
_LARGEST_TOKEN_ID = np.iinfo(np.int32).max
Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class NgramConfig:
    """Shape of the n-gram trie.

    Attributes:
        capacity: most nodes; the least recently used n-grams go first. A node takes 48 bytes, a token of new text
            ``max_depth`` nodes.
        max_depth: tokens of the longest stored n-gram, 2 .. 256.
        max_match: tokens of the longest suffix looked up, below ``max_depth``.
        min_breadth: most children of a draft at the deep levels of ``"bfs"``.
        max_breadth: most children of the root; halved from level to level in ``"bfs"``, everywhere the same in
            ``"prob"``. 1 drafts chains.
        mode: ``"bfs"``, the most recent continuations level by level; ``"prob"``, the most probable path first.
    """

    capacity: int = 10_000_000
    max_depth: int = 18
    max_match: int = 12
    min_breadth: int = 1
    max_breadth: int = 10
    mode: str = "bfs"


class Drafts(NamedTuple):
    """Draft trees of a batch; draft ``j`` of a context is node ``j + 1``, node 0 is the context's last token.

    Attributes:
        tokens: int32 [context, node], 0 behind the last draft.
        parents: int32 [context, node], number of the parent node, always an earlier one; 0 behind the last draft.
        counts: int32 [context], drafts there are.
        match_lengths: int32 [context], tokens of the longest suffix that something followed, 0 if none.
    """

    tokens: np.ndarray
    parents: np.ndarray
    counts: np.ndarray
    match_lengths: np.ndarray


class NgramCorpus:
    """An n-gram trie that takes sequences of any kind, inserts in the background and reads files. Thread-safe.

    Raises:
        ConfigError: a configuration that cannot work.
    """

    def __init__(self, config: NgramConfig):
        native = native_module("cpu")
        try:
            self._trie = native.NgramTrie(**asdict(config))
        except (native.NativeError, TypeError) as error:
            raise ConfigError(f"NGRAM corpus: {error}") from error
        self.config = config
        self._inserts: queue.Queue[tuple[np.ndarray, int] | None] = queue.Queue(MAX_QUEUED_INSERTS)
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def num_nodes(self) -> int:
        return self._trie.num_nodes

    @property
    def num_evictions(self) -> int:
        return self._trie.num_evictions

    def insert(self, tokens: Tokens, num_new: int) -> None:
        """Stores the n-grams that end in the last ``num_new`` of ``tokens``.

        Args:
            tokens: a sequence up to now. Only ``max_depth - 1`` tokens ahead of the new ones are read.
            num_new: how many of its tokens are new since it was inserted last.

        Raises:
            ValueError: a negative token id, tokens that are no integers, or ``num_new`` out of range.
        """
        self._trie.append(self._inserted(tokens, num_new), num_new)

    def insert_async(self, tokens: Tokens, num_new: int) -> None:
        """Like ``insert``, on a thread of the corpus; ``tokens`` is copied and checked before this returns.

        For prompts: a long one takes tens of milliseconds, which would hold up every other sequence.
        """
        inserted = self._inserted(tokens, num_new).copy()
        with self._thread_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._insert_queued, name="ngram-inserts", daemon=True)
                self._thread.start()
            self._inserts.put((inserted, num_new))  # under the lock: behind close() nobody would take it

    def flush(self) -> None:
        """Blocks until all ``insert_async`` before it have been done. Raises what one of them raised."""
        self._inserts.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def propose(self, contexts: Sequence[Tokens], num_nodes: int, *, flush: bool = True) -> Drafts:
        """Drafts at most ``num_nodes`` tokens behind each context; only its last ``max_match`` tokens are read.

        Args:
            flush: wait for queued insertions first, so that the drafts depend on what was inserted, not on when.

        Raises:
            ValueError: a negative token id, tokens that are no integers, or a negative ``num_nodes``.
        """
        if num_nodes < 0:
            raise ValueError(f"wanted num_nodes from 0, got {num_nodes}")
        if flush:
            self.flush()
        ends = [_token_ids(context[-self.config.max_match :]) for context in contexts]
        return Drafts(*self._trie.match_batch(ends, num_nodes))

    def load(self, path: str | Path, tokenize: Callable[[str], Sequence[int]], max_tokens: int = 10_000_000) -> int:
        """Stores the documents of an external corpus; see ``corpus_file.documents``. Returns the tokens taken.

        Args:
            tokenize: text to token ids; whether it adds special tokens is its own affair.
            max_tokens: most tokens taken; the rest is left out, and the log says so.

        Raises:
            ConfigError: a file that is missing, is neither kind, breaks off in some line, or holds no tokens.
        """
        if max_tokens < 1:
            raise ConfigError(f"wanted at least 1 token of the external corpus, got {max_tokens}")
        num_tokens = 0
        num_logged = 0
        num_evictions = self.num_evictions
        for line, text in documents(path):
            try:
                tokens = _token_ids(tokenize(text))
            except ValueError as error:
                raise ConfigError(f"{path}, line {line}: the tokenizer's output cannot be used: {error}") from error
            taken = tokens[: max_tokens - num_tokens]
            self._trie.load(taken)
            num_tokens += len(taken)
            if len(taken) < len(tokens):
                log.warning("%s: the limit of %d tokens ends in line %d; raise it for more", path, max_tokens, line)
                break
            if num_tokens - num_logged >= LOG_EVERY_TOKENS:
                num_logged = num_tokens
                log.info("%s: %d tokens taken, line %d", path, num_tokens, line)
        if num_tokens == 0:
            raise ConfigError(f"{path} holds no tokens; name a corpus with text")
        if self.num_evictions > num_evictions:
            log.warning(
                "%s: its n-grams don't fit into %d nodes, the first were dropped; raise the capacity or shorten it",
                path,
                self.config.capacity,
            )
        log.info("%s: %d tokens taken, %d nodes", path, num_tokens, self.num_nodes)
        return num_tokens

    def clear(self) -> None:
        """Forgets everything, what is queued and the external corpus too. Raises what ``flush`` raises."""
        try:
            self.flush()
        finally:
            self._trie.clear()

    def close(self) -> None:
        """Does what is queued and ends the thread. A later ``insert_async`` starts another."""
        with self._thread_lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._inserts.put(None)
        if thread is not None:
            thread.join()

    def _inserted(self, tokens: Tokens, num_new: int) -> np.ndarray:
        if not 0 <= num_new <= len(tokens):
            raise ValueError(f"wanted num_new 0 .. {len(tokens)}, the length of the sequence, got {num_new}")
        return _token_ids(tokens[max(0, len(tokens) - num_new - self.config.max_depth + 1) :])

    def _insert_queued(self) -> None:
        while (insert := self._inserts.get()) is not None:
            try:
                self._trie.append(*insert)
            except Exception as error:
                self._error = error
            finally:
                self._inserts.task_done()
        self._inserts.task_done()


def _token_ids(tokens: Tokens) -> np.ndarray:
    """``tokens`` as contiguous int32 [n]; not copied if they are that already."""
    array = np.ascontiguousarray(tokens)
    if len(tokens) == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"wanted token ids as integers [n], got {array.dtype} with {array.ndim} dimensions")
    # Negative ones are large without their sign: one look for both ends.
    if array.astype(np.int64, copy=False).view(np.uint64).max() > _LARGEST_TOKEN_ID:
        raise ValueError(f"wanted token ids 0 .. 2^31 - 1, got {array.min()} .. {array.max()}")
    return array.astype(np.int32, copy=False)
