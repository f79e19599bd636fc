"""Counts a sequence's tokens anew on the device, where its penalties need that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runner.batch import History
from jaxserve.runner.logit_controls import make_seed_program

SEED_TOKENS = 256  # of one launch


class CountSeeds:
    """The program that fills a slot's token counts. It reads no shared row, so no fence knows it.

    Args:
        late: called with a label when it is compiled after warm-up.
    """

    def __init__(self, num_rows: int, vocab_size: int, late: Callable[[str], None]):
        self._shape = (num_rows, vocab_size)
        self._late = late
        self._compiled: Any = None
        self.warm = False

    def compile(self) -> Any:
        """The program; compiles it the first time."""
        if self._compiled is None:
            if self.warm:
                self._late("token counts")
            number = jax.ShapeDtypeStruct((), jnp.int32)
            arguments = (
                jax.ShapeDtypeStruct(self._shape, jnp.int32), number, jax.ShapeDtypeStruct((SEED_TOKENS,), jnp.int32),
                number, number, jax.ShapeDtypeStruct((), jnp.bool_),
            )  # fmt: skip
            program = jax.jit(make_seed_program(SEED_TOKENS), donate_argnums=0)
            self._compiled = program.lower(*arguments).compile()
        return self._compiled

    def counted_anew(self, token_counts: jax.Array, slot: int, history: History) -> jax.Array:
        """``token_counts``, which are donated, with a slot's row made from its sequence's tokens."""
        program = self.compile()
        for start in range(0, max(1, len(history.tokens)), SEED_TOKENS):
            piece = history.tokens[start : start + SEED_TOKENS]
            tokens = np.zeros(SEED_TOKENS, np.int32)
            tokens[: len(piece)] = piece
            num_prompt = np.int32(np.clip(history.num_prompt - start, 0, SEED_TOKENS))
            token_counts = program(
                token_counts, np.int32(slot), tokens, np.int32(len(piece)), num_prompt, np.bool_(start == 0)
            )
        return token_counts
