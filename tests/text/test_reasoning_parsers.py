"""Reasoning and answer, however the text is cut."""

from __future__ import annotations

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.text.reasoning import DeepSeekR1Reasoning, Qwen3Reasoning, ReasoningParser, reasoning_parser


def read(parser: ReasoningParser, parts: list[str]) -> tuple[str, str]:
    seen = [parser.push(part) for part in parts] + [parser.finish()]
    return "".join(reasoning for reasoning, _ in seen), "".join(answer for _, answer in seen)


CASES = [
    (Qwen3Reasoning, "assistant\n", "<think>\nHm </thi. \n</think>\n\nYes. \n", ("Hm </thi.", "Yes. \n")),
    (Qwen3Reasoning, "assistant\n", "\n Yes.", ("", "\n Yes.")),
    (Qwen3Reasoning, "<think>\n", "Hm.</think>Yes.", ("Hm.", "Yes.")),
    (Qwen3Reasoning, "<think>\n\n</think>\n\n", " <think>Yes.", ("", " <think>Yes.")),
    (Qwen3Reasoning, "assistant\n", "<thi", ("", "<thi")),
    (Qwen3Reasoning, "assistant\n", "<think>Hm", ("Hm", "")),
    (DeepSeekR1Reasoning, "assistant", "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
    (DeepSeekR1Reasoning, "assistant", "<think>Hm.</think>Yes.<think>x</think>", ("Hm.", "Yes.<think>x</think>")),
    (DeepSeekR1Reasoning, "assistant", "Hm.\n</thin", ("Hm.\n</thin", "")),
    (DeepSeekR1Reasoning, "</think>\n", "Yes.", ("", "Yes.")),
]


@pytest.mark.parametrize(("parser", "prompt_end", "text", "wanted"), CASES)
def test_reasoning_and_answer_are_told_apart_however_the_text_is_cut(parser, prompt_end, text, wanted) -> None:
    assert read(parser(prompt_end), [text]) == wanted
    assert read(parser(prompt_end), list(text)) == wanted
    for cut in range(len(text)):
        assert read(parser(prompt_end), [text[:cut], text[cut:]]) == wanted


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"deepseek_r1, qwen3.*, got 'x'"):
        reasoning_parser("x")
