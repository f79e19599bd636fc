"""Tokens and words that an output may not hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.token_constraint import TokenConstraint
from jaxserve.text.tokenizer import Tokenizer

_FREE = np.uint32(0xFFFFFFFF)


def bad_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell these words, at the start of a text and behind a space.

    Raises:
        InvalidRequest: a word without tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens; leave it out", param="bad_words")
            found[ids] = None
    return tuple(found)


class TokenLimits(TokenConstraint):
    """Holds an output to some ids, keeps token sequences out of it, or both, besides what ``inner`` says.

    Where nothing is left to choose, the output ends.

    Args:
        allowed: the only ids there may be; None: all.
        bad: sequences of ids that may not occur.
        eos_token_ids: what can be chosen when nothing else can.
        num_ids: ids of the model.
        inner: another constraint of the same output, or None.
    """

    def __init__(
        self,
        allowed: Sequence[int] | None,
        bad: Sequence[tuple[int, ...]],
        eos_token_ids: tuple[int, ...],
        num_ids: int,
        inner: TokenConstraint | None = None,
    ):
        num_words = -(-num_ids // 32)
        self._allowed = None if allowed is None else _words(allowed, num_words)
        self._eos = _words(eos_token_ids, num_words)
        self._bad = tuple(bad)
        self._longest = max((len(each) for each in self._bad), default=1)
        self._inner = inner
        self._history: list[int] = []

    def fill_mask(self, words: np.ndarray) -> None:
        if self._inner is None:
            words[:] = _FREE
        else:
            self._inner.fill_mask(words)
            self.error = self._inner.error
            if self.error is not None:
                return
        if self._allowed is not None:
            words &= self._allowed
        for token in self._ends_of_bad():
            words[token // 32] &= ~np.uint32(1 << token % 32)
        if not words.any():
            words[:] = self._eos

    def _ends_of_bad(self) -> list[int]:
        """Ids that would complete a sequence that may not occur."""
        recent = tuple(self._history[-self._longest + 1 :]) if self._longest > 1 else ()
        return [each[-1] for each in self._bad if len(each) == 1 or recent[-len(each) + 1 :] == each[:-1]]

    def advance(self, token_id: int) -> bool:
        is_allowed = self._allowed is None or bool(self._allowed[token_id // 32] >> np.uint32(token_id % 32) & 1)
        if not is_allowed or token_id in self._ends_of_bad():
            return False
        if self._inner is not None and not self._inner.advance(token_id):
            return False
        self._history.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._history[-num_tokens:]
            if self._inner is not None:
                self._inner.rollback(num_tokens)

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete


def _words(ids: Sequence[int], num_words: int) -> np.ndarray:
    words = np.zeros(num_words, np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words
