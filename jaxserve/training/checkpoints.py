"""The state of a training on disk: one file, replaced as a whole, so that a kill at any moment leaves a whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxserve.core.errors import ConfigError


class Saved(NamedTuple):
    """A training as it was.

    Attributes:
        step: steps done.
        arrays: leaves of parameters and optimizer, by number.
        history: what was measured so far.
    """

    step: int
    arrays: list[np.ndarray]
    history: list[dict[str, Any]]


def save(path: Path, state: Any, step: int, history: list[dict[str, Any]], identity: dict[str, Any]) -> None:
    """Writes the leaves of ``state`` and the rest; ``identity`` says which training it is."""
    arrays = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}
    metadata = {"identity": json.dumps(identity), "step": str(step), "history": json.dumps(history)}
    partial = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, partial, metadata)
    partial.replace(path)


def restore(path: Path, identity: dict[str, Any]) -> Saved | None:
    """The state saved last; None when there is none.

    Raises:
        ConfigError: it is damaged, or of a training with other settings or data.
    """
    if not path.is_file():
        return None
    remedy = "delete it to train anew, or choose another --output"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            found = json.loads(metadata["identity"])
            saved = Saved(
                int(metadata["step"]),
                [file.get_tensor(str(number)) for number in range(len(file.keys()))],
                json.loads(metadata["history"]),
            )
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a checkpoint of a training ({error}); {remedy}") from error
    for key in dict.fromkeys([*identity, *found]):
        if found.get(key) != identity.get(key):
            raise ConfigError(
                f"{path}: a training with {key} {found.get(key)} was begun here, this one has "
                f"{identity.get(key)}; {remedy}"
            )
    return saved
