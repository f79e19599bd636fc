"""Tool calls in text: every notation, however the text is cut, whatever is wrong with it."""

from __future__ import annotations

import json
import random
from importlib.metadata import EntryPoint

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.text.tool_calls.base import Arguments, CallEnd, CallStart, Piece, Text, ToolCallParser
from jaxserve.text.tool_calls.call_schema import calls_schema
from jaxserve.text.tool_calls.enforced import CallListParser, NamedCallParser
from jaxserve.text.tool_calls.hermes import HermesParser
from jaxserve.text.tool_calls.llama3_json import Llama3JsonParser
from jaxserve.text.tool_calls.mistral import MistralParser
from jaxserve.text.tool_calls.pythonic import PythonicParser
from jaxserve.text.tool_calls.registry import register_tool_call_parser, tool_call_parser

Call = tuple[str, str, bool]  # name, arguments, whether it is whole


def read(parser: ToolCallParser, parts: list[str]) -> list[str | Call]:
    """What clients see of an output that arrives in these parts: texts, and calls."""
    pieces: list[Piece] = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    seen: list[str | Call] = []
    for piece in pieces:
        last = seen[-1] if seen else None
        if isinstance(piece, Text):
            seen = [*seen[:-1], last + piece.text] if isinstance(last, str) else [*seen, piece.text]
        elif isinstance(piece, CallStart):
            seen.append((piece.name, "", False))
        else:
            assert isinstance(last, tuple)
            name, arguments, _ = last
            ended = isinstance(piece, CallEnd) and piece.valid
            seen[-1] = (name, arguments + (piece.json if isinstance(piece, Arguments) else ""), ended)
    return seen


A, B = ("f", '{"a": 1}', True), ("get", '{"c": "}"}', True)
CASES = [
    (HermesParser, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [A]),
    (HermesParser, 'Well.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
     '<tool_call>\n{"arguments": {"c": "}"}, "name": "get"}\n</tool_call>\n', ["Well.", A, B]),
    (HermesParser, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}", True)]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}", True)]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [A]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', [A]),  # a brace is missing
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1, }}</tool_call>', [("f", '{"a": 1, }', False)]),
    (HermesParser, "a <tool> b <tool_cal", ["a <tool> b <tool_cal"]),
    (HermesParser, 'is <tool_call>no{"x": 1}</tool_call> end ', ['is <tool_call>no{"x": 1}</tool_call> end ']),
    (HermesParser, '<tool_call>{"name": "other"}</tool_call>', ['<tool_call>{"name": "other"}</tool_call>']),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": ', [("f", '{"a": ', False)]),
    (HermesParser, 'x <tool_call>{"name": "f", "argu', ['x <tool_call>{"name": "f", "argu']),
    (Llama3JsonParser, '{"name": "f", "parameters": {"a": 1}}', [A]),
    (Llama3JsonParser, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "get", "parameters": {"c": "}"}}',
     [A, B]),
    (Llama3JsonParser, '{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
    (Llama3JsonParser, 'See {"name": "f", "parameters": {}}', ['See {"name": "f", "parameters": {}}']),
    (MistralParser, 'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get", "arguments": {"c": "}"}}]',
     ["Hm.", A, B]),
    (MistralParser, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get[ARGS]{"c": "}"}', [A, B]),
    (MistralParser, '[TOOL_CALLS]other{"a": 1}', ['[TOOL_CALLS]other{"a": 1}']),
    (MistralParser, '[TOOL_CALLS][{"x": 1}]', ['[TOOL_CALLS][{"x": 1}]']),
    (MistralParser, "x [TOOL_CALLS", ["x [TOOL_CALLS"]),
    (PythonicParser, '[f(a=1), get(c="}")]', [A, B]),
    (PythonicParser, "[1, 2]", ["[1, 2]"]),
    (PythonicParser, "[f(a=len)]", ["[f(a=len)]"]),
    (CallListParser, '[{"name": "f", "parameters": {"a": 1}}, {"name": "get", "parameters": {"c": "}"}}]', [A, B]),
    (CallListParser, '[{"name": "f", "parameters": {"a": 1}', [("f", '{"a": 1}', False)]),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "wanted"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_an_output_reads_the_same_however_it_is_cut(parser, text: str, wanted: list) -> None:
    random_cuts = random.Random(text)
    assert read(parser(["f", "get"]), [text]) == wanted
    assert read(parser(["f", "get"]), list(text)) == wanted
    for _ in range(50):
        cuts = sorted(random_cuts.choices(range(len(text) + 1), k=4))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(parser(["f", "get"]), parts) == wanted


@pytest.mark.parametrize(("parser", "text"), [case[:2] for case in CASES if case[0] is not CallListParser], ids=str)
def test_what_is_no_call_is_lost_nowhere(parser, text: str) -> None:
    for end in range(len(text)):
        seen = read(parser(["f", "get"]), list(text[:end]))
        if all(isinstance(each, str) for each in seen):
            assert "".join(str(each) for each in seen) == text[:end]


def test_arguments_arrive_as_the_model_writes_them() -> None:
    parser = HermesParser(["f"])
    assert parser.push('<tool_call>{"name": "f", "arguments": {"te') == [CallStart("f"), Arguments('{"te')]
    assert parser.push('xt": "lo') == [Arguments('xt": "lo')]
    assert parser.push('ng"}') == [Arguments('ng"}')]
    assert parser.push("}") == [CallEnd()]


def test_a_named_call_is_its_arguments_alone() -> None:
    assert read(NamedCallParser(["f"]), list('{"a": 1}')) == [A]
    assert read(NamedCallParser(["f"]), ['{"a": ']) == [("f", '{"a": ', False)]


def test_references_of_each_function_stay_within_its_own_schema() -> None:
    llguidance = pytest.importorskip("llguidance")
    one = {"properties": {"a": {"$ref": "#/$defs/X"}}, "required": ["a"], "$defs": {"X": {"enum": ["p"]}}}
    two = {"properties": {"a": {"$ref": "#/$defs/X"}}, "required": ["a"], "$defs": {"X": {"enum": ["q"]}}}
    schema = calls_schema([{"name": "f", "parameters": one}, {"name": "g", "parameters": two}], parallel=False)
    tokenizer = llguidance.LLTokenizer("byte")

    def follows(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        tokens = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert follows('[{"name": "f", "parameters": {"a": "p"}}]') and follows('[{"name": "g", "parameters": {"a": "q"}}]')
    assert not follows('[{"name": "f", "parameters": {"a": "q"}}]')
    assert not follows("[]")
    both = ", ".join('{"name": "f", "parameters": {"a": "p"}}' for _ in range(2))
    assert not follows(f"[{both}]")


def test_parsers_are_known_by_name_and_names_are_not_taken_twice() -> None:
    class Own(HermesParser):
        pass

    register_tool_call_parser("own-for-a-test", Own)
    register_tool_call_parser("own-for-a-test", Own)
    assert tool_call_parser("own-for-a-test") is Own
    with pytest.raises(ConfigError, match="registered already"):
        register_tool_call_parser("hermes", Own)
    with pytest.raises(ConfigError, match=r"hermes.*, got 'xml'"):
        tool_call_parser("xml")


class Offered(HermesParser):
    """What another package would bring."""


def test_parsers_of_installed_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve.core import class_registry

    places = {"offered-for-a-test": f"{__name__}:Offered", "broken-for-a-test": "no_such_module:X",
              "wrong-for-a-test": "json:loads"}  # fmt: skip

    def installed(group: str, name: str) -> list[EntryPoint]:
        assert group == "jaxserve.tool_call_parsers"
        return [EntryPoint(name, places[name], group)] if name in places else []

    monkeypatch.setattr(class_registry, "entry_points", installed)
    assert tool_call_parser("offered-for-a-test").__name__ == "Offered"
    with pytest.raises(ConfigError, match="cannot be loaded"):
        tool_call_parser("broken-for-a-test")
    with pytest.raises(ConfigError, match="must be a ToolCallParser"):
        tool_call_parser("wrong-for-a-test")
