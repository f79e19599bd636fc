"""A model on a device: weights, KV pool, token relay, fences, and the read-done mailbox."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.attention.base import AttentionBackend
from jaxserve.attention.paged_kv import KVLayout, PagedKV
from jaxserve.barrier.channel import FenceChannel
from jaxserve.barrier.faults import pass_fault
from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import SharedRows
from jaxserve.barrier.tickets import Event
from jaxserve.core.config import EngineConfig
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.runner.captured_steps import CapturedSteps
from jaxserve.runner.completion import CompletionWatcher
from jaxserve.runner.graph_mode import make_graph_mode
from jaxserve.runner.handover import Relay

log = logging.getLogger(__name__)


def plain_relay(num_rows: int, vocab_size: int) -> Relay:
    """The relay of a target model whose lengths the host knows."""
    return Relay(jnp.zeros(num_rows, jnp.int32), jnp.zeros((num_rows, vocab_size), jnp.int32))


def relay_with_lengths(num_rows: int, vocab_size: int) -> Relay:
    """The relay of a target model whose drafts never pass the host."""
    return plain_relay(num_rows, vocab_size)._replace(lengths=jnp.zeros(num_rows, jnp.int32))


class ModelRunner:
    """Device state of one model; step runners launch programs over it.

    Attributes:
        shared_read_done_event: the read-done mailbox. The newest event at which a launch's reads of shared rows end, or
            None, which means: use the full-execution fence. A phase clears it when it starts and may publish one event;
            only the barrier takes it, and only from the worker's ``last_shared_read_runner``.
        pool, relay: KV pool and what one launch leaves for the next by slot: ``Relay`` of a target model, the drafts
            int32[slots + 1, D] of a draft model, or what holds them. Donated to each launch in turn.
        newest_launch: launch id of the program that pool and relay come from; 0 when they are fresh.
        graph: what its programs are compiled and launched with.
        captured: its captured decode and verify steps; None unless ``graph`` captures them.
        has_marker: whether programs hold the barrier's FFI operations.
    """

    def __init__(self, model: LoadedModel, backend: AttentionBackend, rows: SharedRows, kv: KVLayout,
                 config: EngineConfig, platform: str, name: str = "target",
                 make_relay: Callable[[int, int], Any] = plain_relay):  # fmt: skip
        self.model = model
        self.backend = backend
        self.rows = rows
        self.kv = kv
        self.config = config
        self.platform = platform
        self.name = name
        self.has_marker = config.shared_read_marker
        self.shared_read_done_event: Event | None = None
        self.newest_launch = 0
        self._make_relay = make_relay
        self._allocate_device_state()
        self.channel = FenceChannel(platform, rows.write_done, config.fence_timeout_s, name)
        self.captured: CapturedSteps | None = None
        if name != "target":
            # Markers go into the graphs of the target model alone, for drafts are launched with a channel of their own;
            # and only its steps are captured.
            backend_of_drafts = "xla" if config.graph_backend == "cuda-graph" else config.graph_backend
            config = dataclasses.replace(config, graph_snapshot="outside", graph_backend=backend_of_drafts)
        try:
            self.graph = make_graph_mode(config, platform, backend, self.channel.number, model.config)
            if self.graph.captures:
                self.captured = CapturedSteps(native_module(platform))
        except BaseException:
            self.channel.close()  # it would stay open for ever
            raise
        if self.graph.channel is not None:
            rows.write_done.mirror_for_graphs()
        self.watcher = None if self.has_marker else CompletionWatcher()

    def _allocate_device_state(self) -> None:
        pass_fault("allocate", "KV pool")
        self.pool = PagedKV(jnp.zeros(self.kv.shape, self.kv.dtype))
        self.relay = self._make_relay(self.rows.layout.num_slots + 1, self.model.config.vocab_size)

    def take_shared_read_done_event(self) -> Event | None:
        """Reads the mailbox and clears it, so that no later barrier can meet an old event."""
        event = self.shared_read_done_event
        self.shared_read_done_event = None
        return event

    def reset_device_state(self) -> None:
        """Fresh pool and relay, after a failed execution took the donated ones with it."""
        self.newest_launch = 0
        del self.pool, self.relay  # the old pool goes first: there may be no room for two
        self._allocate_device_state()

    def close(self) -> None:
        """Waits for the launch in flight and lets go of the fences. Idempotent."""
        try:
            jax.block_until_ready(self.relay)
        except Exception as error:  # whoever collects the launch is told; here it only has to have ended
            log.warning("the last launch of %s failed: %s", self.name, error)
        if self.watcher is not None:
            self.watcher.close()
            self.watcher = None
        if self.captured is not None:
            self.captured.close()
        self.channel.close()
