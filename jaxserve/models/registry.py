"""Which class serves which architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from jaxserve.core.errors import ConfigError, ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.weight_map import Tensors

WeightMap = Callable[[ModelConfig, Tensors], Iterable[tuple[str, np.ndarray]]]
# (content of config.json, its path for messages) -> fields of ModelConfig that this architecture writes in its own way
ConfigReader = Callable[[Mapping[str, Any], str], Mapping[str, Any]]


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
        config_reader: reads what its ``config.json`` says in its own way, or None.
        draft_prefixes: beginnings of names of tensors that belong to drafts of the model, not to the model.
    """

    architecture: str
    model_class: Callable[..., Any]
    weight_map: WeightMap
    config_reader: ConfigReader | None = None
    draft_prefixes: tuple[str, ...] = ()


_registered: dict[str, RegisteredModel] = {}
_loaded_entry_points: set[str] = set()
ENTRY_POINTS = "jaxserve.models"


def register_model(
    architecture: str,
    model_class: Callable[..., Any],
    weight_map: WeightMap | None = None,
    *,
    config_reader: ConfigReader | None = None,
    draft_prefixes: tuple[str, ...] = (),
) -> None:
    """Makes checkpoints of ``architecture`` load into ``model_class``.

    Args:
        weight_map: default: parameter paths equal tensor names.
        config_reader: fields of ``ModelConfig`` from ``config.json``, where the common keys do not say it all: rotary
            parameters that differ between layers, say. What it does not give is read, and refused, as for any other.
        draft_prefixes: tensors whose names begin so are left alone when the model is loaded.

    Raises:
        ConfigError: the architecture is registered already, or the class lacks ``__call__`` or ``logits``.
    """
    if architecture in _registered:
        taken = _registered[architecture].model_class
        raise ConfigError(f"architecture {architecture!r} is already registered, to {taken!r}; choose another name")
    for method in ("__call__", "logits"):
        if not callable(getattr(model_class, method, None)):
            raise ConfigError(f"model class {model_class!r} needs a method {method}; see jaxserve.models.llama")
    _registered[architecture] = RegisteredModel(
        architecture, model_class, weight_map or same_names, config_reader, draft_prefixes
    )


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


def read_model_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, source: str = "config.json"
) -> ModelConfig:
    """``ModelConfig.from_hf`` with the help of the architecture's own reader, where it has one.

    Raises:
        ModelLoadError: as ``ModelConfig.from_hf``.
    """
    _load_entry_points()
    named = config.get("architectures") or []
    found = _registered.get(named[0]) if len(named) == 1 else None
    own = None if found is None or found.config_reader is None else found.config_reader(config, source)
    return ModelConfig.from_hf(config, generation_config, source, own)
