"""Compares a backend's prep and attention with the XLA backend's on random metadata."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.attention.base import (
    AttentionBackend,
    AttentionStep,
    LiveRows,
    StepMetadata,
    StepRows,
    StepShape,
    Tree,
    attend_layer,
)
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.attention.xla import XlaBackend
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.verify import tree_geometry
from jaxserve.testing.conformance_report import Violation

HEADS = ((4, 4), (6, 2), (4, 1))  # (query heads, KV heads)
HEAD_DIM = 16
WINDOW = 7
TREE = (0, 0, 2)  # parents of three drafts


@dataclass(frozen=True)
class Case:
    """One shape of step; layer 0 sees everything, layer 1 a window."""

    mode: ForwardMode
    page_size: int
    heads: int
    kv_heads: int
    queries: int
    lengths: tuple[int, ...]
    num_tokens: tuple[int, ...] | None  # of EXTEND, valid ones of each row
    parents: tuple[int, ...] = ()  # of drafts that are a tree
    has_sinks: bool = False
    head_dim: int = HEAD_DIM

    @property
    def text(self) -> str:
        """For messages."""
        kind = f"{self.mode.name} of a tree" if self.parents else self.mode.name
        kind += " with sinks" if self.has_sinks else ""
        return f"{kind}, page size {self.page_size}, {self.heads} heads over {self.kv_heads}"

    @property
    def is_valid(self) -> np.ndarray:
        """Which new tokens are none of padding, bool[B, Q]."""
        counts = self.num_tokens or (self.queries,) * len(self.lengths)
        return np.arange(self.queries) < np.array(counts)[:, None]


def cases(page_sizes: Sequence[int]) -> list[Case]:
    """Every mode with every page size; head counts go round, so that each mode meets each."""
    sizes = {
        ForwardMode.DECODE: (1, (0, 1, 18, 37), None),
        ForwardMode.TARGET_VERIFY: (4, (5, 0, 31), None),
        ForwardMode.EXTEND: (8, (21, 0, 9), (6, 8, 3)),
    }
    made = []
    for (i, page_size), (j, mode) in itertools.product(enumerate(page_sizes), enumerate(sizes)):
        heads, kv_heads = HEADS[(i + j) % len(HEADS)]
        queries, lengths, num_tokens = sizes[mode]
        made.append(Case(mode, page_size, heads, kv_heads, queries, lengths, num_tokens))
    return made


def check_attention(
    backend: AttentionBackend,
    page_sizes: Sequence[int],
    dtype: Any,
    tolerance: float,
    modes: Sequence[ForwardMode],
    head_dim: int = HEAD_DIM,
) -> list[Violation]:
    """What differs; nothing for a backend that computes what the XLA backend computes."""
    found: list[Violation] = []
    for case in cases(page_sizes):
        if case.mode not in modes:
            continue
        case = dataclasses.replace(case, head_dim=head_dim)
        found += _check(backend, case, dtype, tolerance)
        if case.mode is ForwardMode.TARGET_VERIFY and backend.supports_trees:
            found += _check(backend, dataclasses.replace(case, parents=TREE), dtype, tolerance)
        if backend.supports_sinks and case.page_size == page_sizes[0]:
            found += _check(backend, dataclasses.replace(case, has_sinks=True), dtype, tolerance)
    return found


def _run(backend: AttentionBackend, case: Case, dtype: Any) -> tuple[StepMetadata, list[np.ndarray]]:
    """Metadata, and attention of both layers, on random contents that the case alone decides."""
    random = np.random.default_rng(case.page_size * 10 + case.heads)
    batch, queries = len(case.lengths), case.queries
    width = -(-(max(case.lengths) + queries) // case.page_size)
    num_pages = 1 + batch * width
    data = random.standard_normal((2, 2, case.kv_heads, num_pages, case.page_size, case.head_dim))
    pages = random.permutation(np.arange(1, num_pages)).reshape(batch, width).astype(np.int32)
    slots = random.permutation(batch).astype(np.int32)
    live_tables, live_lengths = np.zeros_like(pages), np.zeros((batch, 1), np.int32)
    live_tables[slots], live_lengths[slots, 0] = pages, case.lengths
    q = random.standard_normal((batch, queries, case.heads, case.head_dim))
    k, v = random.standard_normal((2, batch, queries, case.kv_heads, case.head_dim))
    sinks = random.standard_normal(case.heads) + 1  # near the largest score, where they matter
    shape = StepShape(case.mode, batch, queries, width, case.page_size)

    def program(data, q, k, v, slots, pages, lengths, tables, table_lengths, num_tokens):
        num_tokens = num_tokens if case.num_tokens is not None else None
        floats, ints = jnp.zeros((batch, 8), jnp.float32), jnp.zeros((batch, 8), jnp.int32)
        metadata = backend.prep(StepRows(slots, pages, lengths, floats, ints, ints, floats), shape, num_tokens)
        live = LiveRows(slots, tables, table_lengths, ffi=True)
        tree = None
        if case.parents:
            depths, seen = tree_geometry(jnp.tile(jnp.array([case.parents], jnp.int32), (batch, 1)))
            tree = Tree(seen, depths)
        step = AttentionStep(shape, metadata, PagedKV(data), live, (None, WINDOW), num_tokens, tree)
        layer_sinks = jnp.asarray(sinks, dtype) if case.has_sinks else None
        return metadata, [attend_layer(backend, step, layer, q, k, v, layer_sinks) for layer in (0, 1)]

    arrays = [jnp.asarray(x, dtype) for x in (data, q, k, v)]
    ints = [jnp.asarray(x, jnp.int32) for x in (slots, pages, case.lengths, live_tables, live_lengths)]
    counts = jnp.array(case.num_tokens or (queries,) * batch, jnp.int32)[:, None]
    result = jax.jit(program)(*arrays, *ints, counts)
    metadata, layers = jax.tree.map(np.asarray, result)
    return metadata, layers


@functools.cache
def _right(case: Case, dtype: Any) -> tuple[StepMetadata, list[np.ndarray]]:
    return _run(XlaBackend(), case, dtype)


def _check(backend: AttentionBackend, case: Case, dtype: Any, tolerance: float) -> list[Violation]:
    metadata, layers = _run(backend, case, dtype)
    right_metadata, right_layers = _right(case, dtype)
    found = _compare_prep(case, metadata, right_metadata)
    for layer, (got, wanted) in enumerate(zip(layers, right_layers, strict=True)):
        kind = "full attention" if layer == 0 else f"window {WINDOW}"
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            message = f"{case.text}: attend() returns {got.dtype}{got.shape}, wanted {wanted.dtype}{wanted.shape}"
            return [*found, Violation("attention", message, case.mode)]
        error = np.abs(np.asarray(got, np.float32) - np.asarray(wanted, np.float32))
        error = np.where(case.is_valid[:, :, None, None], np.where(np.isnan(error), np.inf, error), 0.0)
        if error.max() > tolerance:
            row, query, head, _ = (int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
            message = (
                f"{case.text}, {kind}: attention is off by {error.max():.2g} from the XLA backend's "
                f"(batch row {row} of context {case.lengths[row]}, new token {query}, head {head})"
            )
            found.append(Violation("attention", message, case.mode))
    return found


def _compare_prep(case: Case, found: StepMetadata, right: StepMetadata) -> list[Violation]:
    """New tokens must go where the pool expects them, and padding to the null page."""
    for name in ("write_pages", "write_offsets"):
        got, wanted = np.asarray(getattr(found, name)), np.asarray(getattr(right, name))
        if not np.array_equal(got[case.is_valid], wanted[case.is_valid]):
            message = f"{case.text}: prep() puts new tokens elsewhere: {name} {got.tolist()}, wanted {wanted.tolist()}"
            return [Violation("prep", message, case.mode)]
    if np.any(np.asarray(found.write_pages)[~case.is_valid]):
        message = f"{case.text}: prep() lets padding tokens write to a page other than the null page"
        return [Violation("prep", message, case.mode)]
    return []
