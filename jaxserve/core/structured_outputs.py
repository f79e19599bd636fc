"""The form an output must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxserve.core.errors import InvalidRequest

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StrictCalls:
    """Free text in which calls of functions follow their schemas.

    Attributes:
        notation: name of the tool call parser that reads them.
        functions: JSON list of the functions, ``{"name": ..., "parameters": ..., "strict": ...}``.
    """

    notation: str
    functions: str


@dataclass(frozen=True)
class StructuredOutputs:
    """One of several ways to say what an output must look like; they go by vLLM's names.

    Attributes:
        json: a JSON schema, as an object or as its text.
        regex: a regular expression that the whole output matches.
        choice: the strings of which the output is one.
        grammar: a context-free grammar, in the syntax of Lark or of GBNF (``root ::= ...``).
        json_object: any JSON object.
        calls: text with calls in it; requests say it by their tools.
        param: what errors call it: the field the client sent.

    Raises:
        InvalidRequest: none of them or several, or a value of the wrong type. Whether the schema or the grammar is
            sound is found when it is compiled.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    calls: StrictCalls | None = None
    param: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        given = [kind for kind in (*KINDS, "calls") if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise self._reject(f"exactly one of {', '.join(KINDS)}", ", ".join(given) or "none")
        if isinstance(self.json, bool):
            raise self._reject("a JSON schema that is an object", self.json)
        if isinstance(self.json, Mapping):
            # In order: that of its properties is the order of the output's.
            object.__setattr__(self, "json", json.dumps(self.json, ensure_ascii=False))
        elif self.json is not None:
            self._check_schema_text(self.json)
        if self.choice is not None:
            if (
                not isinstance(self.choice, (list, tuple))
                or not self.choice
                or not all(isinstance(each, str) and each for each in self.choice)
            ):
                raise self._reject("a list of non-empty strings for choice", self.choice)
            object.__setattr__(self, "choice", tuple(self.choice))
        for kind in ("regex", "grammar"):
            value = getattr(self, kind)
            if value is not None and (not isinstance(value, str) or not value):
                raise self._reject(f"a non-empty string for {kind}", value)
        if not isinstance(self.json_object, bool):
            raise self._reject("true or false for json_object", self.json_object)

    def _check_schema_text(self, text: object) -> None:
        if not isinstance(text, str):
            raise self._reject("a JSON schema, as an object or as its text", text)
        try:
            schema = json.loads(text)
        except ValueError as error:
            raise self._reject("a JSON schema", f"text that is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise self._reject("a JSON schema that is an object", schema)

    def _reject(self, wanted: str, got: object) -> InvalidRequest:
        message = f"{self.param}: wanted {wanted}, got {got if isinstance(got, str) else repr(got)}"
        return InvalidRequest(message, param=self.param, code="invalid_value")

    @classmethod
    def of(cls, value: object, param: str = "structured_outputs") -> StructuredOutputs:
        """From itself, or from a mapping of its fields."""
        if isinstance(value, cls):
            return value
        names = {each.name for each in fields(cls)} - {"param", "calls"}
        if not isinstance(value, Mapping) or not set(value) <= names:
            raise InvalidRequest(
                f"{param}: wanted an object with one of {', '.join(KINDS)}, got {value!r}", param=param,
                code="invalid_value",
            )  # fmt: skip
        return cls(**value, param=param)
