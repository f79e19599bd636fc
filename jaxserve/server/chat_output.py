"""From the text of a chat output to the fields of its message: content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.core.request import FinishReason
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.engine_protocol import TokenizerLike
from jaxserve.server.settings import ServerSettings
from jaxserve.server.tools_wire import ToolUse
from jaxserve.text.reasoning import ReasoningParser, reasoning_parser
from jaxserve.text.tool_calls.base import Arguments, CallEnd, CallStart, Text, ToolCallParser

PROMPT_END_TOKENS = 16  # enough to hold what a template opens reasoning with


@dataclass(frozen=True)
class OutputForm:
    """What the outputs of one request are parsed for.

    Attributes:
        make_parser: of tool calls; None: there are none to look for.
        reasoning: the parser of reasoning; None: it stays in the content.
        prompt_end: the last characters of the prompt.
        parallel: whether an output may hold several calls.
    """

    make_parser: Callable[[], ToolCallParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    prompt_end: str = ""
    parallel: bool = True

    @classmethod
    def of(cls, settings: ServerSettings, use: ToolUse, separate: bool, params: SamplingParams) -> OutputForm:
        """From what the server is told and what the request says; the prompt is not known yet.

        An output that has to follow a form cannot hold reasoning, so none is looked for.

        Raises:
            InvalidRequest: the server does not know how the model writes calls.
        """
        name = settings.reasoning_parser if separate and params.structured_outputs is None else None
        reasoning = None if name is None else reasoning_parser(name)
        return cls(use.parser(settings.tool_call_parser), reasoning, parallel=use.parallel)

    def shown_ids(self, tokenizer: TokenizerLike) -> tuple[int, ...]:
        """Control tokens that the parsers want to see in the text."""
        marks = set(self.reasoning.marks if self.reasoning else ())
        marks.update(self.make_parser().marks if self.make_parser else ())
        return tuple(i for i in sorted(tokenizer.special_ids) if marks and tokenizer.token_text(i) in marks)

    def prompt_end_of(self, prompt: list[int], tokenizer: TokenizerLike) -> str:
        """What ``prompt_end`` should be for this prompt; empty where nobody looks at it."""
        return tokenizer.decode(prompt[-PROMPT_END_TOKENS:], False) if self.reasoning else ""


class ChatOutput:
    """One output, read as it grows. A streamed and a whole answer are made by the same reading.

    A call that is cut off keeps the finish reason of the output; one that holds whole calls ends for ``tool_calls``.
    """

    def __init__(self, form: OutputForm):
        self._form = form
        self._reasoning = form.reasoning(form.prompt_end) if form.reasoning else None
        self._parser = form.make_parser() if form.make_parser else None
        self._num_calls = 0
        self._is_open = False  # a call has begun and not ended
        self._text_last = False  # what came last is text, not a call
        self._skipped = False  # the call at hand is one too many
        self._broken = False  # some call is not what a call should be

    def take(self, text: str, reason: FinishReason | None) -> tuple[dict[str, Any], str | None]:
        """The delta of the message that ``text`` makes, and the finish reason that clients get."""
        reasoning, answer = self._split(text, reason is not None)
        delta: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if self._parser is None:
            return delta | ({"content": answer} if answer else {}), reason
        pieces = self._parser.push(answer) + (self._parser.finish() if reason is not None else [])
        content = ""
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, Text):
                content += piece.text
                self._text_last = True
            elif isinstance(piece, CallStart):
                self._is_open, self._text_last = True, False
                self._skipped = self._num_calls > 0 and not self._form.parallel
                if not self._skipped:
                    started = {"id": self._parser.new_id(), "type": "function"}
                    function = {"name": piece.name, "arguments": ""}
                    calls[self._num_calls] = {"index": self._num_calls, **started, "function": function}
                    self._num_calls += 1
            elif isinstance(piece, Arguments) and not self._skipped:
                index = self._num_calls - 1
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.json
            elif isinstance(piece, CallEnd):
                self._is_open = False
                self._broken = self._broken or not piece.valid
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta, self._finish_reason(reason)

    def _split(self, text: str, is_last: bool) -> tuple[str, str]:
        if self._reasoning is None:
            return "", text
        reasoning, answer = self._reasoning.push(text)
        if is_last:
            more_reasoning, more_answer = self._reasoning.finish()
            return reasoning + more_reasoning, answer + more_answer
        return reasoning, answer

    def _finish_reason(self, reason: FinishReason | None) -> str | None:
        assert self._parser is not None
        if not self._num_calls or self._broken or reason not in ("stop", "length"):
            return reason
        if self._is_open or self._parser.is_cut:
            return reason
        return "length" if reason == "length" and self._text_last else "tool_calls"

    def message(self, text: str, reason: FinishReason | None) -> tuple[dict[str, Any], str | None]:
        """The whole message of a finished output, and the finish reason that clients get."""
        delta, reason_given = self.take(text, reason)
        calls = [
            {name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())
        ]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": delta.get("content", None if calls else ""),
            "refusal": None,
        }
        if self._reasoning is not None:
            message["reasoning_content"] = delta.get("reasoning_content")
        if calls:
            message["tool_calls"] = calls
        return message, reason_given
