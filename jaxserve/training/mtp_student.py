"""MTP layers in training: those of a MiMo-V2-Flash, which end up beside the tensors of their target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.models.loading.checkpoint import Checkpoint
from jaxserve.models.loading.mtp import count_mtp_layers, dummy_mtp_layers, has_mtp_layers, load_mtp_layers
from jaxserve.models.loading.mtp_files import save_with_mtp_layers
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.models.mimo_v2_flash import MiMoV2FlashForCausalLM
from jaxserve.training.losses import Batch, Guesses, mtp_guesses
from jaxserve.training.report import JSON_FILE
from jaxserve.training.settings import TrainSettings
from jaxserve.training.student import Parameters, Student
from jaxserve.training.warm_start import warm_start_mtp

_SHARED = ("embed_tokens", "lm_head")


class MtpStudent(Student):
    """As many MTP layers as asked for, trained side by side: none reads what another makes.

    Where the checkpoint has some, they are where these begin; further ones begin as the target ends.
    """

    target_class = MiMoV2FlashForCausalLM

    def __init__(self, settings: TrainSettings, target: LoadedModel, checkpoint: Checkpoint):
        """
        Args:
            checkpoint: the target's, a folder.

        Raises:
            ModelLoadError: MTP layers in it that are damaged.
        """
        self._checkpoint, wanted = checkpoint, settings.num_layers
        there = min(count_mtp_layers(checkpoint), wanted) if has_mtp_layers(checkpoint) else 0
        known = load_mtp_layers(checkpoint, target, jnp.float32, there) if there else []
        random = dummy_mtp_layers(target, jnp.float32, wanted, settings.seed)[there:]
        self._layers = [*known, *(warm_start_mtp(layer, target) for layer in random)]
        self.feature_points = self._layers[0].bind(self._layers[0].leaves).feature_points
        self.trained, self.fixed = {}, {}
        for number, layer in enumerate(self._layers):
            for path, leaf in zip(layer.paths, layer.leaves, strict=True):
                (self.fixed if path in _SHARED else self.trained)[_path(number, path)] = leaf
        self.decay = 1.0  # no layer's weights feel the others' losses

    def guesses(self, values: Parameters, batch: Batch, key: jax.Array) -> Guesses:
        return mtp_guesses([layer.bind(layer.leaves) for layer in self._with(values)], batch)

    def save(self, folder: Path, values: Parameters) -> Path:
        return save_with_mtp_layers(folder, self._checkpoint, self._with(values), jnp.bfloat16, (JSON_FILE,))

    def _with(self, values: Parameters) -> list[LoadedModel]:
        return [
            dataclasses.replace(layer, leaves=[values[_path(number, path)] for path in layer.paths])
            for number, layer in enumerate(self._layers)
        ]


def _path(number: int, path: str) -> str:
    """Of a parameter among those of all layers."""
    return path if path in _SHARED else f"{number}.{path}"
