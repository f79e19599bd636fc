"""What drafts are trained to do, as functions of a batch of packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxserve.models.dflash import DflashModel
from jaxserve.models.eagle import EagleModel
from jaxserve.models.eagle3 import Eagle3Model
from jaxserve.models.mimo_v2_mtp import MiMoV2MTPLayer
from jaxserve.training.packed_attention import attend_blocks, attend_packed, seen_in_rows


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
    """How guesses did, per place (EAGLE, EAGLE-3: step of the chain; MTP: layer; DFLASH: place in the block).

    Attributes:
        loss: Float[places], mean cross-entropy; of EAGLE with the distance of features.
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


def eagle_guesses(model: EagleModel, batch: Batch, num_steps: int, cross_entropy_weight: float) -> Guesses:
    """EAGLE: chains guess the target's final states, and through its head its tokens.

    The loss is that of the paper (arXiv 2401.15077, "Training of the draft models"): smooth L1 between an output and
    the target's final state at the position it stands for, a mean over both positions and elements, plus
    ``cross_entropy_weight`` (0.1 there) times the cross-entropy against the target's distribution. The paper trains one
    step, with noise on the states so that a chain bears its own errors; chains that are unrolled meet them.
    """
    outputs = chain_outputs(model, batch, num_steps)
    compared = _compared([_scores(model, output) for output in outputs], _scores(model, batch.final), batch, model)
    distances = [
        _mean(jnp.mean(optax.losses.huber_loss(output, shifted(batch.final, step + 1)), axis=-1), _there(batch, step))
        for step, output in enumerate(outputs)
    ]
    return compared._replace(loss=jnp.stack(distances) + cross_entropy_weight * compared.loss)


def eagle3_guesses(model: Eagle3Model, teacher_head: jax.Array, batch: Batch, num_steps: int) -> Guesses:
    """EAGLE-3: chains guess the target's tokens (arXiv 2503.01840).

    Args:
        teacher_head: Float[draft_vocab, hidden], the target's head for the ids the draft knows.
    """
    teacher = jnp.einsum("blh,vh->blv", batch.final, teacher_head, preferred_element_type=jnp.float32)
    outputs = chain_outputs(model, batch, num_steps)
    return _compared([_scores(model, output) for output in outputs], teacher, batch, model)


def chain_outputs(model: EagleModel | Eagle3Model, batch: Batch, num_steps: int) -> list[jax.Array]:
    """Chains of guesses from every position at once ("training-time test" in the EAGLE-3 paper).

    Step 0 sees the target's states. Step s is fed with step s - 1's output and the text's next token, and attends to
    step 0 of its own and earlier positions and to the steps of its own position in between, as a chain does at run
    time.

    Returns:
        Per step Float[B, L, hidden]: what comes out at position i guesses the token at i + step + 2.
    """
    rows, length = batch.ids.shape
    causal = seen_in_rows(batch.segments)
    past: list[list[tuple[jax.Array, jax.Array]]] = [[] for _ in range(model.config.num_layers)]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.reshape(rows, length, *x.shape[1:]) for x in (q, k, v))
        past[layer].append((k, v))
        (first_k, first_v), *others = past[layer]
        return attend_packed(q, first_k, first_v, causal, others).reshape(rows * length, *q.shape[2:])

    hidden = model.features(batch.captured.reshape(rows * length, -1))
    outputs = []
    for step in range(num_steps):
        tokens, positions = shifted(batch.ids, step + 1), batch.positions + step
        hidden = model(tokens.reshape(-1), positions.reshape(-1), hidden, attend)
        outputs.append(hidden.reshape(rows, length, -1))
    return outputs


def mtp_guesses(layers: Sequence[MiMoV2MTPLayer], batch: Batch) -> Guesses:
    """MTP layers guess the target's tokens, each one place further ahead than the layer before.

    Each is compared with the target's own distribution, as EAGLE-3 is: what counts here is to agree with this target.
    """
    scores = [_scores(layer, output) for layer, output in zip(layers, layer_outputs(layers, batch), strict=True)]
    return _compared(scores, _scores(layers[0], batch.final), batch, layers[0])


def layer_outputs(layers: Sequence[MiMoV2MTPLayer], batch: Batch) -> list[jax.Array]:
    """What MTP layers make of every position: each takes the target's states, and tokens of the text further ahead.

    When serving, the newest entries of a layer hold drafts of the layers before it, see ``runner.layer_draft_program``.
    What it makes of them matters only where those drafts hold, and then they are the tokens it is given here.

    Returns:
        Per layer Float[B, L, hidden]: what comes out of layer n at position i guesses the token at i + n + 2.
    """
    rows, length = batch.ids.shape
    seen = seen_in_rows(batch.segments, layers[0].config.attention_windows[0])

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
        q, k, v = (x.reshape(rows, length, *x.shape[1:]) for x in (q, k, v))
        return attend_packed(q, k, v, seen, sinks=sinks).reshape(rows * length, *q.shape[2:])

    positions, captured = batch.positions.reshape(-1), batch.captured.reshape(rows * length, -1)
    outputs = []
    for number, model in enumerate(layers):
        tokens = shifted(batch.ids, number + 1).reshape(-1)
        hidden = model(tokens, positions, model.features(captured), attend)
        outputs.append(hidden.reshape(rows, length, -1))
    return outputs


def _scores(model: Any, hidden: jax.Array) -> jax.Array:
    """Float[B, L, hidden] -> Float32[B, L, draft_vocab]."""
    return model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*hidden.shape[:2], -1)


def _there(batch: Batch, step: int) -> jax.Array:
    """Bool[B, L]: positions from which guess ``step``, of the token ``step + 2`` places on, is one of an answer."""
    there = (batch.segments > 0) & (shifted(batch.segments, step + 2) == batch.segments)
    return there & shifted(batch.answers, step + 2)


def _compared(scores: Sequence[jax.Array], teacher: jax.Array, batch: Batch, model: Any) -> Guesses:
    """Guesses further and further ahead, beside the target's own distribution over the ids the draft knows.

    Args:
        scores: per step Float32[B, L, draft_vocab], at position i of the token at i + step + 2.
        teacher: Float32[B, L, draft_vocab], the target's, at position i of the token at i + 1.
        model: says which ids the draft knows.

    Returns:
        The loss is the cross-entropy.
    """
    known = known_ids(model, model.config.vocab_size)[batch.ids]
    losses, accepted, tried = [], [], []
    right = jnp.ones(batch.ids.shape, bool)
    for step, logits in enumerate(scores):
        there, wanted = _there(batch, step), shifted(teacher, step + 1)
        cross_entropy = -jnp.sum(jax.nn.softmax(wanted) * jax.nn.log_softmax(logits), axis=-1)
        losses.append(_mean(cross_entropy, there & shifted(known, step + 2)))
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
