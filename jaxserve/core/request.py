"""What a client sent, and what it gets back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.speculation_counts import SpeculationCounts, total
from jaxserve.core.token_constraint import TokenConstraint

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Request:
    """One request: a prompt and how to continue it. Immutable.

    Attributes:
        request_id: unique among requests in flight.
        prompt_ids: the prompt as token ids; at least one.
        params: sampling and stopping.
        prompt: the text the ids came from, when there was one.
        constraint: makes what constrains each of its outputs; None: they may say anything.
        priority: lower is more urgent; only with ``--schedule-policy priority`` other than 0.
        cache_salt: only requests with the same salt share cached prefixes; None is a salt like any other.
        arrival_s: ``time.monotonic()`` when the request was accepted.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    constraint: Callable[[], TokenConstraint] | None = None
    priority: int = 0
    cache_salt: str | None = None
    arrival_s: float = field(default_factory=time.monotonic)

    @property
    def cache_namespace(self) -> tuple[str | None, ...]:
        """What its cached prefixes are kept apart by; a tuple, so that no two namespaces read alike."""
        return (self.cache_salt,)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one output token under the model's raw logits, with the most likely alternatives.

    Attributes:
        token_id: the token that was chosen.
        logprob: its natural-log probability.
        top: (token id, logprob) of the most likely tokens, falling; as many as the request asked for.
        rank: of a prompt token: 1 if it was the most likely one.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class OutputDelta:
    """What one step added to one output of a request; the unit of streaming.

    Attributes:
        request_id: the request it belongs to.
        index: which of the request's ``n`` outputs.
        text: text that became certain in this step; never part of a character or of a held-back stop string.
        token_ids: tokens committed in this step (in step with ``logprobs``; text may lag behind them).
        logprobs: one entry per token when the request asked for them, else empty.
        finish_reason: set on the last delta of the output, else None.
        stop_reason: the stop string or stop token id that ended it, else None.
        error: message when ``finish_reason`` is ``"error"``.
        speculation: what speculation did for this output so far; None where it is off.
        cached_tokens: prompt tokens that were not computed, because the prefix cache had their KV; None where that is
            off, and until it has been asked.
        from_drafts: of each token, whether it is a draft that held; empty: none is.
        prompt_logprobs: one entry per prompt token, the first of them None; on the first delta of output 0 of a request
            that asked for them.
        embedding: float32[hidden], the prompt's pooled hidden state, likewise.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    speculation: SpeculationCounts | None = None
    cached_tokens: int | None = None
    from_drafts: tuple[bool, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    embedding: np.ndarray | None = None


@dataclass
class CompletionOutput:
    """One finished (or growing) output: text, token ids, logprobs and why it ended; ``error`` if that was a failure.

    ``speculation`` says what speculation did for it; None where that is off. ``from_drafts`` says of each token whether
    it is a draft that held. ``cached_tokens`` are the prompt tokens that the prefix cache had. ``prompt_logprobs`` and
    ``embedding`` are of output 0 only, as in ``OutputDelta``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    speculation: SpeculationCounts | None = None
    cached_tokens: int | None = None
    from_drafts: list[bool] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: np.ndarray | None = None

    def append(self, delta: OutputDelta) -> None:
        """Adds a delta of the same output."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.from_drafts.extend(delta.from_drafts or [False] * len(delta.token_ids))
        if self.logprobs is not None:
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.error = delta.error
        if delta.speculation is not None:
            self.speculation = delta.speculation
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        if delta.embedding is not None:
            self.embedding = delta.embedding


@dataclass
class RequestOutput:
    """All outputs of one request, as ``LLM.generate`` returns them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens the prefix cache had when the request began; None where it is off."""
        return self.outputs[0].cached_tokens  # a later output may have found what the first one left

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """One entry per prompt token, the first of them None; None unless asked for."""
        return self.outputs[0].prompt_logprobs if self.outputs else None

    @property
    def speculation(self) -> SpeculationCounts | None:
        """What speculation did for all outputs together; None where it is off."""
        return total([each.speculation for each in self.outputs if each.speculation is not None])
