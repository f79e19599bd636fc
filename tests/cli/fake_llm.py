"""Stands in for ``jaxserve.engine.llm`` where a test is about the command line, not about a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from jaxserve.core.request import CompletionOutput, OutputDelta, RequestOutput
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.speculation_counts import SpeculationCounts


class FakeLLM:
    """Answers ``<prompt>!``; remembers how it was made and what it was asked."""

    made: list[FakeLLM] = []  # noqa: RUF012  cleared by install()
    failure: Exception | None = None
    speculation: SpeculationCounts | None = None  # of every output

    def __init__(self, **config: Any):
        if FakeLLM.failure is not None:
            raise FakeLLM.failure
        self.config = config
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.closed = False
        FakeLLM.made.append(self)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True

    def generate(self, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
        return [self._answer(prompt, prompt, params) for prompt in prompts]

    def chat(self, messages: list[list[dict[str, str]]], params: SamplingParams) -> list[RequestOutput]:
        return [self._answer(one, one[-1]["content"], params) for one in messages]

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[OutputDelta]:
        return self._deltas(self._answer(prompt, prompt, params))

    def chat_stream(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[OutputDelta]:
        return self._deltas(self._answer(list(messages), messages[-1]["content"], params))

    def _answer(self, asked: Any, text: str, params: SamplingParams) -> RequestOutput:
        self.asked.append((asked, params))
        outputs = [
            CompletionOutput(i, f"{text}!", [7], finish_reason="stop", speculation=self.speculation)
            for i in range(params.n)
        ]
        return RequestOutput("r", text, [1, 2], outputs, True)

    def _deltas(self, output: RequestOutput) -> Iterator[OutputDelta]:
        text = output.outputs[0].text
        for position, character in enumerate(text):
            yield OutputDelta("r", 0, character, finish_reason="stop" if position == len(text) - 1 else None)


def install(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Makes the commands use ``FakeLLM``."""
    FakeLLM.made, FakeLLM.failure = [], None
    package = ModuleType("jaxserve.engine")
    package.__path__ = []  # type: ignore[attr-defined]
    module = ModuleType("jaxserve.engine.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.engine", package)
    monkeypatch.setitem(sys.modules, "jaxserve.engine.llm", module)
    return FakeLLM
