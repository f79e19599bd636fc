"""Heads in training: EAGLE, EAGLE-3 and DFLASH, drafts of one or a few layers with a checkpoint of their own."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.draft import FINAL
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.loading.draft import init_draft, save_draft
from jaxserve.models.loading.token_map import TOKEN_MAP_FILE, with_token_map
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.training.losses import Batch, Guesses, dflash_guesses, eagle3_guesses, eagle_guesses
from jaxserve.training.settings import TrainSettings
from jaxserve.training.student import Parameters, Student
from jaxserve.training.warm_start import warm_start

_TEACHER = "teacher_head"


class HeadStudent(Student):
    """A head that begins as its target ends.

    Attributes:
        shared: parameters that are the target's, by path.
        has_vocabulary: whether its checkpoint says which ids it knows.
    """

    target_class = LlamaForCausalLM
    shared: ClassVar[tuple[str, ...]] = ("embed_tokens", "target_ids", "lm_head")
    has_vocabulary: ClassVar[bool] = True

    def __init__(self, settings: TrainSettings, target: LoadedModel, ids: np.ndarray | None):
        """
        Args:
            ids: Int[n], the target ids it learns to guess, rising; None: all.
        """
        self._settings, self.target_ids = settings, ids
        draft = init_draft(
            settings.algorithm, target, jnp.float32, num_layers=settings.num_layers,
            intermediate_size=settings.intermediate_size, target_ids=ids if self.has_vocabulary else None,
            block_size=settings.block_size, mask_token_id=settings.mask_token_id, seed=settings.seed,
            feature_points=self._points(target.config.num_layers),
        )  # fmt: skip
        self._saved = warm_start(draft, target)
        # What a head without a vocabulary of its own learns to guess is cut for the training alone.
        self._draft = self._saved if ids is None or self.has_vocabulary else with_token_map(self._saved, ids)
        self.feature_points = self._draft.bind(self._draft.leaves).feature_points
        named = dict(zip(self._draft.paths, self._draft.leaves, strict=True))
        self.fixed = {path: leaf for path, leaf in named.items() if path in self.shared}
        self.trained = {path: leaf for path, leaf in named.items() if path not in self.shared}
        self.decay = settings.step_decay

    @property
    def trained_steps(self) -> int | None:
        """Guesses in a row it is trained for, where they are one after the other."""
        return self._settings.draft_steps

    def _points(self, num_target_layers: int) -> tuple[int, ...] | None:
        """The states asked for, by the layers they come out of; None: the algorithm's usual ones."""
        layers = self._settings.target_layers
        return None if layers is None else tuple(layer + 1 for layer in layers)

    def _model(self, values: Parameters) -> Any:
        return self._draft.bind([values[path] for path in self._draft.paths])

    def save(self, folder: Path, values: Parameters) -> Path:
        named = zip(self._saved.paths, self._saved.leaves, strict=True)
        leaves = [values[path] if path in self.trained else leaf for path, leaf in named]
        saved = dataclasses.replace(self._saved, leaves=leaves)
        save_draft(folder, saved, jnp.bfloat16, trained_steps=self.trained_steps)
        if self.target_ids is not None and not self.has_vocabulary:
            (folder / TOKEN_MAP_FILE).write_text(json.dumps(self.target_ids.tolist()) + "\n", encoding="utf-8")
        return folder / "model.safetensors"


class EagleStudent(HeadStudent):
    """An EAGLE head, which uses the target's own: its loss compares the scores of the ids it learns to guess, and a
    token map beside the checkpoint names them, for it to draft no others."""

    has_vocabulary = False

    def guesses(self, values: Parameters, batch: Batch, key: jax.Array) -> Guesses:
        settings = self._settings
        return eagle_guesses(self._model(values), batch, settings.draft_steps, settings.cross_entropy_weight)


class Eagle3Student(HeadStudent):
    """An EAGLE-3 head, whose own head is trained as well."""

    shared = ("embed_tokens", "target_ids")

    def __init__(self, settings: TrainSettings, target: LoadedModel, ids: np.ndarray | None):
        super().__init__(settings, target, ids)
        head = target.leaf("lm_head")
        head = target.leaf("embed_tokens") if head is None else head
        assert head is not None
        self.fixed[_TEACHER] = head if ids is None else head[ids]

    def guesses(self, values: Parameters, batch: Batch, key: jax.Array) -> Guesses:
        return eagle3_guesses(self._model(values), values[_TEACHER], batch, self._settings.draft_steps)


class DflashStudent(HeadStudent):
    """A DFLASH head; it scores by the target's."""

    def __init__(self, settings: TrainSettings, target: LoadedModel, ids: np.ndarray | None):
        super().__init__(settings, target, ids)
        self.decay = math.exp(-1 / settings.block_decay)

    @property
    def trained_steps(self) -> int | None:
        return None

    def _points(self, num_target_layers: int) -> tuple[int, ...] | None:
        points = super()._points(num_target_layers)
        if points is None:
            return None
        # The published layout takes the last layer's output normed.
        return tuple(FINAL if point == num_target_layers else point for point in points)

    def guesses(self, values: Parameters, batch: Batch, key: jax.Array) -> Guesses:
        settings = self._settings
        return dflash_guesses(self._model(values), batch, min(settings.anchors, settings.sequence_length), key)
