"""What drafts are trained to do, as functions of a batch of packed rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.models.dflash import DflashModel
from jaxserve.models.eagle3 import Eagle3Model
from jaxserve.training.packed_attention import attend_blocks, attend_packed


class Batch(NamedTuple):
    """B packed rows of L tokens with the target's states.

    Attributes:
        ids, segments, positions: Int32[B, L]; answers: Bool[B, L]; see ``packing.PackedRows``.
        captured: Float[B, L, points * hidden], what the draft sees of the target.
        final: Float[B, L, hidden], behind the target's final norm.
        greedy: Int32[B, L], the token the target would write next; only for evaluation, else zeros.
    """

    ids: jax.Array
    segments: jax.Array
    positions: jax.Array
    answers: jax.Array
    captured: jax.Array
    final: jax.Array
    greedy: jax.Array


class Guesses(NamedTuple):
    """How guesses did, per place (EAGLE-3: step of the chain; DFLASH: place in the block).

    Attributes:
        loss: Float[places], mean cross-entropy.
        accepted: Float[places], rows whose guesses up to and with this place were all right.
        tried: Float[places], rows with a token to guess at this place.
    """

    loss: jax.Array
    accepted: jax.Array
    tried: jax.Array


def shifted(x: jax.Array, places: int) -> jax.Array:
    """``x[:, i + places]`` at i; zeros behind the end."""
    return jnp.pad(x[:, places:], [(0, 0), (0, places), *[(0, 0)] * (x.ndim - 2)])


def known_ids(model: Any, vocab_size: int) -> jax.Array:
    """Bool[vocab]: which target ids the draft can guess."""
    if model.target_ids is None:
        return jnp.ones(vocab_size, bool)
    return jnp.zeros(vocab_size, bool).at[model.target_ids[...]].set(True)


def eagle3_guesses(model: Eagle3Model, teacher_head: jax.Array, batch: Batch, num_steps: int) -> Guesses:
    """Chains of guesses from every position at once ("training-time test" in the paper).

    Step 0 sees the target's states. Step s is fed with step s - 1's output and the text's next token, and attends to
    step 0 of its own and earlier positions and to the steps of its own position in between, as a chain does at run
    time. Each step is compared with the target's own distribution over the ids the draft knows.

    Args:
        teacher_head: Float[draft_vocab, hidden], the target's head for those ids.
    """
    rows, length = batch.ids.shape
    order = jnp.arange(length)
    causal = (order[:, None] >= order) & (batch.segments[:, :, None] == batch.segments[:, None, :])
    teacher = jnp.einsum("blh,vh->blv", batch.final, teacher_head, preferred_element_type=jnp.float32)
    known = known_ids(model, model.config.vocab_size)[batch.ids]
    hidden = model.features(batch.captured.reshape(rows * length, -1))
    past: list[list[tuple[jax.Array, jax.Array]]] = [[] for _ in range(model.config.num_layers)]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.reshape(rows, length, *x.shape[1:]) for x in (q, k, v))
        past[layer].append((k, v))
        (first_k, first_v), *others = past[layer]
        return attend_packed(q, first_k, first_v, causal, others).reshape(rows * length, *q.shape[2:])

    losses, accepted, tried = [], [], []
    right = jnp.ones((rows, length), bool)
    for step in range(num_steps):
        tokens, positions = shifted(batch.ids, step + 1), batch.positions + step
        hidden = model(tokens.reshape(-1), positions.reshape(-1), hidden, attend)
        logits = model.logits(hidden).reshape(rows, length, -1)
        there = (batch.segments > 0) & (shifted(batch.segments, step + 2) == batch.segments)
        there &= shifted(batch.answers, step + 2)
        learned = there & shifted(known, step + 2)
        wanted = shifted(teacher, step + 1)
        cross_entropy = -jnp.sum(jax.nn.softmax(wanted) * jax.nn.log_softmax(logits), axis=-1)
        losses.append(_mean(cross_entropy, learned))
        guess = jnp.argmax(logits, axis=-1)
        guess = guess if model.target_ids is None else model.target_ids[...][guess]
        right &= guess == shifted(batch.greedy, step + 1)
        accepted.append(jnp.sum(right & there))
        tried.append(jnp.sum(there))
    return Guesses(jnp.stack(losses), jnp.stack(accepted).astype(jnp.float32), jnp.stack(tried).astype(jnp.float32))


def dflash_guesses(model: DflashModel, batch: Batch, num_blocks: int, key: jax.Array) -> Guesses:
    """Blocks at ``num_blocks`` places per row, drawn from those whose next token is an answer's.

    A guess is right here when it is the text's token, which for sampled text is less than the target would accept.
    """
    rows, length = batch.ids.shape
    size = model.block_size
    follows = (batch.segments > 0) & (shifted(batch.segments, 1) == batch.segments) & shifted(batch.answers, 1)
    draw = jnp.where(follows, jax.random.uniform(key, follows.shape), -1.0)
    drawn, anchors = jax.lax.top_k(draw, num_blocks)  # [B, N]
    places = anchors[:, :, None] + jnp.arange(size)  # [B, N, S]
    inside = places < length
    places = jnp.minimum(places, length - 1)

    def at_places(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, places.reshape(rows, -1), axis=1).reshape(places.shape)

    def at_anchors(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, anchors, axis=1)

    segment = at_anchors(batch.segments)
    seen = (batch.segments[:, None] == segment[:, :, None]) & (jnp.arange(length) < anchors[:, :, None])
    pool = model.context(batch.captured.reshape(rows * length, -1), batch.positions.reshape(-1))
    pool = [tuple(x.reshape(rows, length, *x.shape[1:]) for x in pair) for pair in pool]  # type: ignore[misc]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.reshape(rows, num_blocks, size, *x.shape[1:]) for x in (q, k, v))
        return attend_blocks(q, k, v, pool[layer], seen).reshape(-1, *q.shape[3:])

    first = jnp.arange(size) == 0
    tokens = jnp.where(first, at_anchors(batch.ids)[:, :, None], model.mask_token_id)
    positions = at_anchors(batch.positions)[:, :, None] + jnp.arange(size)
    hidden = model(tokens.reshape(-1), positions.reshape(-1), attend)
    hidden = hidden.reshape(rows, num_blocks, size, -1)[:, :, 1:]
    logits = model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(rows, num_blocks, size - 1, -1)

    wanted = at_places(batch.ids)[:, :, 1:]
    there = (inside & (at_places(batch.segments) == segment[:, :, None]) & at_places(batch.answers))[:, :, 1:]
    there &= (drawn > 0)[:, :, None]
    known = known_ids(model, model.config.vocab_size)
    draft_ids = jnp.cumsum(known) - 1  # draft ids rise with target ids
    log_probs = jax.nn.log_softmax(logits)
    cross_entropy = -jnp.take_along_axis(log_probs, draft_ids[wanted][..., None], axis=-1)[..., 0]
    learned = there & known[wanted]
    guess = jnp.argmax(logits, axis=-1)
    guess = guess if model.target_ids is None else model.target_ids[...][guess]
    right = jnp.cumprod(guess == wanted, axis=-1).astype(bool)
    loss = jnp.sum(cross_entropy * learned, axis=(0, 1)) / jnp.maximum(jnp.sum(learned, axis=(0, 1)), 1)
    return Guesses(loss, jnp.sum(right & there, axis=(0, 1)).astype(jnp.float32),
                   jnp.sum(there, axis=(0, 1)).astype(jnp.float32))  # fmt: skip


def _mean(x: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.sum(x * where) / jnp.maximum(jnp.sum(where), 1)
