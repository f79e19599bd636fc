"""STANDALONE: drafts of a small model of its own, with the target model's tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.loading.checkpoint import open_checkpoint, open_model_config
from jaxserve.models.loading.draft import check_kind
from jaxserve.models.loading.draft_files import open_draft_files
from jaxserve.models.loading.weights import LoadedModel, abstract_model, dummy_model, load_model
from jaxserve.speculative.draft_model import DraftModelAlgorithm
from jaxserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
# Text in which tokenizers of different models differ.
PROBES = ("Hello, world! 12345", "def f(x):\n    return x ** 2\n", "naïve café — 東京 🙂", "<|im_start|>user\n")


class StandaloneAlgorithm(DraftModelAlgorithm):
    """Any model whose tokenizer is the target's can draft for it; it sees tokens, never the target's states."""

    name = "STANDALONE"
    uses_features = False
    kv_lookahead = 0  # KV of a position is of the tokens up to it

    def _path(self) -> Path:
        path = self.context.config.speculative_draft_model_path
        assert path is not None
        return Path(path).expanduser()

    def load_abstract(self, target: LoadedModel) -> None:
        self.draft = abstract_model(open_model_config(self._path()), self.context.dtype)

    def load(self, target: LoadedModel, tokenizer: Tokenizer) -> None:
        config = self.context.config
        path = self._path()
        check_kind(open_draft_files(path), self.name)
        checkpoint = open_checkpoint(path)
        draft = checkpoint.model_config
        if checkpoint.tokenizer.vocab_size != tokenizer.vocab_size:
            raise ModelLoadError(
                f"{path}: its tokenizer knows {checkpoint.tokenizer.vocab_size} ids, the target model's "
                f"{tokenizer.vocab_size}; a STANDALONE draft model must share the tokenizer"
            )
        for probe in PROBES:
            if checkpoint.tokenizer.encode(probe) != tokenizer.encode(probe):
                raise ModelLoadError(
                    f"{path}: its tokenizer splits {probe!r} otherwise than the target model's; "
                    "a STANDALONE draft model must share the tokenizer"
                )
        length = config.context_length or target.config.max_position_embeddings
        if draft.max_position_embeddings < length:
            log.warning(
                "%s was made for %d tokens, the context length is %d: behind that its drafts will hardly hold",
                path, draft.max_position_embeddings, length,
            )  # fmt: skip
        dtype = self.context.dtype
        if config.load_format == "dummy":
            self.draft = dummy_model(draft, dtype, seed=1)
        else:
            self.draft = load_model(checkpoint, dtype)
