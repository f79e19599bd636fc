"""Calls that a grammar enforces; they need no notation of the model's."""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.text.tool_calls.base import Piece, ToolCallParser
from jaxserve.text.tool_calls.json_call import JsonCall


class CallListParser(ToolCallParser):
    """``[{"name": ..., "parameters": {...}}, ...]`` and nothing else: what ``tool_choice: "required"`` makes of an
    output."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._call: JsonCall | None = None

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._call is None:
                text = text.lstrip("[], \t\r\n")
                if not text:
                    break
                self._call = JsonCall(self.names)
            found, text = self._call.push(text)
            pieces += found
            if self._call.ended or self._call.broken:
                self._call = None
        return pieces

    def finish(self) -> list[Piece]:
        return []

    @property
    def is_cut(self) -> bool:
        return self._call is not None


class NamedCallParser(ToolCallParser):
    """The arguments of a call of one function and nothing else: what naming it in ``tool_choice`` makes of outputs."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        (name,) = self.names
        self._call = JsonCall(self.names, name)

    def push(self, text: str) -> list[Piece]:
        return self._call.push(text)[0]

    def finish(self) -> list[Piece]:
        return []
