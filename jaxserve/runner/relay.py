"""What one launch leaves for the next on the device, by slot."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Relay(NamedTuple):
    """What a launch leaves for the next one, by slot; the row of the null slot means nothing.

    Attributes:
        tokens: int32[slots + 1], the newest token, which has no KV yet.
        token_counts: int32[slots + 1, V], which tokens a sequence holds, see ``runner.logit_controls``.
    """

    tokens: jax.Array
    token_counts: jax.Array
