"""DFLASH: a whole block of drafts in one pass over the target model's hidden states."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.models.loading.draft_config import block_size_of
from jaxserve.models.loading.draft_files import open_draft_files
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.runner.draft_runner import BlockDraftRunner
from jaxserve.runner.step_program import DraftForm
from jaxserve.runner.worker import BlockDraftWorker
from jaxserve.speculative.draft_model import RELAYED_CHAIN
from jaxserve.speculative.eagle import HeadAlgorithm
from jaxserve.text.tokenizer import Tokenizer


class DflashAlgorithm(HeadAlgorithm):
    """DFLASH (Z Lab, arXiv 2602.06036). Blocks are chains; the newest token is the first of a block, so a block of
    ``--speculative-num-draft-tokens`` brings one draft fewer. They may be shorter than the head was trained for."""

    name = "DFLASH"
    drafts_trees = False
    kv_lookahead = 0  # KV of a position is of the target's features there
    runner_class = BlockDraftRunner
    worker_class = BlockDraftWorker

    @classmethod
    def draft_form(cls, config: EngineConfig) -> DraftForm:
        return dataclasses.replace(RELAYED_CHAIN, hands_rows=True)

    @classmethod
    def settled(cls, config: EngineConfig) -> EngineConfig:
        if config.speculative_num_steps not in (None, 1):
            raise ConfigError(
                "DFLASH drafts a block in one step: --speculative-num-steps must be 1 or left out, got "
                f"{config.speculative_num_steps}; --speculative-num-draft-tokens is the size of a block"
            )
        tokens = config.speculative_num_draft_tokens
        if tokens is None and config.speculative_draft_model_path is not None:
            tokens = block_size_of(open_draft_files(cls.head_path(config)))
        drafts = dataclasses.replace(config, speculative_num_draft_tokens=tokens, speculative_num_steps=None)
        return dataclasses.replace(super().settled(drafts), speculative_num_steps=1)

    def load(self, target: LoadedModel, tokenizer: Tokenizer) -> None:
        super().load(target, tokenizer)
        model: Any = self.draft.bind(self.draft.leaves)
        tokens = self.context.config.speculative_num_draft_tokens
        assert tokens is not None
        if tokens > model.block_size:
            raise ConfigError(
                f"--speculative-num-draft-tokens {tokens} is larger than the blocks the head was trained for, "
                f"{model.block_size}; lower it"
            )
