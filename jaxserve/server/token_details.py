"""``token_details`` of a choice: its tokens one by one, and which of them were drafts that held."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from jaxserve.core.request import CompletionOutput, OutputDelta
from jaxserve.server.engine_protocol import TokenizerLike
from jaxserve.server.logprobs_wire import token_name


def token_details(tokenizer: TokenizerLike, output: OutputDelta | CompletionOutput) -> list[dict[str, Any]]:
    """One entry per token; ``token`` and ``bytes`` are written as in ``logprobs``."""
    entries = []
    for token_id, is_draft in zip_longest(output.token_ids, output.from_drafts, fillvalue=False):
        name, raw = token_name(tokenizer, token_id)
        entries.append({"token_id": token_id, "token": name, "bytes": list(raw), "accepted_draft": is_draft})
    return entries
