"""The fence bench: four ways to bring a step's control rows to the device, over step time, batch and size of the rows.

upload      every table is a fresh device array each step
functional  changed tables are updated by a small program that makes new ones
coarse      rows are written in place, behind the end of the whole execution
fine        rows are written in place, behind the read-done marker
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.barrier.shared_rows import RowLayout
from jaxserve.bench.machine import machine
from jaxserve.bench.models import MODELS, NUM_WORDS, write_model
from jaxserve.bench.stepping import Stepped, run_greedily
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.shapes import ceil_div
from jaxserve.engine.engine import Engine

SCHEMA = 1  # of the JSON
WAYS: dict[str, dict[str, Any]] = {
    "upload": {"shared_updates": "upload"},
    "functional": {"shared_updates": "functional"},
    "coarse": {"shared_updates": "shared", "force_coarse_war_barrier": True},
    "fine": {"shared_updates": "shared"},
}
PAGE_SIZE = 16
PROMPT_TOKENS = 16


class TableSize(NamedTuple):
    """Sizes of the shared rows: slots, and block-table columns."""

    slots: int
    width: int

    @property
    def num_bytes(self) -> int:
        """Of all shared rows; nearly all of it is the block table."""
        return sum(4 * rows * columns for rows, columns, _ in RowLayout(*self).shapes().values())


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        models: name -> ``config.json``, quickest first.
        batches: sequences that decode together.
        sizes: of the shared rows.
        rounds: measurements of each way; one more goes ahead for warming up.
        max_tokens: of each sequence.
        max_seconds: after this no further model and size is begun; the result names what was left out.

    Raises:
        ConfigError: a combination that cannot be measured.
    """

    models: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MODELS)
    batches: tuple[int, ...] = (1, 4, 8)
    sizes: tuple[TableSize, ...] = (TableSize(16, 64), TableSize(64, 512), TableSize(256, 2048), TableSize(512, 8192))
    rounds: int = 4
    max_tokens: int = 48
    max_seconds: float = 780.0

    def __post_init__(self) -> None:
        if not self.models or not self.batches or not self.sizes:
            raise ConfigError("the fence bench needs at least one model, one batch and one table size")
        for name, value in (("--rounds", self.rounds), ("--batches", min(self.batches))):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        # Prefills alternate with decode steps, so the first sequence is that far ahead of the last.
        least = max(self.batches) + 4
        if self.max_tokens < least:
            raise ConfigError(
                f"--tokens {self.max_tokens}: {max(self.batches)} sequences need at least {least} tokens each to "
                "decode together for a while; raise it, or lower --batches"
            )
        for size in self.sizes:
            if size.slots < max(self.batches):
                raise ConfigError(
                    f"--sizes {size.slots}x{size.width}: batch {max(self.batches)} needs that many slots; raise the "
                    "first number, or lower --batches"
                )
            if size.width * PAGE_SIZE < PROMPT_TOKENS + self.max_tokens:
                raise ConfigError(
                    f"--sizes {size.slots}x{size.width}: {size.width} pages of {PAGE_SIZE} tokens hold no sequence of "
                    f"{PROMPT_TOKENS + self.max_tokens} tokens; raise the second number, or lower --tokens"
                )


QUICK = Sweep(
    models={name: MODELS[name] for name in ("tiny", "medium")},
    batches=(8,),
    sizes=(TableSize(16, 64), TableSize(64, 2048), TableSize(512, 8192)),
    rounds=3,
    max_tokens=32,
    max_seconds=90.0,
)


def measure(sweep: Sweep, progress: Callable[[str], None] = lambda message: None) -> dict[str, Any]:
    """Measures every combination; at each of them the ways take turns, and the order turns too.

    Returns:
        JSON values: ``machine``, ``settings``, ``cells`` (see ``_cell``), ``left_out`` and ``seconds``.

    Raises:
        JaxserveError: the ways disagree about greedy tokens.
    """
    start = time.monotonic()
    settings = dataclasses.asdict(sweep) | {"page_size": PAGE_SIZE, "prompt_tokens": PROMPT_TOKENS}
    found: dict[str, Any] = {
        "schema": SCHEMA, "machine": machine() | {"jax": jax.__version__, "platform": jax.default_backend()},
        "settings": settings, "cells": [], "left_out": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as temporary:
        for name, config in sweep.models.items():
            longest = max(size.width for size in sweep.sizes) * PAGE_SIZE
            folder = write_model(Path(temporary) / name.replace("/", "-"), config, longest)
            for size in sweep.sizes:
                where = f"{name}, {size.slots} slots of {size.width} pages"
                if time.monotonic() - start > sweep.max_seconds:
                    found["left_out"].append(where)
                    continue
                for cell in _cells(sweep, name, folder, size):
                    found["cells"].append(cell)
                    step = statistics.median(cell["ways"]["fine"]["step_ms"])
                    progress(f"{time.monotonic() - start:4.0f} s: {where}, batch {cell['batch']}: {step:.2f} ms a step")
    return found | {"seconds": time.monotonic() - start}


def _cells(sweep: Sweep, name: str, folder: Path, size: TableSize) -> Iterator[dict[str, Any]]:
    """One model and size: four engines side by side, every batch."""
    pages = max(sweep.batches) * ceil_div(PROMPT_TOKENS + sweep.max_tokens, PAGE_SIZE)
    engines: dict[str, Engine] = {}
    try:
        for way, settings in WAYS.items():
            engines[way] = Engine(
                EngineConfig(
                    model=str(folder), load_format="dummy", skip_warmup=True, page_size=PAGE_SIZE, num_pages=pages,
                    context_length=size.width * PAGE_SIZE, disable_radix_cache=True, max_running_requests=size.slots,
                    decode_batch_buckets=sweep.batches, chunked_prefill_size=PROMPT_TOKENS,
                    prefill_token_buckets=(PROMPT_TOKENS,), **settings,
                )
            )  # fmt: skip
        for batch in sweep.batches:
            yield _cell(sweep, name, size, batch, engines)
    finally:
        for engine in engines.values():
            engine.close()
        del engines
        gc.collect()  # pools and weights go before the next ones come


def _cell(sweep: Sweep, name: str, size: TableSize, batch: int, engines: Mapping[str, Engine]) -> dict[str, Any]:
    """All rounds of one combination.

    Returns:
        ``model``, ``batch``, ``slots``, ``table_width``, ``shared_bytes``, ``distinct_tokens``, and per way under
        ``ways``, a value per round: ``step_ms`` and ``host_ms`` (medians over the steps that decode the whole batch;
        host is planning and launching), ``held_up_ms`` (mean; null where rows are not written in place), ``bytes`` (of
        control rows per step), ``ratio`` (step time over upload's in the same round); and ``fences``, by kind and
        reason.
    """
    random = np.random.default_rng(batch)
    prompts = random.integers(0, NUM_WORDS, (batch, PROMPT_TOKENS)).tolist()
    rounds: list[dict[str, Stepped]] = []
    ways = list(engines)
    expected: list[list[int]] | None = None
    for number in range(sweep.rounds + 1):
        turn = ways[number % len(ways) :] + ways[: number % len(ways)]
        runs = {way: run_greedily(engines[way], prompts, sweep.max_tokens) for way in turn}
        for way, run in runs.items():
            expected = expected or run.tokens
            if run.tokens != expected:
                raise JaxserveError(
                    f"greedy tokens of {way!r} differ from the others': model {name}, batch {batch}, "
                    f"{size.slots} slots of {size.width} pages, round {number}; a fence or an update is wrong"
                )
        if number:  # the first is for warming up
            rounds.append(runs)
    assert expected is not None
    config = engines["fine"].model_config
    cell: dict[str, Any] = {
        "model": name, "hidden_size": config.hidden_size, "num_layers": config.num_layers, "batch": batch,
        "slots": size.slots, "table_width": size.width, "shared_bytes": size.num_bytes,
        "distinct_tokens": len({token for one in expected for token in one}), "ways": {},
    }  # fmt: skip
    for way in WAYS:
        steps = [statistics.median(runs[way].steps) for runs in rounds]
        bases = [statistics.median(runs["upload"].steps) for runs in rounds]
        held_up = [runs[way].held_up for runs in rounds]
        cell["ways"][way] = {
            "step_ms": [1e3 * step for step in steps],
            "host_ms": [1e3 * statistics.median(runs[way].host) for runs in rounds],
            "held_up_ms": None if None in held_up else [1e3 * seconds for seconds in held_up if seconds is not None],
            "bytes": [runs[way].bytes_to_device for runs in rounds],
            "ratio": [step / base for step, base in zip(steps, bases, strict=True)],
            "fences": rounds[-1][way].fences,
        }
    return cell
