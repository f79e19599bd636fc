"""The suite for authors of algorithms: honest ones pass, each kind of dishonest one is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drafters import TreeProphet

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.runner.step_program import DraftForm, DraftRows
from jaxserve.runner.worker import TargetWorker
from jaxserve.speculative import registry
from jaxserve.speculative.base import Proposals, SpeculativeAlgorithm
from jaxserve.speculative.eagle import EagleAlgorithm
from jaxserve.testing import AlgorithmConformanceError, algorithm_conformance, examine_algorithm


@pytest.mark.parametrize(
    "settings", [{}, {"speculative_ngram_max_bfs_breadth": 4}, {"speculative_ngram_fence": "relay"}], ids=str
)
def test_ngram_conforms(settings):
    before = dict(registry._registered)  # of other tests
    report = algorithm_conformance("NGRAM", settings=settings)
    assert report.num_accepted > 30 and report.num_drafted > report.num_accepted
    assert registry._registered == before


class Repeats(SpeculativeAlgorithm):
    """Drafts the newest token again: a whole algorithm of a user's own."""

    def propose(self, contexts, num_drafts):
        tokens = np.stack([np.full(num_drafts, context[-1], np.int32) for context in contexts])
        parents = np.tile(np.arange(num_drafts, dtype=np.int32), (len(contexts), 1))
        return Proposals(tokens, parents, np.full(len(contexts), num_drafts, np.int32))


def test_an_algorithm_of_ones_own_conforms():
    before = dict(registry._registered)
    assert algorithm_conformance(Repeats, page_sizes=(4,)).num_drafted > 100
    assert registry._registered == before


class LeavesTheEvent(Repeats):
    @classmethod
    def draft_form(cls, config: EngineConfig) -> DraftForm:
        return DraftForm(DraftRows.LIVE)


def test_a_worker_that_does_not_clear_is_named_and_caught_by_its_tokens():
    report = examine_algorithm(LeavesTheEvent, page_sizes=(4,))
    assert any("leaves the read-done event in the mailbox" in v for v in report.violations)
    assert any("differs from plain decoding" in v for v in report.violations)


class Elsewhere(TargetWorker):
    """Its steps are said to end with a runner that has no part in them."""

    @property
    def last_shared_read_runner(self) -> Any:
        return SimpleNamespace(name="other", shared_read_done_event=None, take_shared_read_done_event=lambda: None)


class AsksElsewhere(Repeats):
    def make_worker(self, runner: Any, step_runner: Any) -> TargetWorker:
        return Elsewhere(runner, step_runner)


def test_a_wrong_owner_of_the_event_is_named():
    report = examine_algorithm(AsksElsewhere, page_sizes=(4,))
    assert report.violations == [
        "last_shared_read_runner is 'other', but the launch of 'target' reads shared rows last"
    ]


class DraftsInVain(Repeats):
    draft_form = EagleAlgorithm.draft_form


def test_drafts_that_nobody_would_look_at_are_named():
    report = examine_algorithm(DraftsInVain)
    assert report.violations[0].startswith("propose() returns drafts, but draft_form() says RELAYED")


class WrongShape(Repeats):
    def propose(self, contexts, num_drafts):
        tokens, parents, counts = super().propose(contexts, num_drafts)
        return Proposals(tokens.astype(np.int64), parents, counts)


class SecretTree(Repeats):
    def propose(self, contexts, num_drafts):
        tokens, parents, counts = super().propose(contexts, num_drafts)
        return Proposals(tokens, parents * 0, counts)


class ChildFirst(SecretTree):
    draft_form = TreeProphet.draft_form

    def propose(self, contexts, num_drafts):
        tokens, parents, counts = super().propose(contexts, num_drafts)
        return Proposals(tokens, parents + 3, counts)


class Raises(Repeats):
    def propose(self, contexts, num_drafts):
        return super().propose([c[2:] for c in contexts], num_drafts)


class TooMany(Repeats):
    def propose(self, contexts, num_drafts):
        tokens, parents, counts = super().propose(contexts, num_drafts)
        return Proposals(tokens, parents, counts + 1)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (WrongShape, r"returns tokens int64\[3, 1\], wanted int32\[3, 1\]"),
        (SecretTree, "returns a tree .* but draft_form.. says chains"),
        (ChildFirst, "a parent is the root, 0, or an earlier draft"),
        (Raises, "propose.. raised IndexError for contexts of 1 tokens"),
        (TooMany, "returns counts"),
    ],
)
def test_what_is_wrong_is_said(algorithm, message):
    with pytest.raises(AlgorithmConformanceError, match=message):
        algorithm_conformance(algorithm)


def test_what_is_no_algorithm_is_refused():
    with pytest.raises(ConfigError, match="must be a subclass"):
        algorithm_conformance(int)  # type: ignore[arg-type]
