"""Algorithms for tests: they know the right answers, and draft them more or less faithfully."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.runner.step_program import DraftForm, DraftRows
from jaxserve.speculative import registry
from jaxserve.speculative.base import Proposals, SpeculativeAlgorithm
from jaxserve.speculative.ngram import NgramWorker
from jaxserve.testing.poison import known_future


class Prophet(SpeculativeAlgorithm):
    """Drafts what is right, with some tokens wrong, in a chain.

    Attributes:
        answers: whole sequences, prompt and output.
        wrong: share of drafted tokens that are not the right ones.
    """

    name = "PROPHET"
    answers: ClassVar[list[list[int]]] = []
    wrong = 0.2

    def __init__(self, context: Any):
        super().__init__(context)
        self.random = np.random.default_rng(2)

    @classmethod
    def future_of(cls, token_ids: list[int]) -> list[int]:
        """What follows; empty for what leads nowhere."""
        return known_future(cls.answers, token_ids)

    def slip(self, token: int) -> int:
        """The token, or by chance another."""
        return int((token + 1) % 250) if self.random.random() < self.wrong else token

    def propose(self, contexts: list[np.ndarray], num_drafts: int) -> Proposals:
        tokens = np.zeros((len(contexts), num_drafts), np.int32)
        parents = np.tile(np.arange(num_drafts, dtype=np.int32), (len(contexts), 1))
        counts = np.zeros(len(contexts), np.int32)
        for row, context in enumerate(contexts):
            drafts = [self.slip(token) for token in self.future_of(context.tolist())[:num_drafts]]
            drafts = drafts[: self.random.integers(0, len(drafts) + 1)] if self.random.random() < 0.2 else drafts
            tokens[row, : len(drafts)], counts[row] = drafts, len(drafts)
        return Proposals(tokens, parents, counts)


class LiveProphet(Prophet):
    """Its drafts are read where they are used, so its worker clears the mailbox, as NGRAM's does."""

    name = "LIVE-PROPHET"

    @classmethod
    def draft_form(cls, config: EngineConfig) -> DraftForm:
        return DraftForm(DraftRows.LIVE)

    def make_worker(self, runner: Any, step_runner: Any) -> NgramWorker:
        return NgramWorker(runner, step_runner)


class TreeProphet(LiveProphet):
    """Hides the right path between wrong siblings, in a tree."""

    name = "TREE-PROPHET"

    @classmethod
    def draft_form(cls, config: EngineConfig) -> DraftForm:
        return DraftForm(DraftRows.LIVE, is_tree=True)

    def propose(self, contexts: list[np.ndarray], num_drafts: int) -> Proposals:
        tokens = np.zeros((len(contexts), num_drafts), np.int32)
        parents = np.zeros((len(contexts), num_drafts), np.int32)
        counts = np.zeros(len(contexts), np.int32)
        for row, context in enumerate(contexts):
            node, count = 0, 0
            for token in self.future_of(context.tolist()):
                siblings = [(token + 7) % 250, self.slip(token)]
                if self.random.random() < 0.5:
                    siblings.reverse()
                if count + 2 > num_drafts:
                    break
                tokens[row, count : count + 2], parents[row, count : count + 2] = siblings, node
                node = count + 1 + siblings.index(token) if token in siblings else count + 1
                count += 2
            counts[row] = count
        return Proposals(tokens, parents, counts)


PROPHETS = (Prophet, LiveProphet, TreeProphet)


@contextlib.contextmanager
def registered(answers: Sequence[list[int]]) -> Iterator[None]:
    """The prophets are algorithms to be chosen, and know these answers."""
    Prophet.answers = list(answers)
    for prophet in PROPHETS:
        registry.register_speculative_algorithm(prophet.name, prophet)
    try:
        yield
    finally:
        for prophet in PROPHETS:
            del registry._registered[prophet.name]
