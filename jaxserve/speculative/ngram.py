"""NGRAM: drafts are what followed the same n-gram earlier, in any prompt or output the server has seen."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.launch import Launch
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.step_program import DraftForm, DraftRows
from jaxserve.runner.step_runner import StepRunner
from jaxserve.runner.worker import TargetWorker
from jaxserve.speculative.base import AlgorithmContext, Proposals, SpeculativeAlgorithm
from jaxserve.speculative.ngram_corpus import NgramConfig, NgramCorpus

LONG_INSERT = 64  # tokens


class NgramWorker(TargetWorker):
    """Runs the target model; its verify steps read drafts after the marker."""

    def execute(self, batch: StepBatch, write_done: int, wants_logprobs: bool) -> Launch:
        launch = super().execute(batch, write_done, wants_logprobs)
        reason = self.coarse_reason(batch.mode)
        if reason is None:
            return launch
        # The event says where the backend's reads end, and the program goes on reading draft rows behind it.
        self.model_runner.shared_read_done_event = None
        return dataclasses.replace(launch, coarse_reason=reason)

    def coarse_reason(self, mode: ForwardMode) -> str | None:
        is_live = self.step_runner.drafts.rows is DraftRows.LIVE
        return "ngram" if mode is ForwardMode.TARGET_VERIFY and is_live else None


class NgramAlgorithm(SpeculativeAlgorithm):
    """Looks up the newest tokens in a trie of n-grams; needs no draft model.

    With ``--speculative-ngram-fence coarse`` (the default) verify programs read drafts where they use them and get the
    full-execution fence; with ``relay`` drafts are snapshotted with the other rows, and the fence is the backend's own.
    """

    name = "NGRAM"

    def __init__(self, context: AlgorithmContext):
        super().__init__(context)
        config = context.config
        self.context_window = config.speculative_ngram_max_match_window_size
        self._keep = config.speculative_ngram_max_trie_depth - 1
        self.corpus = NgramCorpus(
            NgramConfig(
                capacity=config.speculative_ngram_capacity,
                max_depth=config.speculative_ngram_max_trie_depth,
                max_match=config.speculative_ngram_max_match_window_size,
                min_breadth=config.speculative_ngram_min_bfs_breadth,
                max_breadth=config.speculative_ngram_max_bfs_breadth,
                mode=config.speculative_ngram_match_type,
            )
        )
        if config.speculative_ngram_external_corpus_path is not None:
            self.corpus.load(
                config.speculative_ngram_external_corpus_path,
                context.encode,
                max_tokens=config.speculative_ngram_external_corpus_max_tokens,
            )

    @classmethod
    def draft_form(cls, config: EngineConfig) -> DraftForm:
        rows = DraftRows.LIVE if config.speculative_ngram_fence == "coarse" else DraftRows.SNAPSHOT
        return DraftForm(rows, is_tree=config.speculative_ngram_max_bfs_breadth > 1)

    def propose(self, contexts: list[np.ndarray], num_drafts: int) -> Proposals:
        # Not waiting for prompts that are being inserted: what is not known yet is not drafted.
        tokens, parents, counts, _ = self.corpus.propose(contexts, num_drafts, flush=False)
        return Proposals(tokens, parents, counts)

    def observe(self, token_ids: list[int], num_new: int) -> None:
        # A prompt takes milliseconds; the tokens of a step, less than handing them to a thread.
        insert = self.corpus.insert_async if num_new > LONG_INSERT else self.corpus.insert
        insert(token_ids[-(self._keep + num_new) :], num_new)

    def make_worker(self, runner: ModelRunner, step_runner: StepRunner) -> TargetWorker:
        return NgramWorker(runner, step_runner)

    def close(self) -> None:
        self.corpus.close()
