"""Reasoning in the text of an output: what stands between ``<think>`` and ``</think>``."""

from __future__ import annotations

from typing import ClassVar

from jaxserve.core.class_registry import ClassRegistry
from jaxserve.text.tags import held_length


class ReasoningParser:
    """Splits one output into reasoning and answer, however it is cut into pieces.

    White space around the tags belongs to neither. An output that ends within its reasoning has no answer. Only one
    stretch of reasoning is looked for, at the start of the output.

    Attributes:
        open_tag, close_tag: what it stands between.
        always_open: whether an output begins with reasoning when neither it nor the prompt says so.
        marks: control tokens that must be kept in the text.
    """

    open_tag: ClassVar[str] = "<think>"
    close_tag: ClassVar[str] = "</think>"
    always_open: ClassVar[bool] = False
    marks: ClassVar[tuple[str, ...]] = ("<think>", "</think>")

    def __init__(self, prompt_end: str):
        """``prompt_end``: the last characters of the prompt, control tokens included. A template may have opened the
        reasoning already, or closed it because it was not wanted.
        """
        end = prompt_end.rstrip()
        self._reasons = end.endswith(self.open_tag)
        self._undecided = not self._reasons and not end.endswith(self.close_tag)  # the output itself may open it
        # White space at the start is left out, but not that of an answer without reasoning.
        self._begun = not self._reasons
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that became certain."""
        text = self._held + text
        self._held = ""
        if self._undecided:
            body = text.lstrip()
            if not body or (self.open_tag.startswith(body) and body != self.open_tag):
                self._held = text
                return "", ""
            self._undecided = False
            self._reasons = body.startswith(self.open_tag) or self.always_open
            text = body.removeprefix(self.open_tag) if self._reasons else text
            self._begun = not self._reasons
        if not self._reasons:
            return "", self._trimmed(text)
        reasoning, found, answer = text.partition(self.close_tag)
        if found:
            reasoning = self._trimmed(reasoning.rstrip())
            self._reasons, self._begun = False, False
            return reasoning, self._trimmed(answer)
        held = held_length(text, (self.close_tag,))
        self._held = text[len(text) - held :]
        return self._trimmed(text[: len(text) - held]), ""

    def finish(self) -> tuple[str, str]:
        """(reasoning, answer) that was held back when the output ended."""
        text, self._held = self._held, ""
        if self._undecided:
            return ("", text) if not self.always_open else (text.strip(), "")
        return (self._trimmed(text), "") if self._reasons else ("", text)

    def _trimmed(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text


class Qwen3Reasoning(ReasoningParser):
    """Qwen 3: the output opens its reasoning, or the template does, or there is none (``enable_thinking: false``)."""


class DeepSeekR1Reasoning(ReasoningParser):
    """DeepSeek R1 and its distillates: an output begins with reasoning whether or not a tag says so."""

    always_open = True


_PARSERS = ClassRegistry(
    "reasoning parser", "--reasoning-parser", "jaxserve.reasoning_parsers", ReasoningParser,
    {"qwen3": Qwen3Reasoning, "deepseek_r1": DeepSeekR1Reasoning},
)  # fmt: skip


def register_reasoning_parser(name: str, parser: type[ReasoningParser]) -> None:
    """Makes a parser known to ``--reasoning-parser``. Raises ConfigError if the name is taken by another one."""
    _PARSERS.register(name, parser)


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser of that name: built in, registered, or offered by an installed package. Raises ConfigError."""
    return _PARSERS.find(name)
