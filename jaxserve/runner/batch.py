"""The plan of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxserve.core.forward_mode import ForwardMode

Owner = TypeVar("Owner")


class PromptUse(Enum):
    """What is read of a prompt chunk beside what follows it.

    SCORES: how likely each of its tokens was; SCORES_WITH_TOP: and what was likelier. POOLED: its hidden states.
    """

    SCORES = auto()
    SCORES_WITH_TOP = auto()
    POOLED = auto()


class History(NamedTuple):
    """Tokens int32[n] of a sequence, of which the first ``num_prompt`` are its prompt and the others its output."""

    tokens: np.ndarray
    num_prompt: int


@dataclass(frozen=True)
class StepBatch(Generic[Owner]):
    """What one step computes. Made by the scheduler, executed by a runner; never changed.

    Attributes:
        step_number: the step's monotonic name.
        mode: EXTEND (one sequence's prompt chunk, or what is left of several prompts), DECODE, or TARGET_VERIFY.
        owners: who gets the results, one per live batch row, in row order.
        slots: int32[B], the slot of each live row.
        max_length: largest number of tokens any row has after this step; chooses the block-table width.
        tokens: int32[B, n] prompt tokens of EXTEND, each row's first ``num_tokens``; else None.
        num_tokens: int32[B] of EXTEND; None: every row has n.
        queries: tokens per row of TARGET_VERIFY: the newest one and as many drafts as the longest row has.
        num_drafted: drafts of all rows of TARGET_VERIFY together.
        drafted: of TARGET_VERIFY whose drafts never pass the host, how many each row has: int32[B].
        histories: of EXTEND, for slots whose tokens are to be counted anew, those that penalties count.
        masks: ids each row may choose, see ``runner.logit_controls.TokenMasks``: uint32[B, Q, words], of EXTEND
            uint32[B, 1, words]; None when all rows are free.
        undrafted: bool[B], rows none of whose drafts may hold, because they are not known to whoever made the masks;
            None: there is no such row.
        next_token: of EXTEND, the prompt token behind the chunk of a single row; -1 behind a last chunk.
        prompt_use: of EXTEND, what its single sequence wants to know of the prompt; None: nothing.
        is_greedy: whether every token that is used is its row's likeliest, and nobody asks for logprobs or controls.
        samples: whether the sampled tokens continue their sequences (false for a chunk that is not the prompt's last).
    """

    step_number: int
    mode: ForwardMode
    owners: tuple[Owner, ...]
    slots: np.ndarray
    max_length: int
    tokens: np.ndarray | None = None
    num_tokens: np.ndarray | None = None
    queries: int = 1
    num_drafted: int = 0
    drafted: np.ndarray | None = None
    histories: Mapping[int, History] = field(default_factory=dict)
    masks: np.ndarray | None = None
    undrafted: np.ndarray | None = None
    next_token: int = -1
    is_greedy: bool = False
    samples: bool = True
    prompt_use: PromptUse | None = None
