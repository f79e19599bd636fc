"""Helpers for weight maps: checkpoint tensors, checked by name and shape, to model parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxserve.core.errors import ModelLoadError

Tensors = Mapping[str, np.ndarray]


def take(tensors: Tensors, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor ``name``.

    Raises:
        ModelLoadError: it is missing, or has another shape; names it.
    """
    if name not in tensors:
        raise ModelLoadError(f"tensor {name} is missing from the checkpoint; wanted shape {list(shape)}")
    tensor = tensors[name]
    if tensor.shape != shape:
        raise ModelLoadError(f"tensor {name} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
    return tensor


def take_rows(tensors: Tensors, rows: Mapping[str, int], num_columns: int) -> np.ndarray:
    """Tensors of ``num_columns`` columns stacked on top of each other, as fused projections want them.

    Args:
        rows: tensor name -> its number of rows, in order.

    Raises:
        ModelLoadError: as ``take``.
    """
    return np.concatenate([take(tensors, name, (n, num_columns)) for name, n in rows.items()])
