"""Grammars of outputs with calls of strict functions: what they let through, and what they do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from jaxserve.core.structured_outputs import StrictCalls, StructuredOutputs
from jaxserve.text.grammars import Grammars
from jaxserve.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
          "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
STRICT = [{"name": "weather", "parameters": SCHEMA, "strict": True}, {"name": "now", "parameters": {"type": "object"}}]
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>")


def tokenizer_with(marks: str) -> Tokenizer:
    """Bytes, an end token, and the marks: as control tokens, as other tokens of their own, or as text."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {symbol: number for number, symbol in enumerate(sorted(alphabet))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    if marks != "text":
        backend.add_tokens([AddedToken(mark, special=marks == "control", normalized=False) for mark in MARKS])
    return Tokenizer(backend, eos_token_id=backend.token_to_id("<end>"))


@pytest.fixture(params=["text", "own tokens", "control"])
def allowed(request: pytest.FixtureRequest) -> Any:
    """Characters that the grammar of a notation lets through, and whether the output may end there."""
    tokenizer = tokenizer_with(request.param)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,))

    def let_through(notation: str, text: str, functions: list[dict[str, Any]] = STRICT) -> tuple[str, bool]:
        constraint = grammars.start(StructuredOutputs(calls=StrictCalls(notation, json.dumps(functions))))
        passed: list[int] = []
        for token in tokenizer.encode(text, add_special_tokens=False):
            if not constraint.advance(token):
                return tokenizer.decode(passed, skip_special_tokens=False), False
            passed.append(token)
        return text, constraint.advance(tokenizer.eos_token_id)

    return let_through


RIGHT, OTHER = '{"name": "weather", "%s": {"city": "Paris", "days": 3}}', '{"name": "now", "%s": {"x": [1]}}'
HERMES = RIGHT % "arguments", OTHER % "arguments"
LLAMA = RIGHT % "parameters", OTHER % "parameters"


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        ("hermes", "No call, but 2 < 3, {braces} and <tool>."),
        ("hermes", f"<tool_call>\n{HERMES[0]}\n</tool_call>"),
        ("hermes", f"<think>Hm.\nPerhaps.</think>Let me see.\n<tool_call>{HERMES[1]}</tool_call>\n"
                   f"<tool_call>\n{HERMES[0]}\n</tool_call> Done."),
        ("llama3_json", "Say {it}."),
        ("llama3_json", LLAMA[0]),
        ("llama3_json", f"<|python_tag|>{LLAMA[1]}; {LLAMA[0]}"),
        ("mistral", "[1, 2]"),
        ("mistral", f"Well. [TOOL_CALLS] [{HERMES[0]}, {HERMES[1]}]"),
        ("mistral", '[TOOL_CALLS]weather{"city": "x", "days": 1}[TOOL_CALLS]now[ARGS]{}'),
    ],
)  # fmt: skip
def test_text_and_right_calls_pass(allowed: Any, notation: str, text: str) -> None:
    assert allowed(notation, text) == (text, True)


@pytest.mark.parametrize(
    ("notation", "passes", "refused"),
    [
        ("hermes", '<tool_call>{"name": "', 'delete", "arguments": {}}</tool_call>'),
        ("hermes", 'a <tool_call>{"name": "weather", "arguments": {"city": "P", "days": ', '"3"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "P"', "}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "now", "arguments": ', "7}</tool_call>"),
        ("hermes", f'<tool_call>{HERMES[1]}</tool_call><tool_call>\n{{"', 'x": 1}'),
        ("llama3_json", '{"name": "weather", "parameters": {"', 'days": 1, "city": "x"}}'),
        ("llama3_json", '{"', 'city": "x"}'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "x", "days": 1', ".5}}]"),
        ("mistral", "[TOOL_CALLS]w", "hy{}"),
        ("mistral", '[TOOL_CALLS]weather{"city": "x", "days": 1', ', "more": 1}'),
    ],
)
def test_a_wrong_call_stops_where_it_goes_wrong(allowed: Any, notation: str, passes: str, refused: str) -> None:
    assert allowed(notation, passes + refused) == (passes, False)


def test_an_output_may_not_end_within_a_call(allowed: Any) -> None:
    assert allowed("hermes", '<tool_call>{"name": "weather", "arguments": {') == (
        '<tool_call>{"name": "weather", "arguments": {', False,
    )  # fmt: skip
