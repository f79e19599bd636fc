"""Choosing among the outputs of a prompt."""

from __future__ import annotations

import dataclasses

from jaxserve.core.request import CompletionOutput


def best_outputs(outputs: list[CompletionOutput], of: int, keep: int) -> list[CompletionOutput]:
    """Of every ``of`` outputs, which are those of one prompt, the ``keep`` best, numbered anew.

    Best is the highest mean log-probability per token, so that length decides nothing. Ties keep their order.
    """
    if of == keep:
        return outputs
    kept: list[CompletionOutput] = []
    for first in range(0, len(outputs), of):
        of_prompt = outputs[first : first + of]
        best = sorted(of_prompt, key=mean_logprob, reverse=True)[:keep]
        known = of_prompt[0].prompt_logprobs  # the first output's, whether or not it is kept
        kept += [
            dataclasses.replace(output, index=len(kept) + place, prompt_logprobs=known)
            for place, output in enumerate(best)
        ]
    return kept


def mean_logprob(output: CompletionOutput) -> float:
    """Mean log-probability of its tokens."""
    assert output.logprobs is not None
    return sum(one.logprob for one in output.logprobs) / max(1, len(output.logprobs))
