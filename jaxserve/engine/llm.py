"""The blocking Python interface: ``LLM(...).generate(prompts, params)``."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidRequest
from jaxserve.core.request import CompletionOutput, OutputDelta, Request, RequestOutput
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine

Prompt: TypeAlias = str | Sequence[int] | dict[str, Any]


class LLM:
    """A model to generate with, in this process.

    Args:
        model: ``"default"``, a Hugging Face folder or a ``.gguf`` file.
        verbose: print progress while loading and compiling.
        engine_settings: any field of ``EngineConfig``.

    Raises:
        ConfigError, ModelLoadError: see ``EngineConfig`` and the message.

    Example:
        >>> with LLM() as llm:
        ...     out = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
        ...     print(out[0].outputs[0].text)
    """

    def __init__(self, model: str = "default", *, verbose: bool = False, **engine_settings: Any):
        config = EngineConfig(model=model, **engine_settings)
        self.engine = Engine(config, print if verbose else lambda message: None)
        self._lock = threading.Lock()  # the engine is stepped by whoever calls; two threads must not do it at once
        self._ids = itertools.count()

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]:  # fmt: skip
        """Continues each prompt; returns one output per prompt, in order.

        Args:
            prompts: strings, token-id lists, or ``{"prompt": str}`` / ``{"prompt_token_ids": [...]}``; or one of them.
            params: one for all, or one per prompt. Default: ``SamplingParams()``.

        Raises:
            InvalidRequest: a prompt or parameter that cannot be served; nothing was generated then.
        """
        batch = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[arg-type]
        encoded = [self._encode(prompt) for prompt in batch]  # type: ignore[arg-type]
        return self._run(encoded, self._params_for(len(encoded), params))

    def chat(self, messages: Sequence[dict] | Sequence[Sequence[dict]],
             params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]:  # fmt: skip
        """Answers one conversation, or several, by the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        encoded = [(None, self.engine.encode_chat(list(c))) for c in conversations]  # type: ignore[arg-type]
        return self._run(encoded, self._params_for(len(encoded), params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Yields deltas of one prompt's outputs as they arrive. Closing the iterator aborts the request."""
        return self._stream(*self._encode(prompt), params or SamplingParams())

    def chat_stream(self, messages: Sequence[dict], params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """As ``stream``, for a conversation."""
        return self._stream(None, self.engine.encode_chat(list(messages)), params or SamplingParams())

    def close(self) -> None:
        """Frees the engine."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" in prompt:
                return self._encode(prompt["prompt"])
            raise InvalidRequest("a prompt dict needs 'prompt' or 'prompt_token_ids'", param="prompt")
        if isinstance(prompt, str):
            return prompt, self.engine.tokenizer.encode(prompt)
        if not all(isinstance(token, int) for token in prompt):
            raise InvalidRequest("a prompt must be a string or a list of token ids", param="prompt")
        return None, list(prompt)

    def _params_for(self, count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise InvalidRequest(f"got {len(params)} SamplingParams for {count} prompts; send one, or one per prompt")
        return list(params)

    def _run(self, encoded: list[tuple[str | None, list[int]]], params: list[SamplingParams]) -> list[RequestOutput]:
        for (_, ids), each in zip(encoded, params, strict=True):
            self.engine.check(ids, each)  # all are checked before any is started
        outputs: dict[str, RequestOutput] = {}
        waiting = []
        for (prompt, ids), each in zip(encoded, params, strict=True):
            request = Request(f"llm-{next(self._ids)}", tuple(ids), each, prompt)
            completions = [CompletionOutput(i, logprobs=None if each.logprobs is None else []) for i in range(each.n)]
            outputs[request.request_id] = RequestOutput(request.request_id, prompt, ids, completions)
            waiting.append(request)
        with self._lock:
            waiting.reverse()
            while waiting or self.engine.has_work:
                # Fed as room appears, so that a list longer than the queue limit is no error here.
                while waiting and len(self.engine.scheduler.waiting) < self.engine.config.max_running_requests:
                    self.engine.add(waiting.pop())
                for delta in self.engine.step():
                    outputs[delta.request_id].outputs[delta.index].append(delta)
        for output in outputs.values():
            output.finished = True
        return list(outputs.values())

    def _stream(self, prompt: str | None, ids: list[int], params: SamplingParams) -> Iterator[OutputDelta]:
        request = Request(f"llm-{next(self._ids)}", tuple(ids), params, prompt)
        self.engine.check(ids, params)

        def deltas() -> Iterator[OutputDelta]:
            with self._lock:
                self.engine.add(request)
                try:
                    while self.engine.has_work:
                        yield from self.engine.step()
                finally:
                    self.engine.abort(request.request_id)
                    while self.engine.has_work:
                        self.engine.step()

        return deltas()


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, (str, dict)):
        return True
    return bool(prompts) and all(isinstance(token, int) for token in prompts)
