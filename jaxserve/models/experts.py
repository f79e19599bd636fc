"""Mixture of experts: choosing them, and computing only what was chosen, in programs of fixed shapes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxserve.models.layers import linear

# Rows of one expert that are multiplied at once on a CPU. An expert seldom gets more in a step, and `linear` is at its
# best there.
_BLOCK_ROWS = 16


def choose_experts(
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array,
    *,
    num_chosen: int,
    num_groups: int = 1,
    num_groups_chosen: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Each token's experts by sigmoid scores with a correction that balances their load (DeepSeek-V3, section 2.1.2).

    The correction ``bias`` takes part in the choice, never in the weights. Groups are judged by the sum of their two
    best experts. All in float32: a rounding error here sends a token somewhere else.

    Args:
        x: Float[T, hidden].
        router: Float32[experts, hidden].
        bias: Float32[experts].
        num_chosen, num_groups, num_groups_chosen, normalize, scale: see ``Routing``.

    Returns:
        Int32[T, num_chosen] experts, no particular order; Float32[T, num_chosen] weights.
    """
    num_experts = router.shape[0]
    logits = jnp.einsum("th,eh->te", x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    corrected = scores + bias
    if num_groups_chosen < num_groups:
        grouped = corrected.reshape(-1, num_groups, num_experts // num_groups)
        judged = jax.lax.top_k(grouped, 2)[0].sum(-1)  # [T, groups]
        best = jax.lax.top_k(judged, num_groups_chosen)[1]
        is_open = (jnp.arange(num_groups) == best[:, :, None]).any(1)  # [T, groups]
        corrected = jnp.where(is_open[:, :, None], grouped, -jnp.inf).reshape(-1, num_experts)
    chosen = jax.lax.top_k(corrected, num_chosen)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return chosen, weights * scale


def apply_experts(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: jax.Array, weights: jax.Array
) -> jax.Array:
    """Weighted sum of each token's experts, ``down @ (silu(gate @ x) * (up @ x))``.

    Rows (one per token and chosen expert) are sorted by expert, so that each expert's weights are read once and those
    of experts nobody chose not at all. A row's result does not depend on which other rows there are.

    Args:
        x: Float[T, hidden].
        gate_up: Float[experts, 2 * inner, hidden], rows of the gate first.
        down: Float[experts, hidden, inner].
        chosen: Int32[T, K]; weights: Float32[T, K].

    Returns:
        Float[T, hidden].
    """
    num_tokens, num_chosen = chosen.shape
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    counts = jnp.bincount(chosen.reshape(-1), length=gate_up.shape[0])
    rows = x[order // num_chosen]
    out = jax.lax.platform_dependent(
        rows, gate_up, down, counts,
        cpu=partial(expert_blocks, block_rows=min(num_tokens, _BLOCK_ROWS)), default=expert_groups,
    )  # fmt: skip
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(num_tokens, num_chosen, -1)
    return jnp.einsum("tkh,tk->th", out.astype(jnp.float32), weights).astype(x.dtype)


def expert_blocks(
    rows: jax.Array, gate_up: jax.Array, down: jax.Array, counts: jax.Array, block_rows: int
) -> jax.Array:
    """One expert's rows after the other's, in blocks of ``block_rows``; as many turns of a loop as there are blocks.

    For the CPU: there ``ragged_dot`` multiplies every row with every expert, and asks for memory accordingly.

    Args:
        rows: Float[R, hidden] sorted by expert.
        gate_up, down: see ``apply_experts``.
        counts: Int32[experts], rows of each.

    Returns:
        Float[R, hidden].
    """
    num_rows = rows.shape[0]
    starts = jnp.cumsum(counts) - counts
    num_blocks = -(-counts // block_rows)
    ends = jnp.cumsum(num_blocks)
    padded = jnp.pad(rows, ((0, block_rows), (0, 0)))

    def one_block(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(ends, index, side="right")
        start = starts[expert] + (index - ends[expert] + num_blocks[expert]) * block_rows
        taken = jax.lax.dynamic_slice_in_dim(padded, start, block_rows)
        widen, narrow = (jax.lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in (gate_up, down))
        gate, up = jnp.split(linear(taken, widen), 2, axis=1)
        # Rows behind the expert's last are other experts': their blocks come later and overwrite this.
        return jax.lax.dynamic_update_slice_in_dim(out, linear(jax.nn.silu(gate) * up, narrow), start, 0)

    return jax.lax.fori_loop(0, ends[-1], one_block, jnp.zeros_like(padded))[:num_rows]


def expert_groups(rows: jax.Array, gate_up: jax.Array, down: jax.Array, counts: jax.Array) -> jax.Array:
    """The same by two grouped matrix products, for devices: a loop of unknown length would stop for the host each turn.

    Arguments and result as of ``expert_blocks``.
    """
    gate, up = jnp.split(jax.lax.ragged_dot(rows, gate_up.swapaxes(1, 2), counts), 2, axis=1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, down.swapaxes(1, 2), counts)
