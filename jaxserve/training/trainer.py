"""The training loop: the same steps in the same order, whether it ran through or was killed and taken up again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxserve.core.errors import ConfigError
from jaxserve.training import checkpoints
from jaxserve.training.losses import Batch, Guesses
from jaxserve.training.settings import TrainSettings
from jaxserve.training.student import Parameters, Student
from jaxserve.training.target_states import RowsWithStates


class Trainer:
    """Trains one student.

    Attributes:
        total_steps: steps of the whole training.
        step: steps done.
        history: a record per evaluation: step, loss (of the steps since the last), held_out_loss, accepted (part of
            rows whose guesses up to and with this place were right), mean_length (tokens a step of decoding would
            yield, the target's own included), seconds (spent in this training so far).
    """

    def __init__(self, settings: TrainSettings, student: Student, train: RowsWithStates, held_out: RowsWithStates,
                 checkpoint: Path, identity: dict[str, Any]):  # fmt: skip
        """Takes up the training ``checkpoint`` holds, if there is one.

        Args:
            identity: what a checkpoint must agree with.

        Raises:
            ConfigError: no row to train on, or a checkpoint of another training.
        """
        self._settings, self._student = settings, student
        self._train, self._held_out = train, held_out
        self._checkpoint, self._identity = checkpoint, identity
        self._steps_per_epoch = len(train.rows) // settings.batch_rows
        if not self._steps_per_epoch or not len(held_out.rows):
            raise ConfigError(
                f"--data: {len(train.rows)} rows of {settings.sequence_length} tokens to train on and "
                f"{len(held_out.rows)} "
                f"held out; wanted at least {settings.batch_rows} and 1: give more text or lower --sequence-length"
            )
        self.total_steps = max(round(settings.epochs * self._steps_per_epoch), 1)
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self._seconds_before = 0.0
        # Copies, for a step is given its parameters to write over.
        parameters = {path: jnp.array(leaf, jnp.float32) for path, leaf in student.trained.items()}
        self._optimizer = _optimizer(settings, self.total_steps)
        self._state = (parameters, self._optimizer.init(parameters))
        self._restore()
        self._train_step = jax.jit(self._one_step, donate_argnums=0)
        self._evaluate_rows = jax.jit(self._guesses)

    @property
    def parameters(self) -> Parameters:
        """Trained parameters by path."""
        return self._state[0]

    @property
    def values(self) -> Parameters:
        """All arrays of the student by path, as they are now."""
        return {**self._student.fixed, **self.parameters}

    def run(
        self, progress: Callable[[int, str], None] = lambda num_tokens, note: None, until: int | None = None
    ) -> None:
        """Trains to the end (or to step ``until``), with evaluations and checkpoints on the way."""
        settings, start = self._settings, time.monotonic()
        losses: list[jax.Array] = []
        end = self.total_steps if until is None else min(until, self.total_steps)
        while self.step < end:
            indices = self._rows_of(self.step)
            key = jax.random.fold_in(jax.random.key(settings.seed), self.step)
            self._state, loss = self._train_step(self._state, self._student.fixed, self._train.batch(indices), key)
            losses.append(loss)
            self.step += 1
            note = f"step {self.step}/{self.total_steps} loss {float(loss):.3f}"
            if self.step % settings.eval_every == 0 or self.step == self.total_steps:
                seconds = self._seconds_before + time.monotonic() - start
                self.history.append({**self._evaluation(losses), "seconds": round(seconds, 1)})
                losses = []
            if self.step % settings.checkpoint_every == 0 or self.step == self.total_steps:
                self._save()
            if self.history:
                note += (
                    f" held-out {self.history[-1]['held_out_loss']:.3f} length {self.history[-1]['mean_length']:.2f}"
                )
            progress(self._train.rows[indices].num_tokens, note)

    def evaluate(self) -> Guesses:
        """How the student does on the held-out rows, summed over them; the losses are means."""
        rows, size = len(self._held_out.rows), self._settings.batch_rows
        total: Guesses | None = None
        batches = 0
        for start in range(0, rows, size):
            indices = np.arange(start, start + size)
            batch = self._held_out.batch(indices % rows)
            if start + size > rows:  # the last batch begins anew at the front; its repeated rows count as padding
                batch = batch._replace(segments=jnp.where((indices < rows)[:, None], batch.segments, 0))
            found = self._evaluate_rows(self.parameters, self._student.fixed, batch, jax.random.key(start))
            total = found if total is None else Guesses(*(a + b for a, b in zip(total, found, strict=True)))
            batches += 1
        assert total is not None
        return total._replace(loss=total.loss / batches)

    def _evaluation(self, losses: list[jax.Array]) -> dict[str, Any]:
        found = self.evaluate()
        accepted = np.asarray(found.accepted) / np.maximum(np.asarray(found.tried), 1)
        return {
            "step": self.step,
            "loss": round(float(np.mean([float(loss) for loss in losses])), 4),
            "held_out_loss": round(float(self._weighted(found.loss)), 4),
            "accepted": [round(float(part), 4) for part in accepted],
            "mean_length": round(1 + float(accepted.sum()), 4),
        }

    def _rows_of(self, step: int) -> np.ndarray:
        epoch, place = divmod(step, self._steps_per_epoch)
        order = _order(self._settings.seed, epoch, len(self._train.rows))
        return np.sort(order[place * self._settings.batch_rows : (place + 1) * self._settings.batch_rows])

    def _guesses(self, parameters: Parameters, fixed: Parameters, batch: Batch, key: jax.Array) -> Guesses:
        return self._student.guesses({**fixed, **parameters}, batch, key)

    def _weighted(self, losses: jax.Array) -> jax.Array:
        weights = self._student.decay ** jnp.arange(losses.shape[0])
        return jnp.sum(losses * weights) / jnp.sum(weights)

    def _one_step(self, state: Any, fixed: Parameters, batch: Batch, key: jax.Array) -> tuple[Any, jax.Array]:
        parameters, optimizer_state = state

        def loss_of(parameters: Parameters) -> jax.Array:
            return self._weighted(self._guesses(parameters, fixed, batch, key).loss)

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, optimizer_state = self._optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), loss

    def _save(self) -> None:
        checkpoints.save(self._checkpoint, self._state, self.step, self.history, self._identity)

    def _restore(self) -> None:
        saved = checkpoints.restore(self._checkpoint, self._identity)
        if saved is None:
            return
        leaves, structure = jax.tree.flatten(self._state)
        shapes = [array.shape for array in saved.arrays]
        if shapes != [leaf.shape for leaf in leaves]:
            raise ConfigError(f"{self._checkpoint}: made by another version; delete it to train anew")
        self._state = jax.tree.unflatten(structure, [jnp.asarray(array) for array in saved.arrays])
        self.step, self.history = saved.step, saved.history
        self._seconds_before = self.history[-1]["seconds"] if self.history else 0.0


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def _optimizer(settings: TrainSettings, total_steps: int) -> optax.GradientTransformation:
    rising = max(round(settings.warmup * total_steps), 1)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, rising, max(total_steps, rising + 1), settings.learning_rate * 0.02
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=settings.weight_decay),
    )
