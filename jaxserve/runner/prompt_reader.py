"""What a request wants to know of its prompt: log-probabilities of its tokens, or a pooled hidden state.

Both follow from the hidden states of a prompt chunk, which every EXTEND program returns. The programs here run behind
it. They read no shared row, so no fence knows them, and a request that wants nothing pays for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.runner.batch import PromptUse, StepBatch
from jaxserve.runner.either import either
from jaxserve.runner.step_program import HostInputs

BLOCK_ROWS = 64  # whose logits exist at the same time


class PromptScores(NamedTuple):
    """Of each token of a chunk, how likely the token behind it was.

    Attributes:
        logprobs: float32[Q], log-softmax of the raw logits at the token that follows.
        ranks: int32[Q], 1 for the most likely one.
        top_ids: int32[Q, 20]; top_logprobs: float32[Q, 20]: most likely tokens, falling; zero unless asked for.
    """

    logprobs: Any
    ranks: Any
    top_ids: Any
    top_logprobs: Any


class PooledChunk(NamedTuple):
    """Hidden states of a chunk put together: their ``total`` float32[hidden], and the ``last`` one."""

    total: Any
    last: Any


def make_score_program(bind: Callable[[list[jax.Array]], Any], num_ids: int | None) -> Callable:
    """``score(leaves, hidden [Q, H], tokens int32[1, Q], num_tokens, next_token, wants_top) -> PromptScores``."""

    def score(leaves, hidden, tokens, num_tokens, next_token, wants_top):
        model = bind(leaves)
        queries = tokens.shape[1]
        follows = jnp.where(jnp.arange(queries) == num_tokens - 1, next_token, jnp.roll(tokens[0], -1))
        block = min(BLOCK_ROWS, queries)
        padding = -queries % block
        states = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
        targets = jnp.pad(jnp.maximum(follows, 0), (0, padding)).reshape(-1, block)

        def one(inputs: tuple[jax.Array, jax.Array]) -> PromptScores:
            states, targets = inputs
            logits = model.logits(states)
            vocab = logits.shape[1]
            if num_ids is not None and num_ids < vocab:
                logits = jnp.where(jnp.arange(vocab) < num_ids, logits, -jnp.inf)
            log_probabilities = jax.nn.log_softmax(logits, -1)
            chosen = jnp.take_along_axis(log_probabilities, targets[:, None], 1)
            ranks = 1 + jnp.sum(log_probabilities > chosen, -1, dtype=jnp.int32)
            num_top = min(MAX_LOGPROBS, vocab)

            def with_top(values):
                top, ids = jax.lax.top_k(values, num_top)
                pad = ((0, 0), (0, MAX_LOGPROBS - num_top))
                return jnp.pad(ids.astype(jnp.int32), pad), jnp.pad(top, pad, constant_values=-jnp.inf)

            def without(values):
                shape = (values.shape[0], MAX_LOGPROBS)
                return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

            return PromptScores(
                chosen[:, 0], ranks, *either(wants_top, with_top, without, log_probabilities)
            )  # fmt: skip

        scores = jax.lax.map(one, (states, targets))
        return PromptScores(*(x.reshape(-1, *x.shape[2:])[:queries] for x in scores))

    return score


def pool_program(hidden: jax.Array, num_tokens: jax.Array) -> PooledChunk:
    """Hidden states [Q, H] of a chunk with ``num_tokens`` int32[] tokens, put together."""
    states = hidden.astype(jnp.float32)
    is_token = jnp.arange(states.shape[0]) < num_tokens
    total = jnp.sum(jnp.where(is_token[:, None], states, 0.0), 0)
    return PooledChunk(total, jax.lax.dynamic_slice_in_dim(states, num_tokens - 1, 1)[0])


class PromptReader:
    """The programs, one pair for each size of a prompt chunk.

    Args:
        dtype: of hidden states.
        num_ids: token ids that the tokenizer knows; vocabulary rows behind them are impossible. None: all are known.
        late: called with a label when one is compiled after warm-up.
    """

    def __init__(self, model: LoadedModel, dtype: Any, num_ids: int | None, late: Callable[[str], None]):
        self._model = model
        self._dtype = dtype
        self._num_ids = num_ids
        self._late = late
        self._compiled: dict[tuple[bool, int], Any] = {}  # by whether it pools, and the size of the chunk
        self.warm = False

    def warm_up(self, sizes: tuple[int, ...]) -> None:
        """Compiles the programs for chunks of these sizes; afterwards a compilation is an incident to be logged."""
        for queries in sizes:
            for pools in (False, True):
                self._program(pools, queries)
        self.warm = True

    def _program(self, pools: bool, queries: int) -> Any:
        key = pools, queries
        if key not in self._compiled:
            if self.warm:
                self._late(f"prompt {'pooling' if pools else 'scores'}[tokens={queries}]")
            leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._model.leaves]
            hidden = jax.ShapeDtypeStruct((queries, self._model.config.hidden_size), self._dtype)
            number = jax.ShapeDtypeStruct((), jnp.int32)
            if pools:
                lowered = jax.jit(pool_program).lower(hidden, number)
            else:
                tokens = jax.ShapeDtypeStruct((1, queries), jnp.int32)
                flag = jax.ShapeDtypeStruct((), jnp.bool_)
                program = make_score_program(self._model.bind, self._num_ids)
                lowered = jax.jit(program).lower(leaves, hidden, tokens, number, number, flag)
            self._compiled[key] = lowered.compile()
        return self._compiled[key]

    def read(self, batch: StepBatch, hidden: jax.Array, inputs: HostInputs) -> PromptScores | PooledChunk:
        """Launches what ``batch.prompt_use`` asks for, behind the EXTEND program that returned ``hidden``."""
        assert batch.prompt_use is not None
        pools = batch.prompt_use is PromptUse.POOLED
        program = self._program(pools, hidden.shape[0])
        if pools:
            return program(hidden, inputs.num_tokens[0])
        wants_top = np.bool_(batch.prompt_use is PromptUse.SCORES_WITH_TOP)
        chunk = inputs.tokens, inputs.num_tokens[0], inputs.next_token[0]
        return program(self._model.leaves, hidden, *chunk, wants_top)
