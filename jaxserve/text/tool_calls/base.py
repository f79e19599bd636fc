"""What a parser of tool calls makes of an output."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from jaxserve.text.tool_calls.strict import CallGrammar


@dataclass(frozen=True)
class Text:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of this function begins; it is certain now that it is one."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """The next part of its arguments, which are JSON."""

    json: str


@dataclass(frozen=True)
class CallEnd:
    """The call is whole. ``valid``: its arguments are a JSON object."""

    valid: bool = True


Piece = Text | CallStart | Arguments | CallEnd


class ToolCallParser(ABC):
    """Reads one output, however it is cut into pieces; makes the same of it for every way to cut it.

    Text that may still become a call is held back. If it does not, it comes out as text: nothing is lost. A call of a
    function that was not offered is text.

    Attributes:
        marks: control tokens of the notation. They are kept in the text that the parser is given, although control
            tokens are left out otherwise.
    """

    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Collection[str]):
        """``names``: of the functions that were offered."""
        self.names = frozenset(names)

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """What became certain with the next part of the output."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """What was held back when the output ended. A call that was cut has no ``CallEnd``."""

    @property
    def is_cut(self) -> bool:
        """Whether the output ended within a call that is given out neither as a call nor as text."""
        return False

    @classmethod
    def strict_rules(cls, grammar: CallGrammar) -> str | None:
        """Rules, ``start`` among them, of outputs in which every call follows its schema; text is free.

        None: this notation has no such grammar, and ``strict`` functions are like others.
        """
        return None

    @staticmethod
    def new_id() -> str:
        """An id for a call."""
        return f"call_{secrets.token_hex(12)}"
