"""Loading the multi-token-prediction layers that come with a model."""

from __future__ import annotations

import re
from typing import Any

import jax
from flax import nnx

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.loading.checkpoint import Checkpoint
from jaxserve.models.loading.weights import (
    LoadedModel,
    RecordedTensors,
    abstract_parameters,
    fill_parameters,
    refuse_names,
)
from jaxserve.models.mimo_v2_mtp import MiMoV2MTPLayer, mtp_config, mtp_weight_map

_NUMBER = re.compile(r"model\.mtp\.layers\.(\d+)\.")
_ARCHITECTURE = "MiMoV2FlashForCausalLM"
MTP_PREFIX = "model.mtp."  # of the tensors' names


def has_mtp_layers(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds tensors of MTP layers."""
    return any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors)


def count_mtp_layers(checkpoint: Checkpoint) -> int:
    """How many MTP layers a checkpoint holds.

    Raises:
        ModelLoadError: none, another architecture, or numbers with gaps.
    """
    architecture = checkpoint.model_config.architecture
    if architecture != _ARCHITECTURE:
        raise ModelLoadError(
            f"{checkpoint.path}: MTP layers are read from {_ARCHITECTURE} checkpoints, this is {architecture}"
        )
    numbers = sorted({int(match[1]) for match in map(_NUMBER.match, checkpoint.tensors) if match})
    if not numbers:
        raise ModelLoadError(
            f"{checkpoint.path}: holds no MTP layers (tensors model.mtp.layers.*); they may have been dropped when the "
            "checkpoint was converted: convert it again, or train some with jaxserve train-draft --algorithm mtp"
        )
    if numbers != list(range(len(numbers))):
        raise ModelLoadError(f"{checkpoint.path}: MTP layers must be numbered from 0 without gaps, found {numbers}")
    return len(numbers)


def load_mtp_layers(
    checkpoint: Checkpoint, target: LoadedModel, dtype: Any, num_layers: int | None = None
) -> list[LoadedModel]:
    """The MTP layers in a checkpoint, first the one that drafts the nearest token.

    Args:
        dtype: of the layers' own weights; embedding and head are the target's arrays, not copies.
        num_layers: loads just the first of them; None: all.

    Raises:
        ModelLoadError: the checkpoint has no MTP layers, or not those of ``target``; tensors that are missing, of the
            wrong shape, or unknown.
    """
    there = count_mtp_layers(checkpoint)
    wanted = there if num_layers is None else num_layers
    if wanted > there:
        raise ModelLoadError(f"{checkpoint.path}: {wanted} MTP layers are wanted, it holds {there}")
    if checkpoint.model_config != target.config:
        raise ModelLoadError(
            f"{checkpoint.path}: these MTP layers belong to another model than the one that is served; "
            "give the checkpoint of the model itself"
        )
    names = {name: _NUMBER.match(name) for name in checkpoint.tensors if name.startswith(MTP_PREFIX)}
    concerned = [name for name, match in names.items() if match is None or int(match[1]) < wanted]
    tensors = RecordedTensors(checkpoint.tensors)
    try:
        layers = [_load(number, tensors, target, dtype) for number in range(wanted)]
        refuse_names("tensors that MTP layers do not use", [name for name in concerned if name not in tensors.read])
    except ModelLoadError as error:
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error
    return layers


def _load(number: int, tensors: RecordedTensors, target: LoadedModel, dtype: Any) -> LoadedModel:
    config = mtp_config(target.config)
    graphdef, treedef, wanted = abstract_parameters(MiMoV2MTPLayer, config, dtype)
    found = _shared(target)
    found |= fill_parameters(wanted, mtp_weight_map(config, number, tensors), f"MTP layer {number}")
    return LoadedModel(graphdef, treedef, [found[path] for path in wanted], config)


def _shared(target: LoadedModel) -> dict[str, jax.Array]:
    return {path: leaf for path in ("embed_tokens", "lm_head") if (leaf := target.leaf(path)) is not None}


def abstract_mtp_layer(target: LoadedModel, dtype: Any) -> LoadedModel:
    """An MTP layer whose leaves are shapes and dtypes alone: enough to compile its programs.

    Raises:
        ModelLoadError: the target is of another architecture.
    """
    _check_architecture(target)
    config = mtp_config(target.config)
    graphdef, treedef, leaves = abstract_parameters(MiMoV2MTPLayer, config, dtype)
    return LoadedModel(graphdef, treedef, list(leaves.values()), config)  # type: ignore[arg-type]


def _check_architecture(target: LoadedModel) -> None:
    if target.config.architecture != _ARCHITECTURE:
        raise ModelLoadError(f"MTP layers are made for {_ARCHITECTURE}, the model is {target.config.architecture}")


def dummy_mtp_layers(target: LoadedModel, dtype: Any, num_layers: int, seed: int = 0) -> list[LoadedModel]:
    """MTP layers of the right shapes with random weights: for a training to start from, for tests, and for benchmarks
    without a checkpoint.

    Raises:
        ModelLoadError: the target is of another architecture.
    """
    _check_architecture(target)
    config, layers = mtp_config(target.config), []
    for number in range(num_layers):
        graphdef, state = nnx.split(MiMoV2MTPLayer(config, dtype, nnx.Rngs(seed + number + 1)))
        leaves, treedef = jax.tree.flatten(state)
        made = LoadedModel(graphdef, treedef, leaves, config)
        shared = _shared(target)
        leaves = [shared.get(path, leaf) for path, leaf in zip(made.paths, leaves, strict=True)]
        layers.append(LoadedModel(graphdef, treedef, leaves, config))
    return layers
