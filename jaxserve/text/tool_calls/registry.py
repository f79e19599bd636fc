"""Parsers of tool calls by name."""

from __future__ import annotations

from jaxserve.core.class_registry import ClassRegistry
from jaxserve.text.tool_calls.base import ToolCallParser
from jaxserve.text.tool_calls.hermes import HermesParser
from jaxserve.text.tool_calls.llama3_json import Llama3JsonParser
from jaxserve.text.tool_calls.mistral import MistralParser
from jaxserve.text.tool_calls.pythonic import PythonicParser

_PARSERS: ClassRegistry[ToolCallParser] = ClassRegistry(
    "tool call parser",
    "--tool-call-parser",
    "jaxserve.tool_call_parsers",
    ToolCallParser,  # type: ignore[type-abstract]
    {
        "hermes": HermesParser,
        "qwen": HermesParser,
        "llama3_json": Llama3JsonParser,
        "mistral": MistralParser,
        "pythonic": PythonicParser,
    },
)


def register_tool_call_parser(name: str, parser: type[ToolCallParser]) -> None:
    """Makes a parser known to ``--tool-call-parser``. Raises ConfigError if the name is taken by another one."""
    _PARSERS.register(name, parser)


def tool_call_parser(name: str) -> type[ToolCallParser]:
    """The parser of that name: built in, registered, or offered by an installed package. Raises ConfigError."""
    return _PARSERS.find(name)
