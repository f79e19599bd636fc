"""From committed tokens to deltas: text, stop conditions, finish reasons."""

from __future__ import annotations

from jaxserve.core.request import FinishReason, OutputDelta
from jaxserve.core.sequence import Sequence
from jaxserve.core.speculation_counts import SpeculationCounts
from jaxserve.runner.sampling_rows import stop_ids
from jaxserve.scheduler.scheduler import Committed
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer


class OutputBuilder:
    """Builds the deltas of one sequence.

    Attributes:
        finish_reason: why the output ended, once it has.
        speculation: what speculation did for the output; None where it is off.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], *,
                 speculative: bool = False):  # fmt: skip
        params = sequence.request.params
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.speculation = SpeculationCounts() if speculative else None
        self._stop_ids = set(stop_ids(params, eos_token_ids))
        self._explicit_stop_ids = set(params.stop_token_ids)
        self._text = IncrementalDetokenizer(
            tokenizer, params.skip_special_tokens, params.stop, params.include_stop_str_in_output, params.min_tokens,
            shown_special_ids=params.shown_special_ids,
        )  # fmt: skip
        # A stop id is part of the output's ids. Its text shows only if asked for, as that of stop strings does.
        self._show_stop_id = params.include_stop_str_in_output or not params.skip_special_tokens

    def push(self, committed: Committed) -> OutputDelta:
        """The delta of one committed token; sets ``finish_reason`` if it ends the output."""
        sequence = self.sequence
        token = committed.token_id
        if not committed.finite:
            return self.end("error", error="the model produced logits that are not numbers for this request")
        if sequence.constraint is not None and sequence.constraint.error is not None:
            return self.end("error", error=f"the grammar cannot be followed any further: {sequence.constraint.error}")
        text = ""
        stop_reason: int | str | None = None
        reason: FinishReason | None = None
        if token in self._stop_ids:
            reason = "stop"
            stop_reason = token if token in self._explicit_stop_ids else None
            if self._show_stop_id:
                text, _ = self._text.push([token])
        else:
            text, matched = self._text.push([token])
            if matched is not None:
                reason, stop_reason = "stop", matched
            elif committed.length >= sequence.max_total:
                reason = "length"
        if reason is not None:
            self.finish_reason = reason
            text += self._text.finish()
        self._count(committed)
        params, is_first = sequence.request.params, committed.length == sequence.prompt_len + 1
        tells = is_first and sequence.index == 0 and params.reads_prompt
        scores = sequence.prompt_results.logprobs if tells and params.prompt_logprobs is not None else None
        return OutputDelta(
            sequence.request.request_id, sequence.index, text, (token,),
            (committed.logprob,) if committed.logprob is not None else (), reason, stop_reason,
            speculation=self.speculation, cached_tokens=sequence.num_cached_tokens,
            prompt_logprobs=None if scores is None else tuple(scores),
            embedding=sequence.prompt_results.embedding if tells else None,
            from_drafts=(True,) if committed.is_draft else (),
        )  # fmt: skip

    def _count(self, committed: Committed) -> None:
        """Counts a verified row with its last token, or with the one that ends the output."""
        row, place = committed.verified, committed.place
        if row is None or self.speculation is None:
            return
        if place == row.num_accepted or self.finish_reason is not None:
            accepted = min(place + 1, row.num_accepted)
            self.speculation = self.speculation.with_row(row.num_drafted, accepted, num_emitted=place + 1)

    def end(self, reason: FinishReason, error: str | None = None) -> OutputDelta:
        """The last delta of an output that ends without a token: aborted or failed."""
        self.finish_reason = reason
        request_id, index = self.sequence.request.request_id, self.sequence.index
        return OutputDelta(
            request_id, index, self._text.finish(), finish_reason=reason, error=error, speculation=self.speculation,
            cached_tokens=self.sequence.num_cached_tokens,
        )  # fmt: skip
