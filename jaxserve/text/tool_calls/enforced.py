"""Calls that a grammar enforces; they need no notation of the model's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

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


# A small model may go on with white space for ever where a schema allows it.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of the arguments of a function ``{"name": ..., "parameters": ...}``."""
    return {**_parameters(function), "x-guidance": COMPACT}


def calls_schema(functions: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """JSON schema of a list of calls of any of these functions; of one call, if they may not be ``parallel``."""
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"
        # References within the function's own schema start at its root, which lies deeper now.
        definitions[str(number)] = _moved(_parameters(function), place)
        properties = {"name": {"const": function["name"]}, "parameters": {"$ref": place}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions, "x-guidance": COMPACT}
    return schema if parallel else {**schema, "maxItems": 1}


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else
            _moved(value, place)
            for key, value in schema.items()
        }  # fmt: skip
    return [_moved(each, place) for each in schema] if isinstance(schema, list) else schema
