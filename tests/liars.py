"""Backends that break their contract, each in one way."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.attention.base import SharedReadEnds
from jaxserve.attention.hybrid import HybridBackend
from jaxserve.attention.xla import PlannedBackend, XlaBackend, XlaLiveBackend


class InWhileLive(XlaLiveBackend):
    """Re-reads both tables in every layer through the barrier's own operation."""

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.IN_REPLAY


class PreWhileLive(XlaLiveBackend):
    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.PRE_REPLAY


class LengthsLive(XlaBackend):
    """Reads the lengths alone, by a plain gather that XLA may place anywhere."""

    reads_live = True

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.IN_REPLAY

    def live_metadata(self, step, layer, after):
        return step.metadata._replace(lengths=step.live.lengths[step.live.slots, 0])


class TablesLiveInWindowedLayers(XlaBackend):
    """Honest in layers that see everything."""

    reads_live = True

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.PRE_REPLAY

    def live_metadata(self, step, layer, after):
        if step.windows[layer] is None:
            return step.metadata
        tables = step.live.block_tables[step.live.slots, : step.shape.table_width]
        return step.metadata._replace(block_tables=tables)


class ReadsBesideTheEnd(XlaBackend):
    """Reads live rows for a side effect of its own, which the end record does not wait for."""

    reads_live = True

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.POST_REPLAY

    def attend(self, step, layer, q, k, v):
        jax.debug.callback(lambda tables: None, step.live.block_tables)
        return super().attend(step, layer, q, k, v)


class HidesLiveReads(XlaLiveBackend):
    """Declares them rightly, but would have them hoisted where there is no marker."""

    reads_live = False

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.POST_REPLAY


class IgnoresWindows(XlaBackend):
    def attend(self, step, layer, q, k, v):
        return XlaBackend().attend(replaced(step, windows=(None,) * len(step.windows)), layer, q, k, v)

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.IN_REPLAY


class IgnoresTrees(XlaBackend):
    """Takes every step of several tokens for a chain, but says that it follows trees."""

    def attend(self, step, layer, q, k, v):
        return XlaBackend().attend(replaced(step, tree=None), layer, q, k, v)

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.IN_REPLAY


class IgnoresSinks(XlaBackend):
    """Takes them, and says that it supports them."""

    supports_sinks = True

    def attend(self, step, layer, q, k, v, sinks=None):
        return super().attend(step, layer, q, k, v)

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.IN_REPLAY


class WritesPadding(XlaBackend):
    """Lets the tokens behind a chunk write to the sequence's pages."""

    def prep(self, rows, shape, num_tokens):
        return super().prep(rows, shape, None)

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.IN_REPLAY


class WritesThePool(XlaBackend):
    """Changes the pool while later layers still read it, so that XLA copies it."""

    def attend(self, step, layer, q, k, v):
        data = step.pool.data.at[layer, 0, 0, 0, 0].set(jnp.float32(q[0, 0, 0, 0]))
        return super().attend(replaced(step, pool=step.pool._replace(data=data)), layer, q, k, v)

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.IN_REPLAY


class Moody(XlaBackend):
    """Answers differently every other time."""

    asked = 0

    def shared_read_ends(self, forward_mode):
        self.asked += 1
        return SharedReadEnds.POST_REPLAY if self.asked % 2 else SharedReadEnds.UNKNOWN


class ForgetsItsParts(HybridBackend):
    """Declares what one of its children declares."""

    def __init__(self):
        super().__init__(PlannedBackend(), PlannedBackend(), sliding=XlaLiveBackend())

    def shared_read_ends(self, forward_mode):
        return self.decode.shared_read_ends(forward_mode)


class DeclaresNothing(XlaBackend):
    """Inherits the base class's answer, which was never about it."""


def replaced(step, **changes):
    return dataclasses.replace(step, **changes)
