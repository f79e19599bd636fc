"""Token masks of a step, made on the host from its sequences' constraints."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from jaxserve.core.sequence import Sequence
from jaxserve.core.token_constraint import TokenConstraint
from jaxserve.runner.logit_controls import FREE


def masks_of(sequences: Many[Sequence], num_words: int, trees: Many[tuple[np.ndarray, np.ndarray]] | None = None,
             queries: int = 1) -> np.ndarray | None:  # fmt: skip
    """Masks uint32[B, Q, words] of what may follow each sequence, and each of its drafts; None if all are free.

    Args:
        trees: (tokens, parents), each int32[Q - 1], of every sequence; see ``runner.verify``.
    """
    if all(sequence.constraint is None for sequence in sequences):
        return None
    masks = np.full((len(sequences), queries, num_words), FREE, np.uint32)
    for row, sequence in enumerate(sequences):
        if sequence.constraint is not None:
            sequence.constraint.fill_mask(masks[row, 0])
            if trees is not None:
                _fill_behind(sequence.constraint, 0, *trees[row], masks[row])
    return masks


def _fill_behind(
    constraint: TokenConstraint, node: int, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray
) -> None:
    """Masks uint32[Q, words] of the nodes behind ``node``, where the constraint stands.

    What a constraint does not allow is never chosen behind its parent, so its own mask means nothing.
    """
    for child in np.flatnonzero(parents == node) + 1:
        if constraint.advance(int(tokens[child - 1])):
            constraint.fill_mask(masks[child])
            _fill_behind(constraint, int(child), tokens, parents, masks)
            constraint.rollback(1)


def advance(constraint: TokenConstraint, token_ids: list[int]) -> None:
    """Takes committed tokens, up to one that is not allowed: an end of sequence, or what came of logits that were not
    numbers. The output ends there."""
    for token in token_ids:
        if not constraint.advance(token):
            return
