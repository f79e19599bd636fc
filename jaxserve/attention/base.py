"""The contract of an attention backend, and who says when reads of shared rows end.

A backend declares, per forward mode, where its last read of a shared row lies. Nobody else decides it: the runner asks
once per execution and trusts the answer.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode

if TYPE_CHECKING:
    from jaxserve.attention.paged_kv import PagedKV


class SharedReadEnds(IntEnum):
    """Where the reads of shared rows end, ordered by lateness.

    PRE_REPLAY: before the program that computes the step is launched. IN_REPLAY: at the marker inside that program.
    POST_REPLAY: when the program ends. UNKNOWN: nobody has audited it; counts as latest of all.
    """

    PRE_REPLAY = 0
    IN_REPLAY = 1
    POST_REPLAY = 2
    UNKNOWN = 3

    @staticmethod
    def max_of(ends: Iterable[SharedReadEnds]) -> SharedReadEnds:
        """The latest of several; what a composite declares for its parts. Raises ValueError when there are none."""
        return max(ends)


class StepRows(NamedTuple):
    """A step's private copy of the shared rows it needs: B batch rows, W block-table columns.

    Attributes:
        slots: int32[B], the slot of each row; the null slot for padding.
        block_tables: int32[B, W], page ids; 0 is the null page.
        lengths: int32[B], tokens with KV before this step.
        sampling_floats: float32[B, 8]; sampling_ints: int32[B, 8]; bias_ids: int32[B, 364];
        bias_values: float32[B, 300]; see ``runner.sampling_rows`` for these four.
        draft_tokens, draft_parents: int32[B, Q - 1], where the step has drafts and reads them early; see
            ``runner.verify``.
    """

    slots: jax.Array
    block_tables: jax.Array
    lengths: jax.Array
    sampling_floats: jax.Array
    sampling_ints: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    draft_tokens: jax.Array | None = None
    draft_parents: jax.Array | None = None


@dataclass(frozen=True)
class LiveRows:
    """The shared rows themselves, for backends that read while the program runs (and say so).

    Attributes:
        slots: int32[B], private.
        block_tables: int32[slots + 1, W_max], shared.
        lengths: int32[slots + 1, 1], shared.
        ffi: whether the program may use the barrier's FFI operations.
        used: in programs built for the race check, who asked for a shared array: {(index in ``RowLayout.shapes``,
            ``file.py:line name``)}. Whoever was given one may read it until the program ends. None in other programs.
    """

    slots: jax.Array
    shared_block_tables: jax.Array
    shared_lengths: jax.Array
    ffi: bool
    used: set[tuple[int, str]] | None = None

    @property
    def block_tables(self) -> jax.Array:
        self._note(1)
        return self.shared_block_tables

    @property
    def lengths(self) -> jax.Array:
        self._note(2)
        return self.shared_lengths

    def _note(self, index: int) -> None:
        if self.used is not None:
            caller = sys._getframe(2)
            path = "/".join(caller.f_code.co_filename.split("/")[-2:])
            self.used.add((index, f"{path}:{caller.f_lineno} {caller.f_code.co_name}"))

    def replaced(self, block_tables: jax.Array, lengths: jax.Array) -> LiveRows:
        """The same with other arrays in place of the shared ones."""
        return dataclasses.replace(self, shared_block_tables=block_tables, shared_lengths=lengths)


class StepMetadata(NamedTuple):
    """What attention and the KV write of a step need to know; all of it private to the step.

    Attributes:
        block_tables: int32[B, W]; lengths: int32[B].
        write_pages, write_offsets: int32[B, Q], where the KV of each new token goes.
    """

    block_tables: jax.Array
    lengths: jax.Array
    write_pages: jax.Array
    write_offsets: jax.Array


@dataclass(frozen=True)
class StepShape:
    """Static sizes of a program: B batch rows, Q new tokens per row, W block-table columns, tokens per page."""

    mode: ForwardMode
    batch: int
    queries: int
    table_width: int
    page_size: int


class Tree(NamedTuple):
    """How the new tokens of a row see each other when they are not a chain.

    Attributes:
        seen: bool[B, Q, Q], whether new token i (first) sees new token j. In the tree of a verify step no token sees a
            later one; in a drafted block all see each other.
        depths: int32[B, Q]: the position of a new token is context length + depth.
    """

    seen: jax.Array
    depths: jax.Array


@dataclass(frozen=True)
class AttentionStep:
    """What ``attend`` is given besides the projections; exists only while a program is traced.

    ``tree`` is None where new tokens see those before them (chains, prompts). It is set only for backends that say
    ``supports_trees``.
    """

    shape: StepShape
    metadata: StepMetadata
    pool: PagedKV
    live: LiveRows
    windows: tuple[int | None, ...]
    num_tokens: jax.Array | None  # int32[B, 1], valid tokens of the rows of EXTEND
    tree: Tree | None = None


class AttentionBackend:
    """Base of attention backends.

    A backend is stateless and pure: its methods are traced into programs. ``prep`` turns the step's private rows into
    metadata, and may be hoisted into a program of its own; ``attend`` computes one layer.

    Attributes:
        name: what ``--attention-backend`` selects.
        reads_live: reads ``AttentionStep.live`` in ``attend``; such reads cannot be hoisted.
        width_buckets: whether cost depends on the block-table width, so that programs of several widths pay off.
        supports_trees: ``attend`` follows ``AttentionStep.tree``; without it only chains of drafts are verified.
        supports_sinks: ``attend`` takes attention sinks; without it models that have them are refused at start.
    """

    name: ClassVar[str] = ""
    reads_live: ClassVar[bool] = False
    width_buckets: ClassVar[bool] = True
    supports_trees: ClassVar[bool] = False
    supports_sinks: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        attend = vars(cls).get("attend")
        if attend is not None and "sinks" not in inspect.signature(attend).parameters:
            cls.supports_sinks = False  # whatever the class it derives from can do

    def shared_read_ends(self, forward_mode: ForwardMode) -> SharedReadEnds:
        """Where this backend's reads of shared rows end in ``forward_mode``."""
        if forward_mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
            return SharedReadEnds.IN_REPLAY
        return SharedReadEnds.UNKNOWN

    def prep(self, rows: StepRows, shape: StepShape, num_tokens: jax.Array | None) -> StepMetadata:
        """Metadata of a step from its private rows. Padding tokens (and padding rows) write to the null page 0.

        Args:
            num_tokens: int32[B, 1], how many of the Q new tokens of each row are none of padding; None: all.
        """
        positions = rows.lengths[:, None] + jnp.arange(shape.queries, dtype=jnp.int32)  # [B, Q]
        columns = jnp.clip(positions // shape.page_size, 0, shape.table_width - 1)
        pages = jnp.take_along_axis(rows.block_tables, columns, axis=1)
        valid = positions < shape.table_width * shape.page_size
        if num_tokens is not None:
            valid &= jnp.arange(shape.queries, dtype=jnp.int32) < num_tokens
        return StepMetadata(rows.block_tables, rows.lengths, jnp.where(valid, pages, 0), positions % shape.page_size)

    def attend(
        self, step: AttentionStep, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attention of one layer: every new token sees its sequence's cached context and the new tokens before it.

        Args:
            step: what the step is.
            layer: layer number.
            q: [B, Q, H, D] after positional encoding; k, v: [B, Q, KV, D].
            sinks: Float[H] or None: one more logit per head in every softmax, which takes weight and gives no value. A
                backend that does not say ``supports_sinks`` is never given any, and may leave the parameter out.

        Returns:
            [B, Q, H, D] in the dtype of q. The pool is only read; the program writes k and v to it afterwards.
        """
        raise NotImplementedError(f"attention backend {self.name or type(self).__name__} defines no attend()")

    def live_metadata(self, step: AttentionStep, layer: int, after: jax.Array) -> StepMetadata:
        """The metadata ``attend`` works on: the private one. ``xla-live`` re-reads the shared rows instead."""
        return step.metadata


def attend_layer(
    backend: AttentionBackend, step: AttentionStep, layer: int, q: jax.Array, k: jax.Array, v: jax.Array,
    sinks: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """``backend.attend``, handed sinks only where a layer has them.

    Raises:
        ConfigError: the layer has sinks and the backend would ignore them.
    """
    if sinks is None:
        return backend.attend(step, layer, q, k, v)
    if not backend.supports_sinks:
        raise ConfigError(no_sinks_text(backend))
    return backend.attend(step, layer, q, k, v, sinks)


def no_sinks_text(backend: AttentionBackend) -> str:
    """What to say when a model has attention sinks and ``backend`` does not know them."""
    return (
        f"the model has attention sinks, which the attention backend {backend.name!r} does not support; "
        "choose another one with --attention-backend (xla has them)"
    )
