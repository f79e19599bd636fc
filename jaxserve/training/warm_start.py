"""Weights of the target as a start for its draft: a day's training for free, where shapes allow."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.models.draft import FINAL
from jaxserve.models.loading.weights import LoadedModel


def warm_start(draft: LoadedModel, target: LoadedModel) -> LoadedModel:
    """The head with its layers copied from the target's last ones, and its final norm from the target's.

    EAGLE-3: attention reads the features as the copied layer read its input, and the embedding by small random weights;
    ``fc`` begins by passing on the highest state captured. EAGLE: see ``_as_eagle``. What the target has under other
    names or in other shapes stays random.
    """
    module = draft.bind(draft.leaves)
    decoder, hidden, algorithm = module.config, module.config.hidden_size, module.draft.algorithm
    last = target.config.num_layers
    values = dict(zip(draft.paths, draft.leaves, strict=True))
    target_norms = target.leaf("norms")
    if target_norms is not None and target_norms.shape != (2 * last + 1, hidden):
        target_norms = None
    norms = values["norms"]
    for index in range(decoder.num_layers):
        source = last - decoder.num_layers + index
        for name in ("o_proj", "down_proj", "gate_up_proj", "qkv_proj"):
            theirs, path = target.leaf(f"layers.{source}.{name}"), f"layers.{index}.{name}"
            if theirs is None:
                continue
            ours = values[path]
            if ours.shape == theirs.shape:
                values[path] = _as_eagle(name, ours, theirs) if algorithm == "EAGLE" else theirs.astype(ours.dtype)
            elif algorithm == "EAGLE3" and name == "qkv_proj" and ours.shape == (theirs.shape[0], 2 * hidden):
                values[path] = ours.at[:, hidden:].set(theirs.astype(ours.dtype))
        if algorithm == "EAGLE3" and index == 0 and target_norms is not None:
            norms = norms.at[1].set(target_norms[2 * source]).at[2].set(target_norms[2 * source + 1])
    if target_norms is not None and algorithm != "EAGLE":  # which has no norm behind its layers
        norms = norms.at[-1].set(target_norms[-1])
    values["norms"] = norms.astype(values["norms"].dtype)
    if algorithm == "EAGLE3":
        values["fc"] = _pass_on(values["fc"], _highest(module.feature_points) * hidden)
    elif algorithm == "EAGLE":
        values["fc"] = _pass_on(values["fc"], hidden)
    return dataclasses.replace(draft, leaves=[jnp.asarray(values[path]) for path in draft.paths])


def _as_eagle(name: str, ours: jax.Array, theirs: jax.Array) -> jax.Array:
    """A layer's matrix as an EAGLE head begins with it.

    The head's residual stream is made of states behind the target's final norm, some twenty times smaller than those
    the target's layer adds to, and its attention has no norm before it: copied as it is, the layer drowns what it
    should add to (SmolLM2: a loss of 106, against 2.2 of random weights and 1.2 of this). So the head reads in the
    directions in which the target's layer reads, in the size of new weights, and at first it adds nothing.
    """
    if name in ("o_proj", "down_proj"):
        return jnp.zeros_like(ours)
    return (theirs * (jnp.std(ours) / jnp.std(theirs))).astype(ours.dtype)


def warm_start_mtp(layer: LoadedModel, target: LoadedModel) -> LoadedModel:
    """The MTP layer with attention and MLP copied from the last layers of the target that are of its kinds, and its
    final norm from the target's.

    Its attention has a sliding window and its MLP is dense; the target may have the two in different layers, or not at
    all: then they stay random. ``eh_proj`` begins by passing on the target's state.
    """
    values = dict(zip(layer.paths, layer.leaves, strict=True))
    module, decoder = layer.bind(layer.leaves), target.bind(target.leaves)
    norms, theirs = values["norms"], decoder.norms[...]
    sliding = [i for i, each in enumerate(decoder.layers) if each.kind == module.layer.kind]
    dense = [i for i, each in enumerate(decoder.layers) if each.router is None]
    for sources, names, place in (
        (sliding, ("qkv_proj", "qkv_bias", "o_proj", "sinks"), 0),
        (dense, ("gate_up_proj", "down_proj"), 1),
    ):
        if not sources:
            continue
        for name in names:
            leaf = target.leaf(f"layers.{sources[-1]}.{name}")
            if leaf is not None:
                values[f"layer.{name}"] = leaf
        norms = norms.at[2 + place].set(theirs[2 * sources[-1] + place])
    values["norms"] = norms.at[-1].set(theirs[-1])
    values["eh_proj"] = _pass_on(values["eh_proj"], target.config.hidden_size)
    return dataclasses.replace(layer, leaves=[jnp.asarray(values[path]) for path in layer.paths])


def _highest(points: tuple[int, ...]) -> int:
    """Which of the states captured comes last in the target."""
    return max(range(len(points)), key=lambda i: float("inf") if points[i] == FINAL else points[i])


def _pass_on(projection: jax.Array, start: int) -> jax.Array:
    """Small weights, and the identity on the columns from ``start`` on."""
    size = projection.shape[0]
    return (projection * 0.1).at[:, start : start + size].add(jnp.eye(size, dtype=projection.dtype))
