"""A speculative algorithm of your own: drafts what followed the same few tokens earlier in the same sequence.

    python examples/own_algorithm.py [MODEL]

Known as prompt lookup. An algorithm proposes whatever it likes; the target model verifies the proposals and keeps those
it would have chosen itself, so a bad draft costs time and never a token. ``test_own_algorithm.py`` proves the contract.
"""

from __future__ import annotations

import sys

import numpy as np

from jaxserve import LLM, SamplingParams, register_speculative_algorithm
from jaxserve.speculative.base import Proposals, SpeculativeAlgorithm


class PromptLookup(SpeculativeAlgorithm):
    """Looks for the newest two tokens, latest occurrence first."""

    ngram = 2

    def propose(self, contexts: list[np.ndarray], num_drafts: int) -> Proposals:
        batch = len(contexts)
        tokens = np.zeros((batch, num_drafts), np.int32)
        parents = np.tile(np.arange(num_drafts, dtype=np.int32), (batch, 1))  # a chain: each draft follows the last
        counts = np.zeros(batch, np.int32)
        for row, context in enumerate(contexts):
            drafts = self.continuation(context)[:num_drafts]
            tokens[row, : len(drafts)], counts[row] = drafts, len(drafts)
        return Proposals(tokens, parents, counts)

    def continuation(self, context: np.ndarray) -> np.ndarray:
        """What followed the newest tokens the last time; empty if they are new."""
        if len(context) <= self.ngram:
            return context[:0]
        windows = np.lib.stride_tricks.sliding_window_view(context[:-1], self.ngram)
        [ends] = np.nonzero((windows == context[-self.ngram :]).all(1))
        return context[ends[-1] + self.ngram :] if len(ends) else context[:0]


register_speculative_algorithm("prompt-lookup", PromptLookup)


def main(model: str) -> dict[str | None, list[int]]:
    prompt, params = "one two three one two three one two", SamplingParams(temperature=0.0, max_tokens=24)
    tokens: dict[str | None, list[int]] = {}
    for name in (None, "prompt-lookup"):
        with LLM(
            model, speculative_algorithm=name, context_length=128, max_running_requests=1, skip_warmup=True
        ) as llm:
            [output] = llm.generate(prompt, params)
            tokens[name] = output.outputs[0].token_ids
            if name is not None:
                figures = llm.engine.scheduler.speculation.figures
                print(f"{figures.num_accepted} of {figures.num_drafted} drafts held")
    print("the same tokens" if len(set(map(tuple, tokens.values()))) == 1 else "DIFFERENT TOKENS", tokens[None])
    return tokens


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "default")
