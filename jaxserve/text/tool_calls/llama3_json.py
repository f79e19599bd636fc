"""``{"name": ..., "parameters": {...}}`` as the whole output: Llama 3."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from jaxserve.text.tool_calls.base import Piece, Text
from jaxserve.text.tool_calls.json_call import JsonCall, JsonCallParser
from jaxserve.text.tool_calls.strict import CallGrammar

TAG = "<|python_tag|>"


class Llama3JsonParser(JsonCallParser):
    """Calls are the whole output: it begins with a brace or with the tag; more calls follow behind a semicolon.

    An output that begins with anything else holds no call.
    """

    marks: ClassVar[tuple[str, ...]] = (TAG,)
    separators = ";,"

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._between = True  # a call may begin here
        self._num_calls = 0

    @classmethod
    def strict_rules(cls, grammar: CallGrammar) -> str:
        rules = [
            f"start: SPACE {grammar.mark(TAG)}? SPACE call (SEPARATOR call)* | SPACE TEXT?",
            f"call: {grammar.call('parameters')}", "SEPARATOR: /; ?/", "SPACE: /[ \\n]*/",
            "TEXT: /[^ \\n{](.|\\n)*/",
        ]  # fmt: skip
        return "\n".join(rules)

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        rest = self._held + text
        self._held = ""
        while rest:
            if self._call is not None:
                rest = self._in_call(self._call, rest, pieces)
            elif not self._between:
                pieces.append(Text(rest))
                break
            else:
                opening = self._find_opening(rest)
                if opening is None:
                    self._held = rest
                    break
                if opening < 0:
                    self._between = False
                    continue
                self._opening, rest = rest[:opening], rest[opening:]
                self._call = JsonCall(self.names)
        return pieces

    def _find_opening(self, text: str) -> int | None:
        """Where a call begins in ``text``; -1: none does; None: not known yet."""
        body = text.lstrip()
        if self._num_calls and body[:1] and body[0] in self.separators:
            body = body[1:].lstrip()
        if body.startswith(TAG):
            body = body[len(TAG) :].lstrip()
        if not body or TAG.startswith(body):
            return None
        return len(text) - len(body) if body[0] == "{" else -1

    def _in_call(self, call: JsonCall, text: str, pieces: list[Piece]) -> str:
        found, rest = call.push(text)
        pieces += found
        if call.broken:
            pieces.append(Text(self._opening + call.raw))
            self._between = False
        if call.ended or call.broken:
            self._call = None
            self._num_calls += 1
        return rest

    def finish(self) -> list[Piece]:
        text = self._held
        if self._call is not None:
            text = self._text_of_cut(self._call)
        elif self._num_calls and not text.strip():
            text = ""
        self._held, self._call = "", None
        return [Text(text)] if text else []
