"""JSON schemas of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# A small model may go on with white space for ever where a schema allows it.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of the arguments of a function ``{"name": ..., "parameters": ...}``."""
    return {**_parameters(function), "x-guidance": COMPACT}


def calls_schema(functions: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """JSON schema of a list of calls of any of these functions; of one call, if they may not be ``parallel``."""
    schema = call_schema(functions, "parameters")
    schema |= {"type": "array", "minItems": 1, "items": {"anyOf": schema.pop("anyOf")}}
    return schema if parallel else {**schema, "maxItems": 1}


def call_schema(functions: Sequence[Mapping[str, Any]], arguments_key: str) -> dict[str, Any]:
    """JSON schema of a call of any of these functions: ``{"name": ..., arguments_key: {...}}``."""
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"
        # References within the function's own schema start at its root, which lies deeper now.
        definitions[str(number)] = _moved(_parameters(function), place)
        properties = {"name": {"const": function["name"]}, arguments_key: {"$ref": place}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions, "x-guidance": COMPACT}


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
