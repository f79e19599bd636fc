"""What an output may say: the hook of grammars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class TokenConstraint(ABC):
    """Which tokens may follow in one output. Holds the state of that output; one thread uses it.

    The scheduler asks for the mask of every step, and moves the constraint on with every token that is committed. For
    draft tokens it moves on along each path of the tree, asks, and rolls back.

    Attributes:
        error: why nothing more can be said of the output, which then ends with it; None: all is well. A limit met on
            the way is said here, not raised: it concerns one output, and a step serves many.
    """

    error: str | None = None

    @abstractmethod
    def fill_mask(self, words: np.ndarray) -> None:
        """Writes which ids may come next into ``words`` uint32[ceil(V / 32)]: bit i % 32 of word i // 32 for id i.

        At least one id must be allowed; at the end that is an end-of-sequence id.
        """

    @abstractmethod
    def advance(self, token_id: int) -> bool:
        """Takes the next token. False, and nothing changed, if it is not allowed here."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Takes back the last ``num_tokens`` that ``advance`` took."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether nothing but the end of sequence can follow, or it has come already."""
