"""Says, once each, that drafts do not hold, and that speculation is idle."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

MEMORY = 2000.0  # drafts tried after which older ones count less; fewer say nothing
FLOOR = 0.05  # below this chance, even drafts that cost nothing would bring less than one token in twenty
IDLE_TOKENS = 10_000  # tokens after which is looked whether speculation does anything
IDLE_SHARE = 0.01


class AcceptanceWatch:
    """Watches the drafts of one algorithm.

    A draft is tried when the drafts before it held: it was verified, or its token came without speculation. The latter
    is how drafts are known that are never sent: with adaptive pacing a wrong draft model soon sends none.

    Args:
        name: the algorithm's.
    """

    def __init__(self, name: str):
        self._name = name
        self._held = 0.0  # these two fade
        self._tried = 0.0
        self._num_tried = 0
        self._num_tokens = 0
        self._num_emitted = 0
        self._floor_reported = False

    def committed(self, num_tokens: int, held: int, failed: int, *, verified: bool) -> None:
        """A step added tokens to a sequence.

        Args:
            num_tokens: how many.
            held, failed: drafts that were tried with it.
            verified: whether it verified drafts of the sequence.
        """
        was_young = self._num_tokens < IDLE_TOKENS
        self._num_tokens += num_tokens
        self._num_emitted += num_tokens if verified else 0
        self._held += held
        self._tried += held + failed
        self._num_tried += held + failed
        if self._tried > MEMORY:
            self._held *= MEMORY / self._tried
            self._tried = MEMORY
            if not self._floor_reported and self._held < FLOOR * MEMORY:
                self._report_floor()
        if was_young and self._num_tokens >= IDLE_TOKENS and self._num_emitted < IDLE_SHARE * self._num_tokens:
            self._report_idle()

    def _report_floor(self) -> None:
        self._floor_reported = True
        log.warning(
            "%s: of the newest %d drafts that could hold, %.1f %% did. A wrong draft model or a wrong token mapping "
            "does that, and to NGRAM text in which nothing repeats. The output is right, but speculation does not pay: "
            "check the draft, or serve without --speculative-algorithm",
            self._name, MEMORY, 100 * self._held / MEMORY,
        )  # fmt: skip

    def _report_idle(self) -> None:
        if self._floor_reported:
            return
        chance = (
            f"of which {self._held / self._tried:.2f} held" if self._num_tried else "so there was nothing to verify"
        )
        log.warning(
            "%s: speculation is idle; %d of the first %d tokens came from verify steps. There were drafts for %d "
            "tokens, %s",
            self._name, self._num_emitted, self._num_tokens, self._num_tried, chance,
        )  # fmt: skip
