"""What a training trains, whatever kind of draft it is: arrays by path, a loss over a batch, a way onto the disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from jaxserve.training.losses import Batch, Guesses

Parameters = dict[str, jax.Array]


class Student(ABC):
    """A draft that learns from its target.

    Attributes:
        target_class: class of the targets it can be trained for.
        feature_points: states of the target it is given; see ``models.draft``.
        target_ids: Int[n], the ids of the target it learns to guess, rising; None: all.
        trained: its own arrays, by path.
        fixed: by path, what its loss reads besides: arrays of the target, which stay as they are. Programs are given
            them as arguments, so that they are not compiled into them.
        decay: weight of a guess in the loss, relative to that of the guess before it.
    """

    target_class: ClassVar[type[Any]]
    feature_points: tuple[int, ...]
    target_ids: np.ndarray | None = None
    trained: Parameters
    fixed: Parameters
    decay: float

    @abstractmethod
    def guesses(self, values: Parameters, batch: Batch, key: jax.Array) -> Guesses:
        """How it does with ``values`` for its arrays, those of ``trained`` and ``fixed``; differentiable.

        Args:
            key: for what is drawn by chance.
        """

    @abstractmethod
    def save(self, folder: Path, values: Parameters) -> Path:
        """Writes it, in bfloat16, as an engine loads it.

        Returns:
            The file that holds its own arrays.
        """
