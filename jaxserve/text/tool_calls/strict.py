"""Grammars of outputs that may call functions or not, and whose calls follow their schemas: ``strict`` functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.text.tool_calls.call_schema import arguments_schema, call_schema

ANYTHING = "ANYTHING: /(.|\\n)*/"


class CallGrammar:
    """Pieces of a Lark grammar, as llguidance reads it, for one notation and one request.

    Args:
        functions: ``{"name": ..., "parameters": ..., "strict": ...}``. Arguments of those that are not strict may be
            any JSON object.
        added_ids: text -> id of the tokens that the tokenizer has besides those of its merges: a mark of the notation
            may be one of them, or be written in several tokens.
        end_ids: tokens that end an output.
    """

    def __init__(self, functions: Sequence[Mapping[str, Any]], added_ids: Mapping[str, int], end_ids: Iterable[int]):
        self.functions = [
            function if function.get("strict") else {"name": function["name"], "parameters": {"type": "object"}}
            for function in functions
        ]
        self._added_ids = added_ids
        self._end_ids = frozenset(end_ids)

    def mark(self, text: str) -> str:
        """Expression of a mark."""
        found = self._added_ids.get(text)
        return literal(text) if found is None else f"<[{found}]>"

    def free_text(self, *marks: str) -> str:
        """Rules ``free``: any text in which no such mark stands, and ``opening``: the same up to and with one."""
        known = [self._added_ids[mark] for mark in marks if mark in self._added_ids]
        others = sorted({*self._added_ids.values()} - {*known} - self._end_ids)
        before = "(ANYTHING other)* " if others else ""
        rules = [ANYTHING, f"free: {before}ANYTHING"]
        if others:
            rules.append(f"other: <[{','.join(map(str, others))}]>")
        # Lazy: the mark ends the text at once, so it cannot be read as a part of it.
        rules += [f"written_{i}[lazy]: ANYTHING {literal(mark)}" for i, mark in enumerate(marks)]
        openings = [f"written_{i}" for i in range(len(marks))] + [f"ANYTHING <[{each}]>" for each in known]
        return "\n".join([*rules, f"opening: {before}({' | '.join(openings)})"])

    def call(self, arguments_key: str) -> str:
        """A whole call as a JSON object: ``{"name": ..., arguments_key: {...}}``."""
        return f"%json {json.dumps(call_schema(self.functions, arguments_key))}"

    def arguments(self, function: Mapping[str, Any]) -> str:
        """The arguments alone."""
        return f"%json {json.dumps(arguments_schema(function))}"


def literal(text: str) -> str:
    """Expression of this text."""
    return json.dumps(text, ensure_ascii=False)
