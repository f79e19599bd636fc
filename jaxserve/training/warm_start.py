"""Weights of the target as a start for its draft: a day's training for free, where shapes allow."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.models.draft import FINAL
from jaxserve.models.loading.weights import LoadedModel


def warm_start(draft: LoadedModel, target: LoadedModel) -> LoadedModel:
    """The draft with its layers copied from the target's last ones, and its final norm from the target's.

    EAGLE-3: attention reads the features as the copied layer read its input, and the embedding by small random weights;
    ``fc`` begins by passing on the highest state captured. What the target has under other names or in other shapes
    stays random.
    """
    module = draft.bind(draft.leaves)
    decoder, hidden = module.config, module.config.hidden_size
    eagle3 = module.draft.algorithm == "EAGLE3"
    last = target.config.num_layers
    values = dict(zip(draft.paths, draft.leaves, strict=True))
    target_norms = target.leaf("norms")
    norms = values["norms"]
    for index in range(decoder.num_layers):
        source = last - decoder.num_layers + index
        for name in ("o_proj", "down_proj", "gate_up_proj", "qkv_proj"):
            theirs, path = target.leaf(f"layers.{source}.{name}"), f"layers.{index}.{name}"
            if theirs is None:
                continue
            ours = values[path]
            if ours.shape == theirs.shape:
                values[path] = theirs.astype(ours.dtype)
            elif eagle3 and name == "qkv_proj" and ours.shape == (theirs.shape[0], 2 * hidden):
                values[path] = ours.at[:, hidden:].set(theirs.astype(ours.dtype))
        if eagle3 and index == 0 and target_norms is not None and target_norms.shape == (2 * last + 1, hidden):
            norms = norms.at[1].set(target_norms[2 * source]).at[2].set(target_norms[2 * source + 1])
    if target_norms is not None and target_norms.shape[1:] == (hidden,):
        norms = norms.at[-1].set(target_norms[-1])
    values["norms"] = norms.astype(values["norms"].dtype)
    if eagle3:
        values["fc"] = _pass_on(values["fc"], module.feature_points, hidden)
    return dataclasses.replace(draft, leaves=[jnp.asarray(values[path]) for path in draft.paths])


def _pass_on(fc: jax.Array, points: tuple[int, ...], hidden: int) -> jax.Array:
    """Small weights, and the identity on the highest state."""
    highest = max(range(len(points)), key=lambda i: float("inf") if points[i] == FINAL else points[i])
    block = slice(highest * hidden, (highest + 1) * hidden)
    fc = fc * 0.1
    return fc.at[:, block].add(jnp.eye(hidden, dtype=fc.dtype)) if fc.shape[0] == hidden else fc
