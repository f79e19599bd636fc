"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request, and the calls in its messages."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.structured_outputs import StrictCalls, StructuredOutputs
from jaxserve.text.tool_calls.base import ToolCallParser
from jaxserve.text.tool_calls.call_schema import arguments_schema, calls_schema
from jaxserve.text.tool_calls.enforced import CallListParser, NamedCallParser
from jaxserve.text.tool_calls.registry import tool_call_parser
from jaxserve.text.tool_calls.strict import CallGrammar

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

Choice = Literal["none", "auto", "required", "named"]


def check_tools(value: Any) -> list[dict[str, Any]]:
    """The functions that may be called; none for null.

    Raises:
        ValueError: says what a tool must look like.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError("must be a list of tools")
    names = [_check_tool(f"[{position}]", tool) for position, tool in enumerate(value)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"must have different names, the function {twice!r} is there twice")
    return value


def _check_tool(where: str, tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function" or set(tool) != {"type", "function"}:
        raise ValueError(f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}')
    unknown = set(function) - {"name", "description", "parameters", "strict"}
    if unknown:
        raise ValueError(f"{where}.function has the unknown field {sorted(unknown)[0]!r}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}.function.name must be 1 to 128 of letters, digits, '_', '.', '-', not {name!r}")
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"{where}.function.description must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError(f"{where}.function.parameters must be a JSON schema")
    if not isinstance(function.get("strict"), bool | None):
        raise ValueError(f"{where}.function.strict must be true or false")
    return name


def check_tool_calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Calls in a message of the assistant, with arguments as objects: so templates want them.

    Raises:
        ValueError: says what a call must look like.
    """
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list of calls")
    return [_check_call(f"{where}[{position}]", call) for position, call in enumerate(value)]


def _check_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ValueError(f'{where} must be {{"id": ..., "type": "function", "function": {{"name", "arguments"}}}}')
    name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.function.name must be a non-empty string")
    if not isinstance(call_id, str | None):
        raise ValueError(f"{where}.id must be a string")
    if not isinstance(arguments, str | None):
        raise ValueError(f"{where}.function.arguments must be a string that holds a JSON object")
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:  # a call that was cut off comes back as it was
        parsed = arguments
    checked: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": parsed}}
    return checked if call_id is None else {"id": call_id, **checked}


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools.

    Attributes:
        tools: those that may be called; empty with the choice ``none``, so the model does not see them.
        choice: whether the model may, must, or must not call them.
        name: of the one function to be called, with the choice ``named``.
        parallel: whether it may make several calls at once.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: Choice = "none"
    name: str | None = None
    parallel: bool = True

    @classmethod
    def of(cls, tools: list[dict[str, Any]], choice: Any, parallel: bool | None) -> ToolUse:
        """From the fields of a request, of which ``tools`` has been checked.

        Raises:
            InvalidRequest: a choice that is none, or that the tools do not offer.
        """
        may_be_parallel = parallel is not False
        if choice is None:
            choice = "auto" if tools else "none"
        if choice == "none" or (choice == "auto" and not tools):
            return cls()
        if choice in ("auto", "required"):
            if not tools:
                raise _wrong_choice("tool_choice 'required' needs tools; send some")
            return cls(tuple(tools), choice, None, may_be_parallel)
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            wanted = '"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
            raise _wrong_choice(f"tool_choice must be {wanted}, got {choice!r}")
        if name not in _names(tools):
            raise _wrong_choice(f"tool_choice names {name!r}, which is not among the tools; send it with them")
        return cls(tuple(tools), "named", name, may_be_parallel)

    def form(self) -> StructuredOutputs | None:
        """The form that makes the output a call; None where it need not be one."""
        if self.choice == "required":
            schema = calls_schema([tool["function"] for tool in self.tools], self.parallel)
        elif self.choice == "named":
            by_name = {tool["function"]["name"]: tool["function"] for tool in self.tools}
            schema = arguments_schema(by_name[self.name])
        else:
            return None
        return StructuredOutputs(json=schema, param="tools")

    def strict_form(self, notation: str | None) -> StructuredOutputs | None:
        """The form of an output that may hold calls, those of ``strict`` functions by their schema; None: any output.

        Args:
            notation: name of the parser of the model's own notation.
        """
        functions = [tool["function"] for tool in self.tools]
        if self.choice != "auto" or notation is None or not any(function.get("strict") for function in functions):
            return None
        if tool_call_parser(notation).strict_rules(CallGrammar(functions, {}, ())) is None:
            _say_that_nothing_enforces(notation)
            return None
        return StructuredOutputs(calls=StrictCalls(notation, json.dumps(functions)), param="tools")

    def parser(self, notation: str | None) -> Callable[[], ToolCallParser] | None:
        """Makes parsers of outputs; None where nothing is to be parsed.

        Args:
            notation: name of the parser of the model's own notation.

        Raises:
            InvalidRequest: there is none, and the model may call or not.
        """
        if self.choice == "none":
            return None
        names = _names(self.tools)
        if self.choice == "required":
            return lambda: CallListParser(names)
        if self.choice == "named":
            return lambda: NamedCallParser([str(self.name)])
        if notation is None:
            raise InvalidRequest(
                "with tool_choice 'auto' the server must know how the model writes calls; start it with "
                "--tool-call-parser (hermes for Qwen and many others, llama3_json, mistral, pythonic), or send "
                "tool_choice 'required', the name of a function, or 'none'",
                param="tools", code="no_tool_call_parser",
            )  # fmt: skip
        made = tool_call_parser(notation)
        return lambda: made(names)


@functools.cache
def _say_that_nothing_enforces(notation: str) -> None:
    """Once: some clients call every function strict."""
    log.warning("a request has strict functions, but nothing enforces schemas in calls by %s", notation)


def _names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _wrong_choice(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice", code="invalid_value")
