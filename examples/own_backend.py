"""An attention backend of your own: what it declares decides which fence the scheduler gets.

    python examples/own_backend.py [MODEL]

The class below keeps the inherited ``prep``, which reads the shared block table and lengths once, into private arrays,
at the head of the program. Registered without a declaration it counts as not audited and every step is fenced by the
whole execution (coarse). Declaring IN_REPLAY for the modes that were audited moves the fence to the read-done marker.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

from jaxserve import LLM, SamplingParams, register_attention_backend
from jaxserve.attention.base import AttentionBackend, SharedReadEnds
from jaxserve.core.forward_mode import ForwardMode


class PlainBackend(AttentionBackend):
    """Attention over cached and new tokens laid side by side: short, and slow."""

    def attend(self, step, layer, q, k, v):
        _, queries, heads, dim = q.shape
        group = heads // k.shape[2]
        keys, values = step.pool.gather(layer, step.metadata.block_tables)  # [KV, B, S, D]
        cached = keys.shape[2]
        keys = jnp.concatenate([keys, k.transpose(2, 0, 1, 3)], axis=2).repeat(group, axis=0)  # [H, B, S + Q, D]
        values = jnp.concatenate([values, v.transpose(2, 0, 1, 3)], axis=2).repeat(group, axis=0)
        is_cached = jnp.arange(cached + queries) < cached
        lengths = step.metadata.lengths[:, None, None]
        position = jnp.arange(cached + queries) + jnp.where(is_cached, 0, lengths - cached)  # [B, 1, S + Q]
        own_position = lengths + jnp.arange(queries)[:, None]  # [B, Q, 1]
        seen = jnp.where(is_cached, position < lengths, position <= own_position)
        if step.windows[layer] is not None:
            seen &= position > own_position - step.windows[layer]
        scores = jnp.einsum("bqhd,hbsd->hbqs", q, keys) * dim**-0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hbqs,hbsd->bqhd", weights, values).astype(q.dtype)


class AuditedBackend(PlainBackend):
    """The same, with its author's word that no shared row is read late; ``test_own_backend.py`` proves it."""

    def shared_read_ends(self, forward_mode: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.IN_REPLAY


register_attention_backend("plain", PlainBackend)
register_attention_backend("plain-audited", AuditedBackend)


def main(model: str) -> dict[str, tuple[list[int], dict]]:
    results = {}
    for backend in ("plain", "plain-audited"):
        with LLM(model, attention_backend=backend, context_length=128, max_running_requests=1, skip_warmup=True) as llm:
            [output] = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
            results[backend] = output.outputs[0].token_ids, dict(llm.engine.scheduler.barrier.counts)
        print(f"{backend:14} fences {results[backend][1]} tokens {results[backend][0]}")
    return results


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "default")
