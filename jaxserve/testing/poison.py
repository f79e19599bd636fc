"""Writes garbage over every shared row as soon as the barrier allows it, and the right rows back before a launch.

The harshest scheduler the barrier permits: whatever a step still reads behind its fence, it reads wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxserve.engine.engine import Engine


def known_future(known: Iterable[list[int]], token_ids: list[int]) -> list[int]:
    """What follows ``token_ids`` in the first of ``known`` that begins with them; empty if none does."""
    for whole in known:
        if whole[: len(token_ids)] == token_ids:
            return whole[len(token_ids) :]
    return []


class Poison:
    """Poisons an engine's rows for as long as it lives.

    Args:
        future: token ids so far -> what comes next. Verification shrugs off garbage drafts; what would hurt it are
            drafts that hold, put where others were when the step began. So those are written over the drafts.

    Attributes:
        num_poisoned: launches behind whose barrier rows were overwritten.
    """

    def __init__(self, engine: Engine, future: Callable[[list[int]], list[int]] | None = None):
        self._future = future
        self._rows: Any = engine.parts.rows
        self._barrier: Any = engine.scheduler.barrier
        self._apply, self._publish = self._barrier.apply, self._rows.publish
        self._garbage = {name: self._made(name, engine) for name in self._rows.layout.shapes()}
        self._barrier.apply = self._poisoned_apply  # type: ignore[method-assign]
        self._rows.publish = self._restored_publish  # type: ignore[method-assign]
        self.num_poisoned = 0

    def _made(self, name: str, engine: Engine) -> np.ndarray:
        """Garbage that no check refuses: a wrong read changes tokens, not more."""
        rows, columns, dtype = self._rows.layout.shapes()[name]
        random = np.random.default_rng(9)
        most = {
            "batch_slots": rows,
            "block_tables": engine.scheduler.pool.num_pages,
            "lengths": columns,
            "draft_tokens": 250,
        }.get(name, 1)
        if dtype is np.float32:
            return np.ones((rows, columns), dtype)
        if name == "draft_parents":  # a chain
            return np.tile(np.arange(columns, dtype=dtype), (rows, 1))
        return random.integers(0, most, (rows, columns)).astype(dtype)

    def _poisoned_apply(self, launch: Any) -> None:
        self._apply(launch)
        self.num_poisoned += 1
        if self._future is not None and "draft_tokens" in self._garbage:  # drafts may never lie in rows
            drafts = self._garbage["draft_tokens"]
            for sequence, slot in zip(launch.batch.owners, launch.batch.slots, strict=True):
                future = self._future(sequence.token_ids)[: drafts.shape[1]]
                drafts[slot, : len(future)] = future
        for name, garbage in self._garbage.items():
            index = np.arange(garbage.shape[0], dtype=np.int32)
            self._rows.stream.write_rows(self._rows._buffers[name], index, garbage, 0)

    def _restored_publish(self) -> int:
        for name in self._garbage:
            self._rows.write_table(name, self._rows.mirror(name))
        return self._publish()
