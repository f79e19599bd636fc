"""What requests do to logits before sampling: penalties, bias, ids held back, token masks; inside the program.

Order: repetition penalty, frequency and presence penalty, bias, stop ids that ``min_tokens`` holds back, token mask.
Rows that ask for nothing keep their logits bit for bit; if no row asks, nothing of this runs.

``Relay.token_counts`` int32[slots + 1, V] lies on the device and knows, for every slot, what its sequence holds: the
low 30 bits count a token in the output, bit 30 says that it stands in the prompt. Step programs add what they emit, so
a step sees the tokens of the one before it without the host. A sequence that asks for penalties starts by having its
row made anew from its tokens (``make_seed_program``), which is also how it comes back after a preemption. The rows of
other sequences count too, from whatever was there: nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.core.sampling_params import MAX_LOGIT_BIAS
from jaxserve.runner.either import either
from jaxserve.runner.sampling_rows import (
    CONTROLS,
    FLAGS,
    FREQUENCY,
    HAS_BIAS,
    HAS_MIN_TOKENS,
    HAS_PENALTIES,
    MIN_LENGTH,
    PRESENCE,
    REPETITION,
)

IN_PROMPT = 1 << 30
MASK_BITS = 32  # ids per word of a token mask
FREE = 0xFFFFFFFF  # a word that allows all of its ids


class TokenMasks(NamedTuple):
    """Which ids the rows of a step may choose.

    Attributes:
        words: uint32[R, ceil(V / 32)], bit i % 32 of word i // 32 allows id i; rows that are free have all bits set.
        any: int32[], whether some row is not free.
        undrafted: bool[B], batch rows whose drafts never passed the host: their masks are right behind the newest token
            only, and no draft of theirs may hold.
    """

    words: jax.Array
    any: jax.Array
    undrafted: jax.Array


class Controls(NamedTuple):
    """What the logits of R = B * Q rows depend on, besides the model.

    Attributes:
        floats, ints: sampling rows of the B batch rows.
        bias_ids, bias_values: bias rows of the B batch rows.
        positions: int32[R], where the tokens to be chosen will stand.
        token_counts: int32[slots + 1, V].
        slots: int32[B].
        drafts: (tokens int32[B, Q], seen bool[B, Q, Q]) of draft nodes, see ``runner.verify``: a node's logits know the
            nodes it sees, its own token included; the root is counted already. None where Q is 1.
        masks: of the R rows; None in programs that take none.
    """

    floats: jax.Array
    ints: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    positions: jax.Array
    token_counts: jax.Array
    slots: jax.Array
    drafts: tuple[jax.Array, jax.Array] | None = None
    masks: TokenMasks | None = None

    @property
    def asked(self) -> jax.Array:
        """bool[]: whether some row's logits change."""
        asked = self._has(CONTROLS).any()
        return asked if self.masks is None else asked | (self.masks.any > 0)

    def _has(self, flags: int) -> jax.Array:
        """bool[B]."""
        return (self.ints[:, FLAGS] & flags) != 0

    def apply(self, logits: jax.Array) -> jax.Array:
        """The logits float32[R, V] as the sampler is to see them."""
        batch = self.ints.shape[0]
        rows, vocab = logits.shape
        by_node = logits.reshape(batch, rows // batch, vocab)
        for flags, change in (
            (HAS_PENALTIES, self._penalised),
            (HAS_BIAS, self._biased),
        ):
            has = self._has(flags)

            def changed(logits, change=change, has=has):
                return jnp.where(has[:, None, None], change(logits), logits)

            by_node = either(has.any(), changed, lambda logits: logits, by_node)
        return self._held_back(by_node).reshape(rows, vocab)

    def _penalised(self, logits: jax.Array) -> jax.Array:
        batch, queries, _ = logits.shape
        counts = jnp.broadcast_to(self.token_counts[self.slots][:, None], logits.shape)
        if self.drafts is not None:
            tokens, seen = self.drafts
            row, node = jnp.arange(batch)[:, None, None], jnp.arange(queries)[None, :, None]
            counts = counts.at[row, node, tokens[:, None, 1:]].add(seen[:, :, 1:].astype(jnp.int32))
        num_output = (counts & (IN_PROMPT - 1)).astype(jnp.float32)
        frequency, presence, repetition = (
            self.floats[:, column][:, None, None] for column in (FREQUENCY, PRESENCE, REPETITION)
        )
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(counts > 0, repeated, logits)
        return logits - frequency * num_output - presence * (num_output > 0)

    def _biased(self, logits: jax.Array) -> jax.Array:
        row = jnp.arange(logits.shape[0])[:, None]
        bias = jnp.zeros((logits.shape[0], logits.shape[2]), jnp.float32)
        bias = bias.at[row, self.bias_ids[:, :MAX_LOGIT_BIAS]].add(self.bias_values, mode="drop")
        return logits + bias[:, None]

    def _held_back(self, logits: jax.Array) -> jax.Array:
        batch, queries, vocab = logits.shape
        positions = self.positions.reshape(batch, queries)
        holds = self._has(HAS_MIN_TOKENS)[:, None] & (positions < self.ints[:, MIN_LENGTH][:, None])

        def masked(logits):
            free = logits
            if self.masks is not None:
                words = self.masks.words.reshape(batch, queries, -1)
                ids = jnp.arange(vocab)
                allowed = (words[:, :, ids // MASK_BITS] >> (ids % MASK_BITS).astype(jnp.uint32)) & 1
                free = jnp.where(allowed > 0, logits, -jnp.inf)
            row = jnp.arange(batch)[:, None]
            stops = jnp.zeros((batch, vocab), bool)
            stops = stops.at[row, self.bias_ids[:, MAX_LOGIT_BIAS:]].set(True, mode="drop")
            held = jnp.where(holds[:, :, None] & stops[:, None], -jnp.inf, free)
            # Where a mask leaves nothing but stop ids, the mask is what holds.
            return jnp.where(jnp.isneginf(held.max(-1, keepdims=True)), free, held)

        asked = holds.any() if self.masks is None else holds.any() | (self.masks.any > 0)
        return either(asked, masked, lambda logits: logits, logits)


def counted(token_counts: jax.Array, slots: jax.Array, tokens: jax.Array, is_emitted: jax.Array | None) -> jax.Array:
    """``token_counts`` with emitted tokens added to the outputs of their slots.

    Args:
        slots: int32[B].
        tokens: int32[B, Q].
        is_emitted: bool[B, Q]; None: all are.
    """
    added = jnp.ones(tokens.shape, jnp.int32) if is_emitted is None else is_emitted.astype(jnp.int32)
    return token_counts.at[slots[:, None], tokens].add(added)


def make_seed_program(num_tokens: int) -> Callable:
    """``seed(token_counts, slot, tokens, num_valid, num_prompt, is_first) -> token_counts``, the counts donated.

    Adds up to ``num_tokens`` tokens of a sequence to its slot's row: of ``tokens`` int32[num_tokens] the first
    ``num_prompt`` stand in the prompt, the others up to ``num_valid`` in the output. ``is_first`` clears the row ahead.
    """

    def seed(token_counts, slot, tokens, num_valid, num_prompt, is_first):
        place = jnp.arange(num_tokens)
        row = jnp.where(is_first, 0, token_counts[slot])
        # All of a prompt comes before all of its output, so here a count is either 0 or the bit alone.
        row = row.at[tokens].max(jnp.where(place < jnp.minimum(num_prompt, num_valid), IN_PROMPT, 0))
        row = row.at[tokens].add(((place >= num_prompt) & (place < num_valid)).astype(jnp.int32))
        return token_counts.at[slot].set(row)

    return seed
