"""Parsers of tool calls by name."""

from __future__ import annotations

from jaxserve.core.entry_points import offered_class
from jaxserve.core.errors import ConfigError
from jaxserve.text.tool_calls.base import ToolCallParser
from jaxserve.text.tool_calls.hermes import HermesParser
from jaxserve.text.tool_calls.llama3_json import Llama3JsonParser
from jaxserve.text.tool_calls.mistral import MistralParser
from jaxserve.text.tool_calls.pythonic import PythonicParser

ENTRY_POINTS = "jaxserve.tool_call_parsers"
_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}


def register_tool_call_parser(name: str, parser: type[ToolCallParser]) -> None:
    """Makes a parser known to ``--tool-call-parser``.

    Raises:
        ConfigError: the name is taken by another one.
    """
    if _PARSERS.get(name, parser) is not parser:
        raise ConfigError(f"the tool call parser {name!r} is registered already; choose another name")
    _PARSERS[name] = parser


def tool_call_parser(name: str) -> type[ToolCallParser]:
    """The parser of that name: built in, registered, or offered by an installed package.

    Raises:
        ConfigError: there is none; names those there are.
    """
    if name not in _PARSERS and (offered := offered_class(ENTRY_POINTS, name, ToolCallParser)) is not None:
        register_tool_call_parser(name, offered)
    if name not in _PARSERS:
        known = ", ".join(sorted(_PARSERS))
        raise ConfigError(f"--tool-call-parser must be one of {known}, or a registered one, got {name!r}")
    return _PARSERS[name]
