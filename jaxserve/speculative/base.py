"""The contract of a speculative algorithm."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.shapes import powers_of_two
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.step_program import CHAIN, DraftForm
from jaxserve.runner.step_runner import StepRunner
from jaxserve.runner.worker import TargetWorker
from jaxserve.text.tokenizer import Tokenizer

DEFAULT_DRAFT_TOKENS = 8
SMALLEST_VERIFY = 4


def refuse_draft_model_settings(config: EngineConfig, why: str) -> None:
    """Raises ConfigError if a setting of draft models is given where it would not be looked at."""
    for name in ("draft_model_path", "num_steps", "eagle_topk", "token_map"):
        if getattr(config, f"speculative_{name}") is not None:
            flag = f"--speculative-{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for draft models, and {why}; leave it out")


class Proposals(NamedTuple):
    """Drafts of B sequences, at most D tokens each.

    Attributes:
        tokens: int32[B, D].
        parents: int32[B, D], node number of each draft's parent: 0 is the sequence's newest token, j the draft in
            column j - 1. A parent comes before its children. What lies behind ``counts`` means nothing.
        counts: int32[B], drafts each sequence has, 0 .. D.
    """

    tokens: np.ndarray
    parents: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class AlgorithmContext:
    """What an algorithm is made from.

    Attributes:
        config: the engine's settings.
        vocab_size: ids below it may be drafted.
        encode: text -> token ids, without special tokens.
        dtype: of weights and KV.
    """

    config: EngineConfig
    vocab_size: int
    encode: Callable[[str], list[int]]
    dtype: Any = np.float32


class SpeculativeAlgorithm(ABC):
    """An algorithm that drafts on the host; the target model verifies the drafts in one step.

    It must not raise for any sequence of token ids, and may propose anything: what the target model would not have
    chosen is never delivered. One thread calls it.

    Attributes:
        name: what ``--speculative-algorithm`` selects.
        kv_lookahead: how many tokens behind a page its own KV in that page depends on. None: it cannot work with cached
            pages, as if it writes KV of positions that the step of the target model does not compute.
        context_window: newest tokens ``propose`` looks at; None: all of them.
        refuses_token_map: why ``--speculative-token-map`` means nothing to it; empty: it takes one.
    """

    name: ClassVar[str] = ""
    refuses_token_map: ClassVar[str] = "it cuts the target's LM head where an EAGLE head uses it"
    context_window: int | None = None
    kv_lookahead: ClassVar[int | None] = 0

    def __init__(self, context: AlgorithmContext):
        self.context = context

    @classmethod
    def draft_form(cls, config: EngineConfig) -> DraftForm:
        """What verify programs are compiled for: chains, read ahead of the marker, unless overridden.

        An algorithm whose drafts are read LIVE needs a worker that clears the target runner's mailbox.
        """
        return CHAIN

    @classmethod
    def settled(cls, config: EngineConfig) -> EngineConfig:
        """The settings with what was left to the algorithm filled in.

        Raises:
            ConfigError: settings it cannot work with.
        """
        refuse_draft_model_settings(config, f"{cls.name or cls.__name__} has none")
        if config.speculative_num_draft_tokens is not None:
            return config
        return dataclasses.replace(config, speculative_num_draft_tokens=DEFAULT_DRAFT_TOKENS)

    @classmethod
    def verify_tokens(cls, config: EngineConfig) -> tuple[int, ...]:
        """Tokens per row of the programs that verify, rising; the last is ``speculative_num_draft_tokens``.

        Args:
            config: settled.
        """
        most = config.speculative_num_draft_tokens
        assert most is not None, "the algorithm fills in what is not set"
        return powers_of_two(most, min(SMALLEST_VERIFY, most)) if config.speculative_adaptive else (most,)

    def load(self, target: LoadedModel, tokenizer: Tokenizer) -> None:  # noqa: B027  few have anything to load
        """Loads what it needs besides the target model, before pools are sized.

        Raises:
            ModelLoadError: it does not fit the target model.
        """

    @property
    def feature_points(self) -> tuple[int, ...]:
        """Where the target model is observed for it, see ``models.draft``; asked after ``load``."""
        return ()

    def kv_bytes_per_page(self, page_size: int) -> int:
        """Bytes of KV of its own that belong to each page; asked after ``load``."""
        return 0

    @abstractmethod
    def propose(self, contexts: list[np.ndarray], num_drafts: int) -> Proposals:
        """Drafts for sequences whose newest tokens are ``contexts``, int32[length] each; ``num_drafts`` at most."""

    def observe(self, token_ids: list[int], num_new: int) -> None:  # noqa: B027  not every algorithm looks
        """The last ``num_new`` of a sequence's tokens have just become certain; the first time that is the prompt."""

    def make_worker(self, runner: ModelRunner, step_runner: StepRunner) -> TargetWorker:
        """The worker that executes its steps. Its ``last_shared_read_runner`` owns the barrier's event."""
        return TargetWorker(runner, step_runner)

    def close(self) -> None:  # noqa: B027  few hold anything
        """Lets go of threads and files. Idempotent."""
