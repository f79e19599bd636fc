"""The target's hidden states for training rows: computed once, kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.models.draft import FINAL
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.training.losses import Batch
from jaxserve.training.packed_attention import attend_packed, seen_in_rows
from jaxserve.training.packing import PackedRows

_ROWS_AT_ONCE = 4


@dataclass(frozen=True)
class RowsWithStates:
    """Training rows with what the target makes of them.

    Attributes:
        rows: N packed rows of L tokens.
        points: states that are captured; see ``models.draft``.
        states: bfloat16[N, L, kept * hidden], mapped from a file: the states of ``points`` but the final one, and that.
        greedy: Int32[N, L], the target's own choice of the next token; zeros unless asked for.
    """

    rows: PackedRows
    points: tuple[int, ...]
    states: np.ndarray
    greedy: np.ndarray

    def batch(self, indices: np.ndarray) -> Batch:
        """Some of the rows, in float32."""
        rows, states = self.rows[indices], self.states[indices].astype(np.float32)
        kept = _kept(self.points)
        by_point = dict(zip(kept, np.split(states, len(kept), axis=-1), strict=True))
        captured, final = np.concatenate([by_point[point] for point in self.points], axis=-1), by_point[FINAL]
        arrays = (rows.ids, rows.segments, rows.positions, rows.answers, captured, final, self.greedy[indices])
        return Batch(*(jnp.asarray(array) for array in arrays))


def _kept(points: tuple[int, ...]) -> tuple[int, ...]:
    """The states on disk: each once, and the final one, which losses need whether it is captured or not."""
    return (*(point for point in points if point != FINAL), FINAL)


def compute_states(
    target: LoadedModel,
    rows: PackedRows,
    points: tuple[int, ...],
    path: Path,
    with_greedy: bool,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> RowsWithStates:
    """One forward pass of the target over all rows, unless ``path`` holds it; goes on after a kill.

    Args:
        points: which states to capture; see ``models.draft``.
        path: file for the states; a ``.json`` beside it says what they are of.
        with_greedy: also find the target's own next tokens, which costs a product with its whole head.
        progress: told the number of tokens of each batch.
    """
    count, length = rows.ids.shape
    kept = _kept(points)
    width = len(kept) * target.config.hidden_size
    note = path.with_suffix(".json")
    digest = hashlib.sha256(rows.ids.tobytes() + rows.segments.tobytes()).hexdigest()
    identity = {"rows": digest, "points": list(kept), "width": width, "greedy": with_greedy}
    done = _rows_done(note, identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = done == 0 or not path.is_file()
    done = 0 if fresh else done
    states = np.memmap(path, ml_dtypes.bfloat16, "w+" if fresh else "r+", shape=(count, length, width))
    greedy = np.memmap(path.with_suffix(".greedy"), np.int32, "w+" if fresh else "r+", shape=(count, length))
    program = _program(target, kept, with_greedy)
    for start in range(done, count, _ROWS_AT_ONCE):
        part = rows[slice(start, start + _ROWS_AT_ONCE)]
        padding = ((0, _ROWS_AT_ONCE - len(part)), (0, 0))
        found, chosen = program(target.leaves, *(np.pad(x, padding) for x in (part.ids, part.segments, part.positions)))
        states[start : start + len(part)] = np.asarray(found)[: len(part)]
        greedy[start : start + len(part)] = np.asarray(chosen)[: len(part)]
        if start // _ROWS_AT_ONCE % 16 == 15 or start + _ROWS_AT_ONCE >= count:
            states.flush()
            greedy.flush()
            note.write_text(json.dumps({**identity, "done": start + len(part)}), encoding="utf-8")
        progress(part.num_tokens)
    return RowsWithStates(rows, points, states, greedy)


def _rows_done(note: Path, identity: dict) -> int:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return int(found.pop("done", 0)) if {**found, "done": 0} == {**identity, "done": 0} else 0


def _program(target: LoadedModel, kept: tuple[int, ...], with_greedy: bool) -> Callable:
    windows = target.config.attention_windows

    @jax.jit
    def run(leaves: list, ids: jax.Array, segments: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = target.bind(leaves)
        rows, length = ids.shape
        seen = {window: seen_in_rows(segments, window) for window in set(windows)}

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
            q, k, v = (x.reshape(rows, length, *x.shape[1:]) for x in (q, k, v))
            attended = attend_packed(q, k, v, seen[windows[layer]], sinks=sinks)
            return attended.reshape(rows * length, *q.shape[2:])

        found: dict[int, jax.Array] = {}
        final = model(ids.reshape(-1), positions.reshape(-1), attend, found.__setitem__)
        found[FINAL] = final
        chosen = jnp.zeros((rows, length), jnp.int32)
        if with_greedy:
            chosen = jnp.argmax(model.logits(final), axis=-1).reshape(rows, length).astype(jnp.int32)
        states = jnp.concatenate([found[point] for point in kept], axis=1)
        return states.reshape(rows, length, -1).astype(jnp.bfloat16), chosen

    return run
