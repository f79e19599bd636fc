"""A backend made of two: one for prefill, one for decode and verify."""

from __future__ import annotations

import jax

from jaxserve.attention.base import (
    AttentionBackend,
    AttentionStep,
    SharedReadEnds,
    StepMetadata,
    StepRows,
    StepShape,
    attend_layer,
)
from jaxserve.core.forward_mode import ForwardMode


class HybridBackend(AttentionBackend):
    """Delegates everything, its declaration included, to the children that serve the mode.

    Args:
        prefill: serves EXTEND.
        decode: serves every other mode.
        sliding: serves the layers with a sliding window, in every mode; None leaves them to the other two.
    """

    name = "hybrid"

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, sliding: AttentionBackend | None = None):
        self.prefill = prefill
        self.decode = decode
        self.sliding = sliding
        self.reads_live = any(child.reads_live for child in self._children())  # type: ignore[misc]
        self.width_buckets = any(child.width_buckets for child in self._children())  # type: ignore[misc]
        self.supports_trees = all(child.supports_trees for child in self._children()[1:])  # type: ignore[misc]
        self.supports_sinks = all(child.supports_sinks for child in self._children())  # type: ignore[misc]

    def _children(self) -> list[AttentionBackend]:
        return [child for child in (self.prefill, self.decode, self.sliding) if child is not None]

    def _full(self, mode: ForwardMode) -> AttentionBackend:
        return self.prefill if mode is ForwardMode.EXTEND else self.decode

    def shared_read_ends(self, forward_mode: ForwardMode) -> SharedReadEnds:
        serving = [self._full(forward_mode)] + ([self.sliding] if self.sliding else [])
        return SharedReadEnds.max_of(child.shared_read_ends(forward_mode) for child in serving)

    def prep(self, rows: StepRows, shape: StepShape, num_tokens: jax.Array | None) -> StepMetadata:
        return self._full(shape.mode).prep(rows, shape, num_tokens)

    def attend(
        self, step: AttentionStep, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        child = self._full(step.shape.mode)
        if self.sliding is not None and step.windows[layer] is not None:
            child = self.sliding
        return attend_layer(child, step, layer, q, k, v, sinks)
