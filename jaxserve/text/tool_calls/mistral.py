"""``[TOOL_CALLS]`` and what follows it: Mistral."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection
from typing import ClassVar

from jaxserve.text.tags import held_length
from jaxserve.text.tool_calls.base import Piece, Text
from jaxserve.text.tool_calls.json_call import JsonCall, JsonCallParser
from jaxserve.text.tool_calls.strict import CallGrammar, literal

TAG, BEHIND_NAME = "[TOOL_CALLS]", "[ARGS]"
_LETTERS = string.ascii_letters + string.digits


class MistralParser(JsonCallParser):
    """Both notations: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, and one ``[TOOL_CALLS]name{...}`` or
    ``[TOOL_CALLS]name[ARGS]{...}`` for each call. Text may stand in front.
    """

    marks: ClassVar[tuple[str, ...]] = (TAG, BEHIND_NAME)

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._in_list = False
        self._num_calls = 0  # of the list at hand
        self._rest = ""  # what follows the opening

    @classmethod
    def strict_rules(cls, grammar: CallGrammar) -> str:
        named = [
            f"{literal(function['name'])} ({grammar.mark(BEHIND_NAME)})? {grammar.arguments(function)}"
            for function in grammar.functions
        ]
        rules = [
            "start: calls* free", f"calls: opening SPACE (list | {' | '.join(named)})",
            'list: "[" call (", " call)* "]"', f"call: {grammar.call('arguments')}", "SPACE: / ?/",
            grammar.free_text(TAG),
        ]  # fmt: skip
        return "\n".join(rules)

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        rest = self._held + text
        self._held = ""
        while rest:
            if self._call is not None:
                rest = self._in_call(self._call, rest, pieces)
            elif self._in_list:
                body = rest.lstrip(" \t\r\n,")
                if not body:
                    self._held = rest
                    break
                if body[0] == "{":
                    self._opening += rest[: len(rest) - len(body)]
                    self._call, rest = JsonCall(self.names), body
                else:
                    self._in_list = False
                    if self._num_calls:
                        rest = body[1:].lstrip() if body[0] == "]" else rest
                    else:
                        pieces.append(Text(self._opening + rest[: len(rest) - len(body) + 1]))
                        rest = body[1:]
            elif (start := rest.find(TAG)) >= 0:
                before = rest[:start].rstrip()
                pieces += [Text(before)] if before else []
                entered = self._enter(rest[len(before) :], rest[start + len(TAG) :])
                if entered is None:
                    self._held = rest[len(before) :]
                    break
                if not entered:
                    pieces.append(Text(rest[len(before) : start] + TAG))
                rest = self._rest if entered else rest[start + len(TAG) :]
            else:
                held = held_length(rest, (TAG,))
                pieces += [Text(rest[: len(rest) - held])] if held < len(rest) else []
                self._held = rest[len(rest) - held :]
                break
        return pieces

    def _enter(self, opening: str, behind: str) -> bool | None:
        """Begins a list, or a call by its name; None: not known yet; False: the tag is text."""
        body = behind.lstrip()
        if not body:
            return None
        if body[0] == "[":
            self._in_list, self._num_calls = True, 0
            self._opening, self._rest = opening[: len(opening) - len(body) + 1], body[1:]
            return True
        name, brace, _ = body.partition("{")
        if not brace:
            possible = any(f"{each}{BEHIND_NAME}".startswith(name.strip()) for each in self.names)
            return None if possible else False
        if name.removesuffix(BEHIND_NAME).strip() not in self.names:
            return False
        self._call = JsonCall(self.names, name.removesuffix(BEHIND_NAME).strip())
        self._opening, self._rest = opening[: len(opening) - len(body) + len(name)], body[len(name) :]
        return True

    def _in_call(self, call: JsonCall, text: str, pieces: list[Piece]) -> str:
        found, rest = call.push(text)
        pieces += found
        if call.broken:
            pieces.append(Text(self._opening + call.raw))
            self._call, self._in_list = None, False
        elif call.ended:
            self._call, self._opening = None, ""
            self._num_calls += 1
        return rest

    def finish(self) -> list[Piece]:
        text = self._held
        if self._call is not None:
            text = self._text_of_cut(self._call)
        elif self._in_list:
            text = "" if self._num_calls else self._opening + text
        self._held, self._call, self._in_list = "", None, False
        return [Text(text)] if text else []

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: its templates accept nothing else."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
