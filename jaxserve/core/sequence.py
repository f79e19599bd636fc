"""One growing token list and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from jaxserve.core.request import FinishReason, Request, TokenLogprob
from jaxserve.core.token_constraint import TokenConstraint

if TYPE_CHECKING:
    import numpy as np


class Status(Enum):
    """The only statuses a sequence has."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass
class PromptResults:
    """What a request wanted to know of its prompt.

    Attributes:
        logprobs: of the prompt's tokens, from the first one, which has none.
        embedding: float32[hidden], pooled so far.
    """

    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    embedding: np.ndarray | None = None


@dataclass(eq=False)
class Sequence:
    """One output of a request while it is computed. The scheduler alone changes it.

    Attributes:
        request: what the client asked for.
        index: which of the request's outputs.
        seed: 64-bit seed of its random numbers.
        max_total: prompt and output tokens together it may reach.
        token_ids: prompt and committed output.
        slot: decode slot while RUNNING, else None.
        page_ids: KV pages, in position order.
        num_scheduled: tokens whose KV a dispatched step computes (or computed).
        num_in_flight: sampled tokens that are dispatched but not committed; of a verify step, the one it is sure of.
        prefill_len: tokens to prefill before decoding; the prompt, or after a preemption prompt and output so far.
        is_counted: whether the device knows which tokens it holds, or need not.
        constraint: what its output may say, as of the committed tokens; None: anything.
        awaits_verify: a verify step is in flight, so it is not known how many tokens it has.
        num_drafts: drafts behind its newest token that the steps planned so far leave on the device.
        num_preemptions: how often its pages were taken away.
        arrival: number among all sequences, in order of arrival.
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache before it was first preempted;
            None until then, and where the cache is off.
        prompt_results: what it wanted to know of its prompt, as far as that is known.
    """

    request: Request
    index: int
    seed: int
    max_total: int
    token_ids: list[int]
    status: Status = Status.WAITING
    slot: int | None = None
    page_ids: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    num_in_flight: int = 0
    prefill_len: int = 0
    num_preemptions: int = 0
    arrival: int = 0
    num_cached_tokens: int | None = None
    awaits_verify: bool = False
    num_drafts: int = 0
    is_counted: bool = True
    constraint: TokenConstraint | None = None
    finish_reason: FinishReason | None = None
    prompt_results: PromptResults = field(default_factory=PromptResults)

    @property
    def rank(self) -> tuple[int, int]:
        """Whose turn is first: the lower. Pages are taken from the highest first."""
        return self.request.priority, self.arrival

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.prompt_len

    @property
    def prefilling(self) -> bool:
        """Whether some of the tokens to prefill are not dispatched yet."""
        return self.num_scheduled < self.prefill_len

    @property
    def fully_planned(self) -> bool:
        """Whether its last token is committed or in flight: no further step is needed."""
        return len(self.token_ids) + self.num_in_flight >= self.max_total
