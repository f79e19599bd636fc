"""The engine requests behind one HTTP request, read as one stream of deltas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request

from jaxserve.core.request import CompletionOutput, FinishReason, OutputDelta
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.speculation_counts import SpeculationCounts, total
from jaxserve.server.engine_protocol import EngineLike
from jaxserve.server.errors import GenerationFailed, NotServing
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.timeline.recorder import note_first_token


def names_of(request: Request, rid: str | None) -> frozenset[str]:
    """What a client may call its request by: its ``rid`` and its ``x-request-id``."""
    return frozenset({request.state.request_id, rid} - {None})


class Generation:
    """One engine request per prompt, ``n`` outputs each; choice ``i`` is output ``i % n`` of prompt ``i // n``.

    All requests are handed to the engine on construction, so one bad prompt refuses the whole batch. Use it as an
    async context manager: leaving it, for whatever reason, aborts what still runs.

    Args:
        default_max_tokens: where ``params`` has no limit, this one, or less near the end of the context. None: no limit
            but the context.
        scheduling: more arguments of ``EngineLike.generate``.
        prompt_only: the client wants nothing but the prompt: outputs are empty, whatever the engine makes.
        names: what ``/abort_request`` may call it, besides ``response_id``.

    Attributes:
        prompt_tokens: tokens of all prompts, each counted once.
        completion_tokens: tokens of all outputs so far.
        num_choices: number of outputs.
        names: what it may be called.

    Raises:
        InvalidRequest, CapacityError, EngineDead: from the engine, for any of the prompts.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        prompts: list[list[int]],
        params: SamplingParams,
        response_id: str,
        default_max_tokens: int | None = None,
        scheduling: Mapping[str, Any] | None = None,
        prompt_only: bool = False,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self._lifecycle = lifecycle
        self._engine: EngineLike = lifecycle.engine()
        self._params = params
        self._prompt_only = prompt_only
        self.names = names | {response_id}
        self._ended_for_shutdown = False
        self._sources: list[AsyncIterator[OutputDelta]] = []
        self._running_ids: list[str] = []
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.completion_tokens = 0
        self.num_choices = len(prompts) * params.n
        self._speculation: dict[int, SpeculationCounts] = {}  # by choice, so far
        self._cached_tokens: dict[int, int] = {}  # by position of the prompt; of its first output, which asked first
        self._unfinished = set(range(self.num_choices))
        try:
            for position, prompt in enumerate(prompts):
                request_id = f"{response_id}-{position}"
                own = self._within_context(prompt, params, default_max_tokens)
                self._sources.append(self._engine.generate(prompt, own, request_id, **(scheduling or {})))
                self._running_ids.append(request_id)
        except BaseException:
            self.abort()
            raise
        lifecycle.active.add(self)

    def _within_context(self, prompt: list[int], params: SamplingParams, default: int | None) -> SamplingParams:
        # A limit that the client chose and that does not fit is refused; one that it left to us is made to fit.
        if params.max_tokens is not None or default is None:
            return params
        room = self._engine.context_length - len(prompt)
        return dataclasses.replace(params, max_tokens=max(1, min(default, room)))

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._lifecycle.active.discard(self)
        if self._unfinished:
            self.abort()
        for source in self._sources:
            close = getattr(source, "aclose", None)
            if close is not None:
                with contextlib.suppress(Exception):
                    await close()

    def abort(self) -> None:
        """Ends the outputs; those that are not finished end with the reason ``abort``."""
        # Closing an async generator that never started runs none of its code, so it is not enough by itself.
        for request_id in self._running_ids:
            self._engine.abort(request_id)

    def end_for_shutdown(self) -> None:
        """Aborts; ``deltas`` then raises NotServing."""
        self._ended_for_shutdown = True
        self.abort()

    async def deltas(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """(choice, delta) of all outputs, interleaved as the engine makes them.

        Raises:
            GenerationFailed: an output ended in an error, or without a finish reason.
            NotServing: the server shut down before the outputs were finished.
            EngineDead: the engine stopped.
        """
        async with contextlib.aclosing(self._interleaved()) as interleaved:
            async for position, delta in interleaved:
                if delta.token_ids:
                    note_first_token()
                if self._prompt_only and delta.finish_reason in (None, "stop", "length"):
                    empty: dict[str, Any] = {"text": "", "token_ids": (), "logprobs": (), "stop_reason": None}
                    reason: FinishReason | None = None if delta.finish_reason is None else "length"
                    delta = dataclasses.replace(delta, **empty, finish_reason=reason)
                self.completion_tokens += len(delta.token_ids)
                choice = position * self._params.n + delta.index
                if delta.cached_tokens is not None and not delta.index:
                    self._cached_tokens[position] = delta.cached_tokens
                if delta.speculation is not None:
                    self._speculation[choice] = delta.speculation
                if delta.finish_reason is not None:
                    if delta.finish_reason == "error":
                        raise GenerationFailed(delta.error or "the engine failed on this request")
                    if delta.finish_reason == "abort" and self._ended_for_shutdown:
                        break
                    self._unfinished.discard(choice)
                yield choice, delta
        if self._unfinished:
            if self._ended_for_shutdown:
                raise NotServing("the server is shutting down; the output is incomplete", code="shutting_down")
            raise GenerationFailed("the engine ended an output without a finish reason")

    async def collect(self) -> list[CompletionOutput]:
        """All outputs, complete, in the order of choices.

        Raises:
            GenerationFailed, NotServing, EngineDead: as ``deltas``.
        """
        with_logprobs = self._params.logprobs is not None
        outputs = [CompletionOutput(i, logprobs=[] if with_logprobs else None) for i in range(self.num_choices)]
        async for choice, delta in self.deltas():
            outputs[choice].append(delta)
        return outputs

    def usage(self) -> dict[str, Any]:
        """Token counts so far, in the OpenAI shape; with speculation, what became of the drafts of all outputs."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self._cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached_tokens.values())}
        counts = total(list(self._speculation.values()))
        if counts is not None:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": counts.num_accepted,
                "rejected_prediction_tokens": counts.num_drafted - counts.num_accepted,
            }
        return usage

    async def _interleaved(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        if len(self._sources) == 1:  # the usual case needs no queue between engine and client
            async for delta in self._sources[0]:
                yield 0, delta
            return
        arrived: asyncio.Queue[tuple[int, OutputDelta | BaseException | None]] = asyncio.Queue()

        async def forward(position: int, source: AsyncIterator[OutputDelta]) -> None:
            ending: BaseException | None = None
            try:
                async for delta in source:
                    arrived.put_nowait((position, delta))
            except Exception as error:
                ending = error
            arrived.put_nowait((position, ending))

        forwards = [asyncio.create_task(forward(i, source)) for i, source in enumerate(self._sources)]
        try:
            num_open = len(forwards)
            while num_open:
                position, item = await arrived.get()
                if isinstance(item, OutputDelta):
                    yield position, item
                elif item is None:
                    num_open -= 1
                else:
                    raise item
        finally:
            for task in forwards:
                task.cancel()
            await asyncio.gather(*forwards, return_exceptions=True)
