"""The blocking Python interface: ``LLM(...).generate(prompts, params)``."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidRequest
from jaxserve.core.request import CompletionOutput, OutputDelta, Request, RequestOutput
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.speculative.json_settings import merged, speculative_settings
from jaxserve.timeline.trace import Trace

Prompt: TypeAlias = str | Sequence[int] | dict[str, Any]
Encoded: TypeAlias = tuple[str | None, list[int]]  # the text, if there was one, and its ids


class LLM:
    """A model to generate with, in this process.

    Args:
        model: ``"default"``, a Hugging Face folder or a ``.gguf`` file.
        verbose: print progress while loading and compiling.
        trace: ``.json`` or ``.json.gz`` file to write a timeline to, when closed or when Python exits.
        speculative_config: speculation as vLLM's users write it, like ``{"method": "ngram"}``; the keys are those of
            ``--speculative-config``.
        engine_settings: any field of ``EngineConfig``.

    Raises:
        ConfigError, ModelLoadError: see ``EngineConfig`` and the message; or ``trace`` cannot be written.

    Example:
        >>> with LLM() as llm:
        ...     out = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
        ...     print(out[0].outputs[0].text)
    """

    def __init__(self, model: str = "default", *, verbose: bool = False, trace: str | Path | None = None,
                 speculative_config: Mapping[str, Any] | None = None, **engine_settings: Any):  # fmt: skip
        if speculative_config is not None:
            engine_settings = merged(engine_settings, speculative_settings(speculative_config))
        config = EngineConfig(model=model, **engine_settings)
        self._trace = None if trace is None else Trace(trace)  # a bad path is refused before anything is loaded
        self.engine = Engine(config, print if verbose else lambda message: None)
        if self._trace is not None:
            self._trace.start()
        self._lock = threading.Lock()  # the engine is stepped by whoever waits; two threads must not do it at once
        self._dropped: queue.SimpleQueue[str] = queue.SimpleQueue()  # requests nobody waits for any more
        self._closed = False
        self._ids = itertools.count()
        self._inboxes: dict[str, list[OutputDelta]] = {}  # deltas by request, whoever's step made them

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 priority: int | Sequence[int] = 0,
                 cache_salt: str | Sequence[str | None] | None = None) -> list[RequestOutput]:  # fmt: skip
        """Continues each prompt; returns one output per prompt, in order.

        Args:
            prompts: strings, token-id lists, or ``{"prompt": str}`` / ``{"prompt_token_ids": [...]}``; or one of them.
            params: one for all, or one per prompt. Default: ``SamplingParams()`` with ``max_tokens`` lowered to the
                room left in the context; parameters that are given are never changed, and refused if they do not fit.
            priority: one for all, or one per prompt; with ``schedule_policy="priority"`` lower is served earlier.
            cache_salt: one for all, or one per prompt; only prompts with the same salt share cached prefixes.

        Raises:
            InvalidRequest: a prompt or parameter that cannot be served; nothing was generated then.
        """
        if not isinstance(prompts, (str, dict, list, tuple)):
            raise InvalidRequest(f"prompts must be a prompt or a list of them, got {prompts!r}", param="prompt")
        batch: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        encoded = [self._encode(prompt) for prompt in batch]
        return self._run(self._requests(encoded, params, priority, cache_salt))

    def chat(self, messages: Sequence[dict] | Sequence[Sequence[dict]],
             params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             priority: int | Sequence[int] = 0, cache_salt: str | Sequence[str | None] | None = None, **template: Any,
             ) -> list[RequestOutput]:  # fmt: skip
        """Answers one conversation, or several, by the model's chat template. ``template`` says more about it: see
        ``Engine.encode_chat`` (``tools``, ``variables``, ``continue_final_message``)."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        encoded: list[Encoded] = [(None, self.engine.encode_chat(list(c), **template)) for c in conversations]  # type: ignore
        return self._run(self._requests(encoded, params, priority, cache_salt))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0,
               cache_salt: str | None = None) -> Iterator[OutputDelta]:  # fmt: skip
        """Yields deltas of one prompt's outputs as they arrive. Closing the iterator aborts the request."""
        return self._stream(*self._requests([self._encode(prompt)], params, priority, cache_salt))

    def chat_stream(self, messages: Sequence[dict], params: SamplingParams | None = None, *, priority: int = 0,
                    cache_salt: str | None = None) -> Iterator[OutputDelta]:  # fmt: skip
        """As ``stream``, for a conversation."""
        encoded: Encoded = (None, self.engine.encode_chat(list(messages)))
        return self._stream(*self._requests([encoded], params, priority, cache_salt))

    def close(self) -> None:
        """Frees the engine, and writes the trace if there is one. Streams that are still open raise EngineDead when
        asked for more. Idempotent."""
        with self._lock:
            self._closed = True
            self.engine.close()
        if self._trace is not None:
            self._trace.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Any) -> Encoded:
        if isinstance(prompt, dict):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown:
                wanted = "a prompt dict has 'prompt' and 'prompt_token_ids' (priority and cache_salt are arguments)"
                raise InvalidRequest(f"{wanted}, got {min(map(str, unknown))!r}", param="prompt")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
            if "prompt" in prompt:
                return self._encode(prompt["prompt"])
            raise InvalidRequest("a prompt dict needs 'prompt' or 'prompt_token_ids'", param="prompt")
        if isinstance(prompt, str):
            return prompt, self.engine.tokenizer.encode(prompt)
        return None, _token_ids(prompt)

    def _params_for(
        self, encoded: list[Encoded], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            return [self._default_params(ids) for _, ids in encoded]
        if isinstance(params, SamplingParams):
            return [params] * len(encoded)
        if not isinstance(params, (list, tuple)) or not all(isinstance(each, SamplingParams) for each in params):
            raise InvalidRequest(f"params must be SamplingParams or a list of them, got {params!r}")
        if len(params) != len(encoded):
            raise InvalidRequest(
                f"got {len(params)} SamplingParams for {len(encoded)} prompts; send one, or one per prompt"
            )
        return list(params)

    def _default_params(self, ids: list[int]) -> SamplingParams:
        default = SamplingParams()
        assert default.max_tokens is not None
        room = self.engine.context_length - len(ids)
        return dataclasses.replace(default, max_tokens=max(1, min(default.max_tokens, room)))

    def _requests(
        self, encoded: list[Encoded], params: SamplingParams | Sequence[SamplingParams] | None, priority: Any, salt: Any
    ) -> list[Request]:
        """All are checked before any is started. Raises InvalidRequest."""
        requests = []
        each = zip(
            encoded, self._params_for(encoded, params), _one_each("priority", priority, len(encoded)),
            _one_each("cache_salt", salt, len(encoded)), strict=True,
        )  # fmt: skip
        for (prompt, ids), own_params, own_priority, own_salt in each:
            self.engine.check(ids, own_params, own_priority)
            if own_salt is not None and not (isinstance(own_salt, str) and own_salt):
                raise InvalidRequest(f"cache_salt must be a non-empty string, got {own_salt!r}", param="cache_salt")
            request_id = f"llm-{next(self._ids)}"
            requests.append(
                Request(request_id, tuple(ids), own_params, prompt, priority=own_priority, cache_salt=own_salt)
            )
        return requests

    @contextlib.contextmanager
    def _engine_alone(self) -> Iterator[None]:
        """The engine for one thread; before it goes on, what was dropped meanwhile is aborted."""
        with self._lock:
            yield
            self._abort_dropped()
        self._abort_dropped_if_free()  # one may have been dropped between the last look and the release

    def _start(self, request: Request) -> bool:
        """Queues a request; False if there is no room for it now."""
        with self._engine_alone():
            if not self.engine.has_room(request.params.n):
                return False
            self.engine.add(request)
            self._inboxes[request.request_id] = []
        return True

    def _drop(self, request_id: str) -> None:
        """Forgets a request, and aborts it if it is not finished. The last one leaves the engine idle.

        Never waits: the garbage collector may close a stream inside a step of this very thread."""
        self._dropped.put(request_id)
        self._abort_dropped_if_free()

    def _abort_dropped_if_free(self) -> None:
        while not self._dropped.empty() and self._lock.acquire(blocking=False):
            try:
                self._abort_dropped()
            finally:
                self._lock.release()

    def _abort_dropped(self) -> None:
        while not self._dropped.empty():
            request_id = self._dropped.get()
            self._inboxes.pop(request_id, None)
            if not self._closed:
                self._deliver(self.engine.abort(request_id))
        while not self._closed and not self._inboxes and self.engine.has_work:
            self._deliver(self.engine.step())

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            if delta.request_id in self._inboxes:
                self._inboxes[delta.request_id].append(delta)

    def _step(self) -> None:
        """One step of the engine for everybody who waits."""
        with self._engine_alone():
            self._deliver(self.engine.step())

    def _take(self, request_id: str) -> list[OutputDelta]:
        with self._engine_alone():
            taken, self._inboxes[request_id] = self._inboxes[request_id], []
        return taken

    def _run(self, requests: list[Request]) -> list[RequestOutput]:
        outputs = {request.request_id: _empty_output(request) for request in requests}
        urgent_first = sorted(requests, key=lambda request: request.priority)
        unstarted, unfinished = collections.deque(urgent_first), set[str]()
        try:
            while unstarted or unfinished:
                # Fed as room appears, so that a list longer than the queue limit is no error here.
                while unstarted and self._start(unstarted[0]):
                    unfinished.add(unstarted.popleft().request_id)
                self._step()
                for request_id in list(unfinished):
                    output = outputs[request_id]
                    for delta in self._take(request_id):
                        output.outputs[delta.index].append(delta)
                    output.finished = all(each.finish_reason is not None for each in output.outputs)
                    if output.finished:
                        unfinished.remove(request_id)
                        self._drop(request_id)
        finally:
            for request_id in unfinished:
                self._drop(request_id)
        return list(outputs.values())

    def _stream(self, request: Request) -> Iterator[OutputDelta]:
        def deltas() -> Iterator[OutputDelta]:
            while not self._start(request):
                self._step()
            num_open = request.params.n
            try:
                while num_open:
                    for delta in self._take(request.request_id):
                        num_open -= delta.finish_reason is not None
                        yield delta
                    if num_open:
                        self._step()
            finally:
                self._drop(request.request_id)

        return deltas()


def _empty_output(request: Request) -> RequestOutput:
    params = request.params
    completions = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
    return RequestOutput(request.request_id, request.prompt, list(request.prompt_ids), completions)


def _token_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, (list, tuple)) or not all(isinstance(token, int) for token in prompt):
        raise InvalidRequest(f"a prompt must be a string or a list of token ids, got {prompt!r}", param="prompt")
    return list(prompt)


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"got {len(value)} values of {name} for {count} prompts; send one, or one per prompt")
    return list(value)


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, (str, dict)):
        return True
    return bool(prompts) and all(isinstance(token, int) for token in prompts)
