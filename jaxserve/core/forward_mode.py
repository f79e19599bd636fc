"""What a step computes."""

from __future__ import annotations

from enum import Enum, auto


class ForwardMode(Enum):
    """Kinds of step a runner executes.

    EXTEND computes KV of prompt tokens (prefill, possibly a chunk of it); DECODE adds one token to each sequence;
    TARGET_VERIFY scores several drafted tokens of each sequence at once; DRAFT_EXTEND runs a draft model over accepted
    tokens; IDLE computes nothing.
    """

    EXTEND = auto()
    DECODE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    IDLE = auto()
