"""Model parameters on the device, as the flat list the runner hands to its programs.

Passing a flat list costs far less per call than passing an ``nnx.Module``, so the module is taken apart once here and
put together again inside ``jax.jit``, where it costs nothing::

    loaded = load_model(open_checkpoint(path), jnp.float32)

    @jax.jit
    def program(leaves, token_ids, positions):
        model = loaded.bind(leaves)
        return model.logits(model(token_ids, positions, attend))

    program(loaded.leaves, token_ids, positions)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.checkpoint import Checkpoint
from jaxserve.models.registry import registered_model_for

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a buffer old checkpoints carry; computed from the config here
_NUM_NAMED = 5  # most tensors listed in an error


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model taken apart.

    Attributes:
        graphdef: structure of the module (``nnx.split``).
        treedef: structure of its state; ``leaves`` are in the order of ``jax.tree.leaves(state)``.
        leaves: the parameters.
        config: what the checkpoint says about the model.
    """

    graphdef: Any
    treedef: Any
    leaves: list[jax.Array] = field(repr=False)
    config: ModelConfig

    def bind(self, leaves: list[jax.Array]) -> Any:
        """The module holding ``leaves``; meant for use inside ``jax.jit``."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    @property
    def paths(self) -> list[str]:
        """Parameter path of each leaf, such as ``layers.0.o_proj``."""
        numbered = jax.tree.unflatten(self.treedef, range(len(self.leaves)))
        return [_path_text(path) for path, _ in jax.tree.flatten_with_path(numbered)[0]]

    def leaf(self, path: str) -> jax.Array | None:
        """The array at a parameter path, itself and no copy; None when the model has no such parameter."""
        paths = self.paths
        return self.leaves[paths.index(path)] if path in paths else None


def load_model(checkpoint: Checkpoint, dtype: Any) -> LoadedModel:
    """Fills the registered model class from a checkpoint, cast to ``dtype``.

    No parameter is ever left at a random value.

    Raises:
        ModelLoadError: an unknown architecture; a tensor that is missing, of the wrong shape, or not used by the model.
            A head beside a tied embedding, rotary buffers and the tensors of drafts may be present and are ignored.
    """
    config = checkpoint.model_config
    registered = registered_model_for(config)
    graphdef, treedef, wanted = abstract_parameters(registered.model_class, config, dtype)
    tensors = RecordedTensors(checkpoint.tensors)
    try:
        found = fill_parameters(wanted, registered.weight_map(config, tensors), config.architecture)
        refuse_names("parameters without a tensor", [path for path in wanted if path not in found])
        unused = [n for n in tensors if n not in tensors.read and not n.endswith(IGNORED_SUFFIX)]
        unused = [n for n in unused if not n.startswith(registered.draft_prefixes)]
        refuse_names(
            f"tensors that {config.architecture} does not use",
            [n for n in unused if not (config.tie_word_embeddings and n == "lm_head.weight")],
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error
    return LoadedModel(graphdef, treedef, [found[path] for path in wanted], config)


def dummy_model(config: ModelConfig, dtype: Any, seed: int = 0) -> LoadedModel:
    """A model of the right shapes with random weights, for tests and benchmarks without a checkpoint.

    Raises:
        ModelLoadError: an unknown architecture.
    """
    model = registered_model_for(config).model_class(config, dtype, nnx.Rngs(seed))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return LoadedModel(graphdef, treedef, leaves, config)


def abstract_model(config: ModelConfig, dtype: Any) -> LoadedModel:
    """A model whose leaves are shapes and dtypes alone: enough to compile its programs; allocates nothing.

    Raises:
        ModelLoadError: an unknown architecture.
    """
    graphdef, treedef, leaves = abstract_parameters(registered_model_for(config).model_class, config, dtype)
    return LoadedModel(graphdef, treedef, list(leaves.values()), config)  # type: ignore[arg-type]


def abstract_parameters(model_class: Any, config: Any, dtype: Any) -> tuple[Any, Any, dict[str, jax.ShapeDtypeStruct]]:
    """Structure of the model and its parameters by path, in the order of the leaves; allocates nothing."""
    model = nnx.eval_shape(lambda: model_class(config, dtype, nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    with_paths, treedef = jax.tree.flatten_with_path(state)
    return graphdef, treedef, {_path_text(path): leaf for path, leaf in with_paths}


def fill_parameters(
    wanted: Mapping[str, jax.ShapeDtypeStruct], pairs: Iterable[tuple[str, np.ndarray]], model_name: str
) -> dict[str, jax.Array]:
    """Parameters on the device by path, from what a weight map yields, cast to the dtypes of ``wanted``.

    Raises:
        ModelLoadError: a path that comes twice or that the model does not have, or a wrong shape.
    """
    found: dict[str, jax.Array] = {}
    for path, value in pairs:
        if path in found:
            raise ModelLoadError(f"the weight map gives parameter {path} twice")
        if path not in wanted:
            raise ModelLoadError(f"{path} is not a parameter of {model_name}")
        if value.shape != wanted[path].shape:
            raise ModelLoadError(
                f"parameter {path} has shape {list(value.shape)}, the model wants {list(wanted[path].shape)}"
            )
        found[path] = _on_device(value, wanted[path].dtype)
    return found


def _path_text(path: tuple[Any, ...]) -> str:
    # The last key of a Variable's leaf is its value, which is no part of the name.
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path]
    return ".".join(str(key) for key in keys if key not in ("value", "raw_value", None))


def _on_device(value: np.ndarray, dtype: Any) -> jax.Array:
    if not np.issubdtype(value.dtype, np.number) and value.dtype.name != "bfloat16":
        raise ModelLoadError(f"weights must be numbers, got dtype {value.dtype}")
    # JAX on CPU may keep using the memory it is given; a mapped file could change under it.
    owned = value.flags.owndata and value.flags.c_contiguous and value.dtype == dtype
    return jax.device_put(value if owned else np.array(value, dtype=dtype, order="C"))


def refuse_names(what: str, names: list[str]) -> None:
    """Raises ModelLoadError that lists the first of ``names``, if there are any."""
    if names:
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        raise ModelLoadError(f"{what}: {', '.join(names[:_NUM_NAMED])}{more}")


class RecordedTensors(Mapping[str, np.ndarray]):
    """Tensors that remember which of them were read."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = tensors
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise ModelLoadError(f"tensor {name} is missing from the checkpoint")
        self.read.add(name)
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
