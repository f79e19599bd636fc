"""``[get_weather(city="Paris"), now()]`` as the whole output: Llama 3.2 and 4."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection

from jaxserve.text.tool_calls.base import Arguments, CallEnd, CallStart, Piece, Text, ToolCallParser


class PythonicParser(ToolCallParser):
    """A list of calls with keyword arguments that are literals. It is read as a whole when its bracket closes."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._held = ""
        self._is_text = False
        self._done = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for position, char in enumerate(text):
            if self._is_text:
                return [*pieces, Text(text[position:])]
            self._held += char
            body = self._held.strip()
            if not body:
                continue
            if self._done or not self._may_begin(body):  # nothing but text follows a list of calls
                pieces.append(Text(self._held))
                self._held, self._is_text = "", True
            elif char == "]" and (calls := self._calls(body)):
                pieces += calls
                self._held, self._done = "", True
        return pieces

    def _may_begin(self, body: str) -> bool:
        if body[0] != "[":
            return False
        name, bracket, _ = body[1:].lstrip().partition("(")
        return name.strip() in self.names if bracket else any(each.startswith(name) for each in self.names)

    def _calls(self, text: str) -> list[Piece]:
        """Of a whole list; none if it is not one (yet)."""
        try:
            calls = ast.parse(text, mode="eval").body
            if not isinstance(calls, ast.List) or not calls.elts:
                return []
            pieces: list[Piece] = []
            for call in calls.elts:
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                    return []
                if call.func.id not in self.names:
                    return []
                given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
                arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
                pieces += [CallStart(call.func.id), Arguments(arguments), CallEnd(None not in given)]
            return pieces
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return []

    def finish(self) -> list[Piece]:
        text, self._held = self._held, ""
        return [Text(text)] if text and not (self._done and not text.strip()) else []
