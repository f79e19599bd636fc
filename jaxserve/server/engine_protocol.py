"""What the server needs from an engine. ``AsyncEngine`` fits; so does the scripted engine of the tests."""

from __future__ import annotations

import concurrent.futures
from collections.abc import AsyncIterator
from typing import Any, Protocol

from jaxserve.core.request import OutputDelta
from jaxserve.core.sampling_params import SamplingParams


class TokenizerLike(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...  # highest token id + 1

    @property
    def special_ids(self) -> frozenset[int]: ...  # left out of text by ``skip_special_tokens``

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class EngineLike(Protocol):
    """An engine that serves one model.

    ``generate`` raises InvalidRequest, CapacityError or EngineDead before its first delta; ``encode_chat`` raises
    InvalidRequest. Closing the iterator of ``generate`` aborts the request.
    """

    model_name: str
    context_length: int
    embedding_size: int  # of the vectors it makes of prompts
    fatal: concurrent.futures.Future[None]  # done, with the error, when the process should end

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def config(self) -> Any: ...

    @property
    def metrics(self) -> Any: ...  # has .registry: prometheus_client.CollectorRegistry

    def encode_chat(
        self, messages: list[dict[str, Any]], **options: Any
    ) -> list[int]: ...  # options: of text.chat_template.encode_chat, and template

    def check_controls(self, params: SamplingParams) -> None: ...  # slow for a grammar that is new

    def generate(
        self, prompt: str | list[int], params: SamplingParams, request_id: str | None = None, *,
        priority: int = 0, cache_salt: str | None = None,
    ) -> AsyncIterator[OutputDelta]: ...  # fmt: skip

    async def flush_cache(self) -> int: ...  # pages that freed; CapacityError while requests run

    def abort(self, request_id: str) -> bool: ...

    def state(self) -> dict[str, Any]: ...

    async def start(self) -> None: ...

    async def stop(self, drain_s: float = 5.0) -> None: ...
