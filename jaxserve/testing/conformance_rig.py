"""Runs a backend's real step programs and poisons shared tables as soon as its declaration allows it.

The programs, the runner, the tickets and the schedule stream are the engine's own; only the model is tiny. The backend
is wrapped so that each layer passes a hold point before it runs, and so that what it finds in ``step.live`` is what
lies in the shared buffers *after* that hold point: XLA may schedule a read of live rows late, so here it does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.attention.base import (
    AttentionBackend,
    AttentionStep,
    SharedReadEnds,
    StepMetadata,
    StepRows,
    StepShape,
    attend_layer,
)
from jaxserve.attention.paged_kv import KVLayout, PagedKV
from jaxserve.barrier import ops
from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import RowLayout, SharedRows
from jaxserve.barrier.tickets import TICKET_WORDS, Event
from jaxserve.core.config import EngineConfig
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.weights import LoadedModel, dummy_model
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.handover import Relay
from jaxserve.runner.launch import Launch
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.sampling_rows import CONTROLS, WANTS_LOGPROBS
from jaxserve.runner.step_program import DraftForm
from jaxserve.runner.step_runner import StepRunner

MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND)
LAYER_POINT = "conformance.before_layer"
TIMEOUT_S = 20.0
LONGEST_HOLD_S = 1.0  # of a layer, for a fence that should come before it
GATE_S = 0.03  # how long a layer is held for a fence that should come only after it
SNAPSHOT_STALL_US = 1000
DEVICE_STALL_US = 20_000
SLOTS, CONTEXT, VERIFY_TOKENS, CHUNK, CHUNK_USED = 4, 64, 4, 8, 6
LIVE_SLOTS = np.array([2, 0, 3], np.int32)  # one row of the batch bucket stays padding

Outcome = dict[str, np.ndarray]


def tiny_model_config(head_dim: int) -> ModelConfig:
    """Two layers, the second with a sliding window; grouped queries."""
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": head_dim, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8,
    }  # fmt: skip
    return ModelConfig.from_hf(raw, {}, source="conformance")


@functools.cache
def tiny_model(dtype: Any, head_dim: int) -> LoadedModel:
    """The model of every rig; weights are never written, so one will do."""
    return dummy_model(tiny_model_config(head_dim), dtype)


class WatchedBackend(AttentionBackend):
    """A backend whose layers can be held and whose questions are counted.

    Attributes:
        asked: the modes it was asked about since somebody cleared the list.
    """

    def __init__(self, backend: AttentionBackend):
        self.backend = backend
        self.name = backend.name  # type: ignore[misc]
        self.reads_live = backend.reads_live  # type: ignore[misc]
        self.width_buckets = backend.width_buckets  # type: ignore[misc]
        self.supports_sinks = backend.supports_sinks  # type: ignore[misc]
        self.asked: list[ForwardMode] = []

    def shared_read_ends(self, forward_mode: ForwardMode) -> SharedReadEnds:
        self.asked.append(forward_mode)
        return self.backend.shared_read_ends(forward_mode)

    def prep(self, rows: StepRows, shape: StepShape, num_tokens: jax.Array | None) -> StepMetadata:
        return self.backend.prep(rows, shape, num_tokens)

    def attend(
        self, step: AttentionStep, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        passed = ops.hold(LAYER_POINT, q, step.metadata.lengths)
        live = step.live
        rows = jnp.arange(live.block_tables.shape[0], dtype=jnp.int32) + passed
        # Dropped from the program unless the backend uses them.
        _, (tables, lengths) = ops.snapshot(
            jnp.zeros(TICKET_WORDS, jnp.uint32), rows, [live.block_tables, live.lengths],
            num_rows=rows.shape[0], widths=[live.block_tables.shape[1], 1],
        )  # fmt: skip
        late = dataclasses.replace(step, live=live.replaced(tables, lengths))
        return attend_layer(self.backend, late, layer, q + passed.astype(q.dtype), k, v, sinks)


class Rig:
    """One backend over a tiny model, with real shared rows.

    Attributes:
        is_synchronous: whether JAX was seen to run a program on the calling thread (host callbacks make it do so),
            where nothing can be overwritten while it runs.

    Raises:
        ConfigError: the native extension is missing.
    """

    def __init__(self, backend: AttentionBackend, page_size: int = 4, dtype: Any = jnp.float32, head_dim: int = 16):
        platform = jax.default_backend()
        self._points = native_module(platform).hold_points
        config = EngineConfig(
            model="conformance", page_size=page_size, context_length=CONTEXT, max_running_requests=SLOTS,
            hold_points=True, fence_timeout_s=TIMEOUT_S, race_check=False,
        )  # fmt: skip
        self.model = tiny_model(jnp.dtype(dtype), head_dim)
        width = CONTEXT // page_size
        self.layout = RowLayout(SLOTS, width, num_drafts=VERIFY_TOKENS - 1)
        model = self.model.config
        self.kv = KVLayout(
            model.num_layers, model.num_kv_heads, model.head_dim, SLOTS * width + 2, page_size, jnp.dtype(dtype)
        )
        self.rows = SharedRows(self.layout, platform, TIMEOUT_S)
        self.watched = WatchedBackend(backend)
        self.runner = ModelRunner(self.model, self.watched, self.rows, self.kv, config, platform, name="conformance")
        buckets = Buckets((SLOTS,), (CHUNK,), (CONTEXT,), (VERIFY_TOKENS,), {CHUNK: SLOTS})
        drafts = DraftForm(is_tree=backend.supports_trees)
        self.steps = StepRunner(self.runner, buckets, lambda label: None, drafts=drafts)
        self.is_synchronous = False
        # On a GPU the dispatching thread passes hold points, and a delay stalls the device: a gate would stop the host.
        self._device_stall_us = 0 if platform == "cpu" else DEVICE_STALL_US
        self._random = np.random.default_rng(11)
        self.right, self.poison = self._tables()
        self._pool = self._random.standard_normal(self.kv.shape).astype(np.float32)
        self._pool[:, :, :, -1] *= 4.0  # the page that poisoned block tables name
        self._pool[:, :, :, 0] = 0.0
        self._token_counts = self._random.integers(0, 3, self.runner.relay.token_counts.shape).astype(np.int32)
        self._drafts_settled = False

    def _settle_drafts(self) -> None:
        """Makes the drafts those that the model accepts: whoever reads others gets other results."""
        self._drafts_settled = True
        accepted_nodes = [1, 3] if self.steps.drafts.is_tree else [1, 2, 3]
        for place, node in enumerate(accepted_nodes):
            launch, _ = self.launch(ForwardMode.TARGET_VERIFY)
            self.right["draft_tokens"][LIVE_SLOTS, node - 1] = launch.collect().tokens[:, place]
            self.rows.stream.sync()

    def close(self) -> None:
        """Waits for what runs and lets go of the fences."""
        self._points.clear()
        self.runner.close()

    def _tables(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Contents every step should see, and garbage: valid everywhere, so that a wrong read changes results only."""
        width, null = self.layout.table_width, self.layout.null_slot
        pages = self._random.permutation(np.arange(1, SLOTS * width + 1)).reshape(SLOTS, width)
        batch = np.full((1, SLOTS), null)
        batch[0, : len(LIVE_SLOTS)] = LIVE_SLOTS
        lengths = np.array([[9], [26], [17], [30], [0]])
        floats = np.tile([[0.8, 0.95, 0.0, 0.5, 0.3, 1.3, 0.0, 0.0]], (SLOTS + 1, 1))
        flags = WANTS_LOGPROBS | CONTROLS
        ints = np.array([[20, 100 + slot, 7, flags, 20, 0, 0, 0] for slot in range(SLOTS + 1)])
        _, num_ids, _ = self.layout.shapes()["bias_ids"]
        _, num_values, _ = self.layout.shapes()["bias_values"]
        right = {
            "batch_slots": batch,
            "block_tables": np.vstack([pages, np.zeros((1, width))]),
            "lengths": lengths,
            "sampling_floats": floats,
            "sampling_ints": ints,
            "bias_ids": self._random.integers(0, 96, (SLOTS + 1, num_ids)) + np.where(np.arange(num_ids) % 16, 96, 0),
            "bias_values": self._random.standard_normal((SLOTS + 1, num_values)) * 3.0,
            "draft_tokens": self._random.integers(0, 96, (SLOTS + 1, VERIFY_TOKENS - 1)),
            "draft_parents": np.tile([[0, 0, 1] if self.steps.drafts.is_tree else [0, 1, 2]], (SLOTS + 1, 1)),
        }
        poison = {
            "batch_slots": np.roll(batch[:, ::-1], 1),
            "block_tables": np.full((SLOTS + 1, width), self.kv.num_pages - 1),
            "lengths": (lengths + 21) % 50,
            "sampling_floats": np.tile([[3.0, 0.3, 0.0, 2.0, 2.0, 0.2, 0.0, 0.0]], (SLOTS + 1, 1)),
            "sampling_ints": np.array([[0, 31 * slot + 5, 3, CONTROLS, 99, 0, 0, 0] for slot in range(SLOTS + 1)]),
            "bias_ids": self._random.integers(0, 96, (SLOTS + 1, num_ids)),
            "bias_values": self._random.standard_normal((SLOTS + 1, num_values)) * 30.0,
            "draft_tokens": self._random.integers(0, 96, (SLOTS + 1, VERIFY_TOKENS - 1)),
            "draft_parents": np.tile([[0, 1, 0] if self.steps.drafts.is_tree else [-1, -1, -1]], (SLOTS + 1, 1)),
        }
        kinds = {name: dtype for name, (_, _, dtype) in self.layout.shapes().items()}
        return tuple(  # type: ignore[return-value]
            {name: np.ascontiguousarray(values, kinds[name]) for name, values in tables.items()}
            for tables in (right, poison)
        )

    # -- one launch ------------------------------------------------------------------------------------------------

    def _batch(self, mode: ForwardMode) -> StepBatch:
        random = np.random.default_rng(3)
        if mode is ForwardMode.EXTEND:
            counts = np.array([CHUNK_USED, CHUNK_USED - 2, 1], np.int32)
            tokens = random.integers(0, 96, (len(counts), CHUNK_USED)).astype(np.int32)
            return StepBatch(1, mode, ("a", "b", "c"), LIVE_SLOTS, CONTEXT, tokens, counts)
        queries = 1 if mode is ForwardMode.DECODE else VERIFY_TOKENS
        return StepBatch(1, mode, ("a", "b", "c"), LIVE_SLOTS, CONTEXT, queries=queries)

    def launch(self, mode: ForwardMode) -> tuple[Launch, Event]:
        """Writes the right tables and launches a step; returns it with the event of its declared read end."""
        for name, values in self.right.items():
            self.rows.write_table(name, values)
        self.runner.pool = PagedKV(jnp.array(self._pool, self.kv.dtype))
        tokens = jnp.arange(SLOTS + 1, dtype=jnp.int32) * 13 % 96
        self.runner.relay = Relay(tokens, jnp.array(self._token_counts))
        jax.block_until_ready((self.runner.pool, self.runner.relay))
        self.watched.asked.clear()
        launch = self.steps.execute(self._batch(mode), self.rows.publish(), wants_logprobs=True)
        event = self.runner.take_shared_read_done_event()
        return launch, event or launch.step_done

    def _finish(self, launch: Launch) -> Outcome | None:
        """Results of a step; None if it failed."""
        try:
            values = {name: np.asarray(value) for name, value in launch.sampled._asdict().items()}
            values |= {
                "pool": np.asarray(self.runner.pool.data)[:, :, :, 1:].astype(np.float32),
                "newest": np.asarray(self.runner.relay.tokens)[:-1],
                "token_counts": np.asarray(self.runner.relay.token_counts)[:-1],
                **({} if launch.counts is None else {"counts": np.asarray(launch.counts)}),
            }
        except Exception:  # whatever the execution raised; that it fails only when poisoned is the finding
            self.runner.channel.abandon_all()
            self.rows.recover()
            return None
        live = launch.sampled.tokens.shape[0] * len(launch.batch.owners) // SLOTS
        whole = ("pool", "newest", "token_counts")
        outcome = {name: value if name in whole else value[:live] for name, value in values.items()}
        if launch.counts is not None:
            outcome["counts"] = outcome["counts"][: len(launch.batch.owners)]
        return outcome

    @contextlib.contextmanager
    def _held(self, *, layer_delay_us: int = 0) -> Iterator[None]:
        self._points.delay("snapshot.before_reads", SNAPSHOT_STALL_US)
        # A program that JAX runs on the calling thread would otherwise hold that thread for good.
        opener = threading.Timer(LONGEST_HOLD_S, self._points.open, [LAYER_POINT])
        if layer_delay_us:
            self._points.delay(LAYER_POINT, layer_delay_us)
        else:
            self._points.close(LAYER_POINT)
            opener.start()
        try:
            yield
        finally:
            opener.cancel()
            self._points.clear()

    def coarse(self, mode: ForwardMode, poisoned: str | None = None) -> Outcome | None:
        """A step whose tables are overwritten, if at all, behind its full-execution fence: what is right."""
        if mode is ForwardMode.TARGET_VERIFY and not self._drafts_settled:
            self._settle_drafts()
        launch, _ = self.launch(mode)
        if poisoned is not None:
            self.rows.wait(launch.step_done)
            self.rows.write_table(poisoned, self.poison[poisoned])
        outcome = self._finish(launch)
        self.rows.stream.sync()
        return outcome

    def poisoned(self, mode: ForwardMode, table: str) -> Outcome | None:
        """A step one of whose tables is overwritten as soon as its declaration allows it.

        Reads are stalled: the snapshot by a delay, and the first layer until the poison lies in the table, or until it
        is clear that the fence waits for the layer.
        """
        with self._held(layer_delay_us=self._device_stall_us):
            start = time.monotonic()
            launch, event = self.launch(mode)
            self.is_synchronous |= time.monotonic() - start >= LONGEST_HOLD_S
            self.rows.wait(event)
            self.rows.write_table(table, self.poison[table])
            early = launch.read_ends in (SharedReadEnds.PRE_REPLAY, SharedReadEnds.IN_REPLAY)
            deadline = time.monotonic() + (LONGEST_HOLD_S if early else GATE_S)
            while not self.rows.stream.is_done() and time.monotonic() < deadline:
                time.sleep(0.0005)
            self._points.open(LAYER_POINT)
            outcome = self._finish(launch)
            if outcome is not None:
                self.rows.stream.sync()
            return outcome

    def late_ms(self, mode: ForwardMode, table: str, right: Outcome, stall_ms: float) -> float | None:
        """Longest time after the declared read end at which overwriting the table still changes the step's results.

        Every layer is delayed by ``stall_ms``. None: not seen, the machine was too busy.
        """
        low, high = 0.0, 0.0
        longest: float | None = None
        for attempt in range(8):
            wait_s = low if attempt == 0 else (low + high) / 2
            with self._held(layer_delay_us=int(stall_ms * 1000)):
                launch, event = self.launch(mode)
                event.sync(TIMEOUT_S)
                start = time.perf_counter()
                time.sleep(wait_s)
                self.rows.write_table(table, self.poison[table])
                self.rows.stream.sync()
                late = time.perf_counter() - start
                outcome = self._finish(launch)
                ended = time.perf_counter() - start
            if not differ(outcome, right):
                if attempt == 0:
                    return None
                high = wait_s
                continue
            longest = max(longest or 0.0, late * 1e3)
            low = wait_s
            high = ended if attempt == 0 else high
        return longest


def differ(found: Outcome | None, right: Outcome) -> bool:
    """Whether results are not those of the right step."""
    if found is None:
        return True
    return any(
        not np.allclose(found[name], value, rtol=1e-5, atol=1e-5, equal_nan=True) for name, value in right.items()
    )
