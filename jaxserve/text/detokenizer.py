"""Output tokens to output text while they arrive."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one growing output, cut at the first stop string.

    Never gives out part of a character, nor text that may still turn out to be the beginning of a stop string. The
    joined deltas plus ``finish()`` equal ``tokenizer.decode`` of all pushed ids (up to the stop string), whatever the
    number of tokens per push. Work per token is constant for given stop strings.

    The match that completes first ends the output; of several completing at the same character the longest counts.

    Attributes:
        matched_stop: the stop string that ended the output, or None.
        num_tokens: tokens taken so far; after a match, up to and including the token that completed it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        shown_special_ids: Iterable[int] = (),
    ):
        """Starts an empty output.

        Args:
            skip_special_tokens: leave control tokens out of the text.
            stop: non-empty strings that end the output.
            include_stop: keep the matched stop string at the end of the text.
            min_tokens: a stop string that is complete within so many tokens is text like any other.
            shown_special_ids: control tokens that are not left out.
        """
        if any(not s for s in stop):
            raise ValueError(f"stop strings must be non-empty, got {stop!r}")
        self._stream = tokenizer.open_stream()
        self._skipped = tokenizer.special_ids.difference(shown_special_ids) if skip_special_tokens else frozenset[int]()
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""  # end of the text so far that is a proper prefix of a stop string
        self._finished = False
        self.matched_stop: str | None = None
        self.num_tokens = 0

    def push(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
        """Takes tokens; returns the text that became certain and the stop string it ran into, if any.

        Tokens after the one that completes a stop string are ignored.
        """
        delta = ""
        for token_id in token_ids:
            if self.matched_stop is not None:
                break
            self.num_tokens += 1
            if token_id not in self._skipped:
                delta += self._take(self._stream.push(token_id))
        return delta, self.matched_stop

    def finish(self) -> str:
        """Ends the output; returns the text still held back. Nothing after a stop string; empty when called again."""
        if self._finished or self.matched_stop is not None:
            return ""
        self._finished = True
        delta = self._take(self._stream.finish())
        held, self._held = self._held, ""
        return delta + held

    def _take(self, text: str) -> str:
        if not self._stop or not text:
            return text
        old = len(self._held)
        text = self._held + text
        self._held = ""
        # (end, start, stop): the smallest completes first, and among equals starts first. Of what was held only the
        # beginning of a match counts: it may hold a whole one from a time when nothing could end the output.
        found = ((text.find(s, max(0, old + 1 - len(s))), s) for s in self._stop)
        matches = [(start + len(s), start, s) for start, s in found if start >= 0]
        if matches and self.num_tokens > self._min_tokens:
            end, start, self.matched_stop = min(matches)
            return text[: end if self._include_stop else start]
        num_held = max(self._num_prefix(text, s) for s in self._stop)
        if num_held:
            text, self._held = text[:-num_held], text[-num_held:]
        return text

    @staticmethod
    def _num_prefix(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that ``stop`` properly begins with."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
