"""From a step's arrays to what requests are told of their tokens."""

from __future__ import annotations

from jaxserve.core.request import TokenLogprob
from jaxserve.core.sequence import PromptResults, Sequence
from jaxserve.runner.batch import PromptUse, StepBatch
from jaxserve.runner.launch import StepResult
from jaxserve.runner.prompt_reader import PooledChunk, PromptScores


def output_logprob(sequence: Sequence, result: StepResult, row: int, place: int) -> TokenLogprob | None:
    """The log-probability of a token that a step chose, if its request wants it."""
    count = sequence.request.params.logprobs
    if count is None:
        return None
    at = row, place
    top = zip(result.top_ids[at][:count].tolist(), result.top_logprobs[at][:count].tolist(), strict=True)
    return TokenLogprob(int(result.tokens[at]), float(result.logprobs[at]), tuple(top))


def prompt_use(sequence: Sequence) -> PromptUse | None:
    """What the next chunk of a sequence is to be read for. Output 0 speaks for all outputs of a request, and a sequence
    that comes back after a preemption with output has been read already."""
    params = sequence.request.params
    if sequence.index or sequence.num_output or not params.reads_prompt:
        return None
    if params.pooling is not None:
        return PromptUse.POOLED
    return PromptUse.SCORES_WITH_TOP if params.prompt_logprobs else PromptUse.SCORES


def keep_prompt_results(batch: StepBatch[Sequence], result: StepResult) -> None:
    """Keeps what a step read of a prompt chunk with its sequence."""
    if result.prompt is None:
        return
    (sequence,) = batch.owners
    assert batch.tokens is not None
    count = batch.tokens.shape[1]
    start = batch.max_length - count
    if start == 0:  # also when it is computed again, after a preemption
        sequence.prompt_results = PromptResults([None])
    kept = sequence.prompt_results
    if isinstance(result.prompt, PromptScores):
        kept.logprobs += _scores(sequence, result.prompt, start, count)
    elif sequence.request.params.pooling == "last":
        kept.embedding = result.prompt.last
    else:
        assert isinstance(result.prompt, PooledChunk)
        mean = result.prompt.total / sequence.prompt_len
        kept.embedding = mean if kept.embedding is None else kept.embedding + mean


def _scores(sequence: Sequence, scores: PromptScores, start: int, count: int) -> list[TokenLogprob]:
    num_top = sequence.request.params.prompt_logprobs or 0
    known = []
    for place in range(min(count, sequence.prompt_len - start - 1)):  # the prompt's last token is followed by no other
        top = zip(scores.top_ids[place][:num_top].tolist(), scores.top_logprobs[place][:num_top].tolist(), strict=True)
        token = sequence.token_ids[start + place + 1]
        known.append(TokenLogprob(token, float(scores.logprobs[place]), tuple(top), int(scores.ranks[place])))
    return known
