"""Loading the multi-token-prediction layers that come with a model."""

from __future__ import annotations

import re
from typing import Any

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


def load_mtp_layers(checkpoint: Checkpoint, target: LoadedModel, dtype: Any) -> list[LoadedModel]:
    """The MTP layers in a checkpoint, first the one that drafts the nearest token.

    Args:
        dtype: of the layers' own weights; embedding and head are the target's arrays, not copies.

    Raises:
        ModelLoadError: the checkpoint has no MTP layers, or not those of ``target``; tensors that are missing, of the
            wrong shape, or unknown.
    """
    config = checkpoint.model_config
    if config.architecture != _ARCHITECTURE:
        raise ModelLoadError(
            f"{checkpoint.path}: MTP layers are read from {_ARCHITECTURE} checkpoints, this is {config.architecture}"
        )
    if config != target.config:
        raise ModelLoadError(
            f"{checkpoint.path}: these MTP layers belong to another model than the one that is served; "
            "give the checkpoint of the model itself"
        )
    names = {name: _NUMBER.match(name) for name in checkpoint.tensors if name.startswith("model.mtp.")}
    numbers = sorted({int(match[1]) for match in names.values() if match})
    if not numbers:
        raise ModelLoadError(
            f"{checkpoint.path}: holds no MTP layers (tensors model.mtp.layers.*); they may have been dropped when the "
            "checkpoint was converted"
        )
    tensors = RecordedTensors(checkpoint.tensors)
    try:
        if numbers != list(range(len(numbers))):
            raise ModelLoadError(f"MTP layers must be numbered from 0 without gaps, found {numbers}")
        layers = [_load(number, tensors, target, dtype) for number in numbers]
        refuse_names("tensors that MTP layers do not use", [name for name in names if name not in tensors.read])
    except ModelLoadError as error:
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error
    return layers


def _load(number: int, tensors: RecordedTensors, target: LoadedModel, dtype: Any) -> LoadedModel:
    config = mtp_config(target.config)
    graphdef, treedef, wanted = abstract_parameters(MiMoV2MTPLayer, config, dtype)
    found = {path: leaf for path in ("embed_tokens", "lm_head") if (leaf := target.leaf(path)) is not None}
    found |= fill_parameters(wanted, mtp_weight_map(config, number, tensors), f"MTP layer {number}")
    return LoadedModel(graphdef, treedef, [found[path] for path in wanted], config)
