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

from jaxserve.core.errors import ConfigError
from jaxserve.models.draft import FINAL
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.training.losses import Batch
from jaxserve.training.packed_attention import attend_packed
from jaxserve.training.packing import PackedRows

_ROWS_AT_ONCE = 4


@dataclass(frozen=True)
class RowsWithStates:
    """Training rows with what the target makes of them.

    Attributes:
        rows: N packed rows of L tokens.
        states: bfloat16[N, L, (points + 1) * hidden], mapped from a file: the captured states, then the final one.
        greedy: Int32[N, L], the target's own choice of the next token; zeros unless asked for.
    """

    rows: PackedRows
    states: np.ndarray
    greedy: np.ndarray
    hidden_size: int

    def batch(self, indices: np.ndarray) -> Batch:
        """Some of the rows, in float32."""
        rows, states = self.rows[indices], self.states[indices].astype(np.float32)
        captured, final = states[..., : -self.hidden_size], states[..., -self.hidden_size :]
        arrays = (rows.ids, rows.segments, rows.positions, rows.answers, captured, final, self.greedy[indices])
        return Batch(*(jnp.asarray(array) for array in arrays))


def check_target(target: LoadedModel) -> None:
    """Raises ConfigError for a target that attends in ways ``compute_states`` does not know, such as with sinks."""
    if not isinstance(target.bind(target.leaves), LlamaForCausalLM):
        raise ConfigError(
            f"--model: drafts can be trained for LlamaForCausalLM models, this is {target.config.architecture}"
        )


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
    width = (len(points) + 1) * target.config.hidden_size
    note = path.with_suffix(".json")
    digest = hashlib.sha256(rows.ids.tobytes() + rows.segments.tobytes()).hexdigest()
    identity = {"rows": digest, "points": list(points), "width": width, "greedy": with_greedy}
    done = _rows_done(note, identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = done == 0 or not path.is_file()
    done = 0 if fresh else done
    states = np.memmap(path, ml_dtypes.bfloat16, "w+" if fresh else "r+", shape=(count, length, width))
    greedy = np.memmap(path.with_suffix(".greedy"), np.int32, "w+" if fresh else "r+", shape=(count, length))
    program = _program(target, points, with_greedy)
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
    return RowsWithStates(rows, states, greedy, target.config.hidden_size)


def _rows_done(note: Path, identity: dict) -> int:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return int(found.pop("done", 0)) if {**found, "done": 0} == {**identity, "done": 0} else 0


def _program(target: LoadedModel, points: tuple[int, ...], with_greedy: bool) -> Callable:
    windows = target.config.attention_windows

    @jax.jit
    def states(leaves: list, ids: jax.Array, segments: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = target.bind(leaves)
        rows, length = ids.shape
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        same = segments[:, :, None] == segments[:, None, :]

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            window = windows[layer]
            seen = same & (distance >= 0) & (distance < (length if window is None else window))
            q, k, v = (x.reshape(rows, length, *x.shape[1:]) for x in (q, k, v))
            return attend_packed(q, k, v, seen).reshape(rows * length, *q.shape[2:])

        found: dict[int, jax.Array] = {}
        final = model(ids.reshape(-1), positions.reshape(-1), attend, found.__setitem__)
        found[FINAL] = final
        chosen = jnp.zeros((rows, length), jnp.int32)
        if with_greedy:
            chosen = jnp.argmax(model.logits(final), axis=-1).reshape(rows, length).astype(jnp.int32)
        kept = jnp.concatenate([*(found[point] for point in points), final], axis=1)
        return kept.reshape(rows, length, -1).astype(jnp.bfloat16), chosen

    return states
