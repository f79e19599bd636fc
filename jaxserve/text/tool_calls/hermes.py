"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many others."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from jaxserve.text.tags import held_length
from jaxserve.text.tool_calls.base import Piece, Text
from jaxserve.text.tool_calls.json_call import JsonCall, JsonCallParser
from jaxserve.text.tool_calls.strict import CallGrammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Calls between tags, each in its own; text may stand around them. White space around a call is left out."""

    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._closing = False  # a call is behind, its closing tag is not
        self._behind = False  # a call is behind, and no text has followed yet

    @classmethod
    def strict_rules(cls, grammar: CallGrammar) -> str:
        rules = [
            "start: call* free", f"call: opening SPACE {grammar.call('arguments')} SPACE {grammar.mark(CLOSE)}",
            "SPACE: /[ \\n]?/", grammar.free_text(OPEN),
        ]  # fmt: skip
        return "\n".join(rules)

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        rest = self._held + text
        self._held = ""
        while rest:
            if self._call is not None:
                rest = self._in_call(self._call, rest, pieces)
                continue
            if self._closing:
                body = rest.lstrip()
                if body.startswith(CLOSE):
                    rest, self._closing, self._behind = body[len(CLOSE) :], False, True
                    continue
                if CLOSE.startswith(body):
                    self._held = rest
                    break
                self._closing, self._behind = False, True
            if self._behind:
                rest = rest.lstrip()
                self._behind = not rest
                continue
            start = rest.find(OPEN)
            if start >= 0:
                before = rest[:start].rstrip()
                self._say(before, pieces)
                self._opening = rest[len(before) : start] + OPEN
                self._call, rest = JsonCall(self.names), rest[start + len(OPEN) :]
                continue
            held = held_length(rest, (OPEN,))
            self._say(rest[: len(rest) - held], pieces)
            self._held = rest[len(rest) - held :]
            break
        return pieces

    def _in_call(self, call: JsonCall, text: str, pieces: list[Piece]) -> str:
        found, rest = call.push(text)
        pieces += found
        if call.broken:
            self._call = None
            self._say(self._opening + call.raw, pieces)
        elif call.ended:
            self._call, self._closing = None, True
        return rest

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Text(text))

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is not None:
            self._say(self._text_of_cut(self._call), pieces)
        elif not self._closing:
            self._say(self._held, pieces)
        self._held, self._call = "", None
        return pieces
