"""Small operations on draft trees, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class DraftTree(NamedTuple):
    """Drafts of one sequence; numbering as in ``Proposals``."""

    tokens: list[int]
    parents: list[int]

    @property
    def depth(self) -> int:
        """Tokens on the longest path, the root not counted."""
        return max(depths_of(self.parents), default=0)

    @property
    def first_path(self) -> list[int]:
        """Tokens of the path that always takes the first child."""
        path, node = [], 0
        for child, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), start=1):
            if parent == node:
                path.append(token)
                node = child
        return path


EMPTY = DraftTree([], [])


def depths_of(parents: list[int]) -> list[int]:
    """Distance of every draft from the root."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def trimmed(tokens: np.ndarray, parents: np.ndarray, max_depth: int, num_ids: int) -> DraftTree:
    """A sequence's drafts without nodes deeper than ``max_depth``, ids from ``num_ids`` on, and what hangs on them.

    Args:
        tokens, parents: int32[n].

    Raises:
        ValueError: a parent that does not come before its child.
    """
    kept = DraftTree([], [])
    depths, numbers = [0], [0]  # by old node number; -1: dropped
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True), start=1):
        if not 0 <= parent < node:
            raise ValueError(f"draft {node} has parent {parent}; wanted one of 0 .. {node - 1}")
        depths.append(depths[parent] + 1)
        if numbers[parent] < 0 or depths[node] > max_depth or not 0 <= token < num_ids:
            numbers.append(-1)
            continue
        kept.tokens.append(token)
        kept.parents.append(numbers[parent])
        numbers.append(len(kept.tokens))
    return kept
