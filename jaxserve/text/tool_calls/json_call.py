"""One call that is written as a JSON object, while it grows."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from jaxserve.text.tool_calls.base import Arguments, CallEnd, CallStart, Piece, ToolCallParser

ARGUMENT_KEYS = ("arguments", "parameters")


class _At(Enum):
    START = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()
    END = auto()
    BROKEN = auto()


class JsonCall:
    """Reads ``{"name": "f", "arguments": {...}}``; keys in any order, others ignored, ``parameters`` means the same.

    Arguments that are a JSON object are passed on as the model wrote them, as soon as the name is known. A string that
    holds such an object counts as one; no arguments, or null, are ``{}``.

    Attributes:
        raw: the text so far.
        started: whether a ``CallStart`` was given out. If not, and the call is broken or cut, ``raw`` is plain text.
    """

    def __init__(self, names: Collection[str], name: str | None = None):
        """``name``: only the arguments of a call of this function are written."""
        self._names = names
        self._alone = name is not None
        self._at = _At.VALUE if self._alone else _At.START
        self._key = ARGUMENT_KEYS[0] if self._alone else ""
        self._value: list[str] = []
        self._depth, self._in_string, self._escaped = 0, False, False
        self._name = name
        self._arguments: list[str] | None = None  # characters of the object; None: not seen
        self._num_sent = 0  # of them
        self.raw = ""
        self.started = False

    @property
    def ended(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.END

    @property
    def broken(self) -> bool:
        """Whether it is no call: text, if nothing was given out."""
        return self._at is _At.BROKEN

    def push(self, text: str) -> tuple[list[Piece], str]:
        """What became certain, and what follows the object. A call that breaks behind its arguments ends there."""
        position = 0
        while position < len(text) and not (self.ended or self.broken):
            certain = self._name is not None and self._arguments is not None
            self._take(text[position])
            if self.broken and certain:
                self._at = _At.END
                break
            self.raw += text[position]
            position += 1
        return ([] if self.broken else self._certain()), text[position:]

    def _certain(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._name is not None and not self.started and (self._arguments is not None or self.ended):
            self.started = True
            pieces.append(CallStart(self._name))
            if self._arguments is None:
                self._arguments = ["{}"]
        if self.started and self._arguments is not None:
            sent = "".join(self._arguments)[self._num_sent :]
            self._num_sent += len(sent)
            pieces += [Arguments(sent)] if sent else []
        if self.started and self.ended:
            pieces.append(CallEnd(is_object("".join(self._arguments or ()))))
        return pieces

    def _take(self, char: str) -> None:
        at = self._at
        if at is _At.IN_KEY:
            self._in_key(char)
        elif at is _At.IN_VALUE:
            self._in_value(char)
        elif char.isspace():
            return
        elif at is _At.START and char == "{":
            self._at = _At.KEY
        elif at is _At.KEY and char == '"':
            self._at, self._value = _At.IN_KEY, [char]
        elif at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif at is _At.VALUE and char not in ",:}]":
            self._begin_value(char)
        elif at is _At.COMMA and char == ",":
            self._at = _At.KEY
        elif at in (_At.COMMA, _At.KEY) and char == "}":
            self._close()
        else:
            self._at = _At.BROKEN

    def _in_key(self, char: str) -> None:
        if self._closes_string(char):
            self._key = str(_loaded("".join(self._value)))
            self._at = _At.COLON

    def _closes_string(self, char: str) -> bool:
        """Takes the next character of a string; whether the string ends with it."""
        self._value.append(char)
        was_escaped, self._escaped = self._escaped, char == "\\" and not self._escaped
        return char == '"' and not was_escaped

    def _begin_value(self, char: str) -> None:
        self._at = _At.IN_VALUE
        self._value, self._depth, self._in_string, self._escaped = [], 0, False, False
        if self._key in ARGUMENT_KEYS and char == "{" and self._arguments is None:
            self._arguments = self._value
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        if self._in_string:
            if self._closes_string(char):
                self._in_string = False
                if self._depth == 0:
                    self._end_value()
            return
        if self._depth == 0 and self._value and (char in ",}" or char.isspace()):  # behind a number, true, null
            self._end_value()
            if not self.broken:
                self._take(char)
            return
        self._value.append(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    def _end_value(self) -> None:
        self._at = _At.COMMA
        text = "".join(self._value)
        if self._key == "name":
            name = _loaded(text)
            if isinstance(name, str) and name in self._names:
                self._name = name
            else:
                self._at = _At.BROKEN
        elif self._key in ARGUMENT_KEYS and self._arguments is None:
            inner = _loaded(text)
            if isinstance(inner, str) and is_object(inner):
                self._arguments = [inner]
            elif text == "null":
                self._arguments = ["{}"]
            else:
                self._at = _At.BROKEN
        if self._alone and not self.broken:
            self._at = _At.END

    def _close(self) -> None:
        self._at = _At.END if self._name is not None else _At.BROKEN


class JsonCallParser(ToolCallParser):
    """What parsers of notations with JSON calls remember."""

    def __init__(self, names: Collection[str]):
        super().__init__(names)
        self._held = ""  # not certain yet, outside of calls
        self._opening = ""  # what stands ahead of the call at hand; text again, if it is none
        self._call: JsonCall | None = None

    def _text_of_cut(self, call: JsonCall) -> str:
        """What the output's end makes of the call at hand: text, unless it was given out as a call."""
        return "" if call.started else self._opening + call.raw


def is_object(text: str) -> bool:
    """Whether it is a JSON object."""
    return isinstance(_loaded(text), dict)


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
