"""The engine's step programs without an engine: to be compiled and read, for this machine or for another."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxserve.attention.base import AttentionBackend, SharedReadEnds, StepShape
from jaxserve.attention.paged_kv import KVLayout
from jaxserve.barrier.shared_rows import RowLayout
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.weights import abstract_model
from jaxserve.runner.captured_steps import CapturedSteps
from jaxserve.runner.lowering import lower_with_all_arguments
from jaxserve.runner.program_arguments import STEP_DONATES, prep_arguments, step_arguments
from jaxserve.runner.step_program import (
    CHAIN,
    DraftForm,
    ProgramKey,
    RowSource,
    make_prep_program,
    make_step_program,
)


def step_program(
    config: ModelConfig,
    backend: AttentionBackend,
    mode: ForwardMode,
    *,
    batch: int,
    queries: int = 1,
    context_length: int = 256,
    page_size: int = 16,
    num_pages: int = 64,
    dtype: Any = jnp.float32,
    drafts: DraftForm = CHAIN,
    is_greedy: bool = False,
    captured: CapturedSteps | None = None,
) -> tuple[Callable, tuple]:
    """A step program as the runner would make it, with its abstract arguments; no weight is allocated.

    The rows come from the snapshot op, or, for a backend that declares PRE_REPLAY, from a prep program.
    """
    width = -(-context_length // page_size)
    ends = backend.shared_read_ends(mode)
    source = RowSource.PRIVATE if ends is SharedReadEnds.PRE_REPLAY else RowSource.SNAPSHOT
    verifies = mode is ForwardMode.TARGET_VERIFY
    shape = StepShape(mode, batch, queries, width, page_size)
    key = ProgramKey(shape, source, end_record=True, drafts=drafts if verifies else None, is_greedy=is_greedy)
    model = abstract_model(config, dtype)
    kv = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, num_pages, page_size, jnp.dtype(dtype))
    function = make_step_program(key, backend, model.bind, config.attention_windows, captured=captured)
    layout = RowLayout(batch, width, num_drafts=queries - 1 if verifies else 0)
    return function, step_arguments(key, layout, model.leaves, kv, config.vocab_size)


def prep_program(
    backend: AttentionBackend, mode: ForwardMode, *, batch: int, queries: int = 1, width: int = 16, page_size: int = 16
) -> tuple[Callable, tuple]:
    """A prep program as the runner would make it, with its abstract arguments."""
    verifies = mode is ForwardMode.TARGET_VERIFY
    shape = StepShape(mode, batch, queries, width, page_size)
    key = ProgramKey(shape, RowSource.SNAPSHOT, end_record=True, drafts=CHAIN if verifies else None)
    layout = RowLayout(batch, width, num_drafts=queries - 1 if verifies else 0)
    return make_prep_program(key, backend), prep_arguments(key, layout)


def compiled_text(function: Callable, arguments: tuple, donate: tuple[int, ...] = STEP_DONATES) -> str:
    """The scheduled HLO of a program compiled for this machine."""
    compiled = lower_with_all_arguments(function, arguments, donate).compile()
    return compiled.as_text() or ""


def copies_of_shape(hlo_text: str, shape: tuple[int, ...]) -> list[str]:
    """Copy instructions whose result has this shape: for the pool's shape there must be none."""
    wanted = "[" + ",".join(map(str, shape)) + "]"
    return [
        line.strip() for line in hlo_text.splitlines() if re.search(r"= \w+" + re.escape(wanted) + r"\S* copy", line)
    ]


def donated_parameters(num_leaves: int, *, has_lengths: bool = False) -> dict[str, int]:
    """Parameter numbers of what a step program donates, by name; ``has_lengths``: whether the relay holds lengths."""
    names = ("pool", "relay.tokens", "relay.token_counts", *(["relay.lengths"] if has_lengths else []))
    return {name: num_leaves + i for i, name in enumerate(names)}


def aliased_outputs(hlo_text: str) -> list[int]:
    """Parameter numbers whose memory an output takes over (``input_output_alias``)."""
    header = hlo_text.splitlines()[0]
    found = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", header)
    return sorted(int(n) for n in re.findall(r": \((\d+),", found.group(1))) if found else []
