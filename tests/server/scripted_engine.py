"""An engine without a model: byte tokens, and an output that the test scripts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

from prometheus_client import CollectorRegistry, Counter

from jaxserve.core.errors import CapacityError, EngineDead, InvalidRequest
from jaxserve.core.request import OutputDelta, TokenLogprob
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.speculation_counts import SpeculationCounts

EOS = 257


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 ``<s>``, 257 ``</s>``; no automatic BOS."""

    bos_token_id = 256
    eos_token_id = EOS
    vocab_size = 260
    special: ClassVar[dict[int, str]] = {256: "<s>", 257: "</s>", 258: "<|eot|>", 259: "<pad>"}
    special_ids = frozenset(special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raw = b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special))
        return raw.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        if not 0 <= token_id < 260:
            raise ValueError(f"no token {token_id}")
        return self.special.get(token_id) or bytes([token_id]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.special[token_id].encode() if token_id in self.special else bytes([token_id])


@dataclass
class ScriptedEngine:
    """Each output is ``script``; a step emits one token per output and takes ``step_s``.

    ``fail_after``: raise EngineDead after so many steps. ``refuse``: raised by ``generate``. ``speculates``: says
    with token i that i rows of three drafts were verified, and one draft of each held.
    """

    script: str = "Hello"
    step_s: float = 0.0
    fail_after: int | None = None
    error_after: int | None = None
    refuse: Exception | None = None
    refuse_from: int = 0  # the first request that is refused
    capacity: int = 64
    model_name: str = "scripted"
    served_model_name: str | None = None
    context_length: int = 512
    embedding_size: int = 8
    logprob: float = -0.5
    aborted: list[str] = field(default_factory=list)
    steps: int = 0
    num_generated: int = 0
    dead: str | None = None
    ready: bool = True
    stopped: bool = False
    speculates: bool = False

    def __post_init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.chat_template = None
        self.fatal: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.config = SimpleNamespace(served_model_name=self.served_model_name, model="default")
        self.running: dict[str, asyncio.Event] = {}
        registry = CollectorRegistry()
        Counter("jaxserve:generation_tokens", "tokens", registry=registry)
        self.metrics = SimpleNamespace(registry=registry)

    def encode_chat(self, messages, *, add_generation_prompt=True, **options) -> list[int]:
        self.chat_options = {"add_generation_prompt": add_generation_prompt, **options}
        if any("forbidden" in message["content"] for message in messages):
            raise InvalidRequest("the template refuses this", param="messages")
        text = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return self.tokenizer.encode(text + ("assistant:" if add_generation_prompt else ""))

    async def flush_cache(self) -> int:
        if self.running:
            raise CapacityError("busy")
        return 7

    def generate(self, prompt, params: SamplingParams, request_id: str | None = None, *,
                 priority: int = 0, cache_salt: str | None = None) -> AsyncIterator[OutputDelta]:  # fmt: skip
        self.scheduling = {"priority": priority, "cache_salt": cache_salt}
        if self.dead:
            raise EngineDead(self.dead)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise InvalidRequest("prompt must have at least one token", param="prompt")
        if any(i >= 260 for i in ids):
            raise InvalidRequest("prompt has ids outside the vocabulary", param="prompt")
        wanted = len(ids) + (params.max_tokens or 1)
        if wanted > self.context_length:
            message = f"prompt has {len(ids)} tokens and wants {wanted} in all, context is {self.context_length}"
            raise InvalidRequest(message, param="prompt", code="context_length_exceeded")
        if self.refuse is not None and self.num_generated >= self.refuse_from:
            raise self.refuse
        if len(self.running) >= self.capacity:
            raise CapacityError("full", status=503)
        self.num_generated += 1
        assert request_id is not None and request_id not in self.running
        self.running[request_id] = asyncio.Event()
        return self._steps(params, request_id)

    async def _steps(self, params: SamplingParams, request_id: str) -> AsyncIterator[OutputDelta]:
        aborted = self.running[request_id]
        tokens = self.tokenizer.encode(self.script) + ([] if params.ignore_eos else [EOS])
        if params.ignore_eos:
            tokens = tokens * 200
        limit = min(params.max_tokens or 10**9, len(tokens))
        decoders = [b""] * params.n
        try:
            for position in range(limit):
                await asyncio.sleep(self.step_s)
                self.steps += 1
                if self.fail_after is not None and position >= self.fail_after:
                    self.dead = "scripted failure"
                    raise EngineDead(self.dead)
                for index in range(params.n):
                    token = tokens[position]
                    if aborted.is_set():
                        yield OutputDelta(request_id, index, "", finish_reason="abort")
                        continue
                    if self.error_after is not None and position >= self.error_after:
                        yield OutputDelta(request_id, index, "", finish_reason="error", error="bad step")
                        continue
                    decoders[index] += b"" if token == EOS else bytes([token])
                    text = ""
                    with contextlib.suppress(UnicodeDecodeError):  # half a character waits for its other half
                        text, decoders[index] = decoders[index].decode(), b""
                    reason = "stop" if token == EOS else "length" if position == limit - 1 else None
                    logprobs = (self._logprob(token, params.logprobs),) if params.logprobs is not None else ()
                    counts = SpeculationCounts(3 * position, 2 * position, (0, position)) if self.speculates else None
                    yield OutputDelta(request_id, index, text, (token,), logprobs, reason, speculation=counts)
                if aborted.is_set() or (self.error_after is not None and position >= self.error_after):
                    return
            self.running.pop(request_id, None)
        finally:
            self.abort(request_id)  # closed or failed before the end

    def _logprob(self, token: int, count: int) -> TokenLogprob:
        top = tuple(((token + i) % 256, self.logprob - i) for i in range(count))
        top = tuple((i, -math.inf if lp < -3 else lp) for i, lp in top)
        return TokenLogprob(token, self.logprob, top)

    def abort(self, request_id: str) -> bool:
        event = self.running.pop(request_id, None)
        if event is None:
            return False
        self.aborted.append(request_id)
        event.set()
        return True

    def state(self) -> dict:
        return {"running": len(self.running), "waiting": 0, "ready": self.ready, "dead": self.dead}

    async def start(self) -> None:
        pass

    async def stop(self, drain_s: float = 5.0) -> None:
        self.stopped = True
