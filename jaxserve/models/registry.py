"""Which class serves which architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from jaxserve.core.errors import ConfigError, ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.weight_map import Tensors

WeightMap = Callable[[ModelConfig, Tensors], Iterable[tuple[str, np.ndarray]]]


def same_names(config: ModelConfig, tensors: Tensors) -> Iterable[tuple[str, np.ndarray]]:
    """The weight map of a model whose parameter paths are the checkpoint's tensor names."""
    return ((name, tensors[name]) for name in tensors)


@dataclass(frozen=True)
class RegisteredModel:
    """A model class and how its parameters are found in a checkpoint.

    Attributes:
        architecture: name in ``config.json``.
        model_class: ``nnx.Module`` made by ``model_class(config, dtype, rngs)``; called with
            ``(token_ids, positions, attend)`` and asked for ``logits(hidden)``.
        weight_map: yields (parameter path such as ``layers.0.o_proj``, array) for every parameter, from the tensors.
    """

    architecture: str
    model_class: Callable[..., Any]
    weight_map: WeightMap


_registered: dict[str, RegisteredModel] = {}
_loaded_entry_points: set[str] = set()
ENTRY_POINTS = "jaxserve.models"


def register_model(architecture: str, model_class: Callable[..., Any], weight_map: WeightMap | None = None) -> None:
    """Makes checkpoints of ``architecture`` load into ``model_class``.

    Args:
        weight_map: default: parameter paths equal tensor names.

    Raises:
        ConfigError: the architecture is registered already, or the class lacks ``__call__`` or ``logits``.
    """
    if architecture in _registered:
        taken = _registered[architecture].model_class
        raise ConfigError(f"architecture {architecture!r} is already registered, to {taken!r}; choose another name")
    for method in ("__call__", "logits"):
        if not callable(getattr(model_class, method, None)):
            raise ConfigError(f"model class {model_class!r} needs a method {method}; see jaxserve.models.llama")
    _registered[architecture] = RegisteredModel(architecture, model_class, weight_map or same_names)


def _load_entry_points() -> None:
    """Lets installed packages register models: each entry point names a function that calls ``register_model``."""
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name not in _loaded_entry_points:
            _loaded_entry_points.add(entry.name)
            entry.load()()


def model_class_for(config: ModelConfig) -> Callable[..., Any]:
    """The class that serves ``config.architecture``.

    Raises:
        ModelLoadError: as ``registered_model_for``.
    """
    return registered_model_for(config).model_class


def registered_model_for(config: ModelConfig) -> RegisteredModel:
    """The registration that serves ``config.architecture``.

    Raises:
        ModelLoadError: nothing registered under that name; lists what is.
    """
    _load_entry_points()
    found = _registered.get(config.architecture)
    if found is None:
        raise ModelLoadError(
            f"architecture {config.architecture!r} is not known; known: {', '.join(sorted(_registered))}; "
            "add yours with jaxserve.register_model"
        )
    return found
