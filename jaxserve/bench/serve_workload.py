"""What a serving bench sends: prompts with the number of tokens wanted, from a file or made from a seed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.core.errors import ConfigError

DATASETS = ("sharegpt", "random", "repeat", "jsonl")
CHARACTERS_PER_TOKEN = 4  # of English text, where no tokenizer is given
# What vLLM's and SGLang's benches keep of ShareGPT: neither very short nor very long turns.
LEAST_TOKENS, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048
# The built-in conversations: log-normal lengths whose means after that filter are near those of the real file, about
# 217 and 200.
PROMPT_MEDIAN, PROMPT_SIGMA, OUTPUT_MEDIAN, OUTPUT_SIGMA = 160.0, 1.5, 125.0, 1.0
SENTENCES = (
    "the harbour lamp keeper wrote letters about weather and ships while children asked how engines turn steam into "
    "motion so their teacher drew a wheel on paper then explained why iron grows warm under load what would you "
    "change if river water rose again before winter could someone list three reasons to build with stone or wood "
    "please give an example of code that sorts names by length without using extra memory and say when it fails"
)
WORDS = SENTENCES.split()


@dataclass(frozen=True)
class Prompt:
    """One request of a workload.

    Attributes:
        content: text, or token ids (text completions only).
        num_tokens: its length in tokens; None where no tokenizer was given, so only the server knows.
        max_tokens: output tokens asked for.
    """

    content: str | list[int]
    num_tokens: int | None
    max_tokens: int


@dataclass(frozen=True)
class Dataset:
    """Which prompts.

    Attributes:
        name: one of ``DATASETS``.
        path: file of ``sharegpt`` (ShareGPT's JSON; without one conversations are made up) or ``jsonl``.
        input_len, output_len: tokens of a prompt and its output, for ``random`` and ``repeat``; ``output_len``
            overrides what files say, too.
        range_ratio: lengths are drawn from ``len * (1 - ratio)`` to ``len * (1 + ratio)``, 0 to less than 1.
        num_prefixes, prefix_len: ``repeat``: so many different beginnings of so many tokens, before ``input_len`` more.
        context_length: prompt and output are cut to fit into this together, where it is known.
    """

    name: str = "random"
    path: Path | None = None
    input_len: int = 128
    output_len: int | None = None
    range_ratio: float = 0.0
    num_prefixes: int = 4
    prefix_len: int = 256
    context_length: int | None = None

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise ConfigError(f"--dataset-name {self.name}: wanted {', '.join(DATASETS)}")
        if self.name == "jsonl" and self.path is None:
            raise ConfigError("--dataset-name jsonl needs --dataset-path FILE")
        if self.name in ("random", "repeat") and self.path is not None:
            raise ConfigError(f"--dataset-path is not used by --dataset-name {self.name}; leave it out")
        if self.path is not None and not self.path.is_file():
            raise ConfigError(f"--dataset-path {self.path}: there is no such file")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio must be 0 or more and less than 1, got {self.range_ratio}")
        for flag, value in (("--input-len", self.input_len), ("--output-len", self.output_len),
                            ("--num-prefixes", self.num_prefixes), ("--prefix-len", self.prefix_len)):  # fmt: skip
            if value is not None and value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")

    @property
    def described(self) -> str:
        """Name for reports; says so when conversations are made up."""
        if self.path is not None:
            return f"{self.name} ({self.path.name})"
        return "sharegpt-like (synthetic)" if self.name == "sharegpt" else self.name


class Tokens:
    """Counts and makes tokens; without a tokenizer it estimates, and knows no ids.

    Args:
        tokenizer: anything with ``encode(text)``, ``decode(ids)``, ``vocab_size`` and ``special_ids``; or None.
    """

    def __init__(self, tokenizer: Any = None):
        self._tokenizer = tokenizer
        self._ordinary: list[int] = []
        if tokenizer is not None:
            special = set(tokenizer.special_ids)
            self._ordinary = [i for i in range(tokenizer.vocab_size) if i not in special]

    @property
    def known(self) -> bool:
        """Whether lengths are counted rather than estimated."""
        return self._tokenizer is not None

    def count(self, text: str) -> int:
        """Tokens of a text."""
        if self._tokenizer is not None:
            return len(self._tokenizer.encode(text))
        return max(1, round(len(text) / CHARACTERS_PER_TOKEN))

    def draw(self, rng: random.Random, length: int) -> list[int] | str:
        """``length`` random ids, or about as many words."""
        if self._ordinary:
            return rng.choices(self._ordinary, k=length)
        return " ".join(rng.choices(WORDS, k=length))

    def written(self, rng: random.Random, length: int) -> str:
        """Text of ``length`` tokens: exactly where there is a tokenizer, about where not."""
        if self._tokenizer is None:
            return " ".join(rng.choices(WORDS, k=length))
        ids = self._tokenizer.encode(" ".join(rng.choices(WORDS, k=length)))
        return self._tokenizer.decode(ids[:length])

    def as_text(self, content: str | list[int]) -> str:
        """Ids as text; a chat takes nothing else."""
        return content if isinstance(content, str) else self._tokenizer.decode(content)


def make_prompts(dataset: Dataset, count: int, seed: int, tokens: Tokens, as_text: bool) -> list[Prompt]:
    """``count`` prompts; the same seed and arguments give the same ones.

    Args:
        as_text: never token ids: for chats.

    Raises:
        ConfigError: a file that cannot be read as what it should be, or holds nothing that can be used.
    """
    rng = random.Random(seed)
    makers: dict[str, Callable[[], list[Prompt]]] = {
        "sharegpt": lambda: _sharegpt(dataset, count, rng, tokens),
        "random": lambda: _random(dataset, count, rng, tokens),
        "repeat": lambda: _repeat(dataset, count, rng, tokens),
        "jsonl": lambda: _jsonl(dataset, count, tokens),
    }
    made = [_within(prompt, dataset.context_length) for prompt in makers[dataset.name]()]
    if as_text:
        made = [Prompt(tokens.as_text(p.content), p.num_tokens, p.max_tokens) for p in made]
    return made


def _random(dataset: Dataset, count: int, rng: random.Random, tokens: Tokens) -> list[Prompt]:
    made = []
    for _ in range(count):
        length = _around(dataset.input_len, dataset.range_ratio, rng)
        output = _around(dataset.output_len or 128, dataset.range_ratio, rng)
        made.append(Prompt(tokens.draw(rng, length), length if tokens.known else None, output))
    return made


def _repeat(dataset: Dataset, count: int, rng: random.Random, tokens: Tokens) -> list[Prompt]:
    prefixes = [tokens.draw(rng, dataset.prefix_len) for _ in range(dataset.num_prefixes)]
    made = []
    for number in range(count):
        length = _around(dataset.input_len, dataset.range_ratio, rng)
        prefix, rest = prefixes[number % len(prefixes)], tokens.draw(rng, length)
        if isinstance(prefix, str) or isinstance(rest, str):
            content: str | list[int] = f"{prefix} {rest}"
        else:
            content = prefix + rest
        whole = dataset.prefix_len + length if tokens.known else None
        made.append(Prompt(content, whole, _around(dataset.output_len or 128, dataset.range_ratio, rng)))
    rng.shuffle(made)
    return made


def _around(length: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)))


def _sharegpt(dataset: Dataset, count: int, rng: random.Random, tokens: Tokens) -> list[Prompt]:
    if dataset.path is None:
        return _made_up(dataset, count, rng, tokens)
    found = []
    conversations = _read_json(dataset.path)
    rng.shuffle(conversations)
    for conversation in conversations:
        turns = _turns(conversation)
        if len(turns) < 2:
            continue
        length, output = tokens.count(turns[0]), dataset.output_len or tokens.count(turns[1])
        if length < LEAST_TOKENS or output < LEAST_TOKENS or length > MOST_PROMPT or length + output > MOST_TOTAL:
            continue
        found.append(Prompt(turns[0], length if tokens.known else None, output))
        if len(found) == count:
            return found
    if not found:
        raise ConfigError(f"{dataset.path}: no conversation of two turns and ordinary length in ShareGPT's layout, "
                          'a JSON list of {"conversations": [{"value": ...}, ...]}')  # fmt: skip
    return [found[i % len(found)] for i in range(count)]


def _read_json(path: Path) -> list[Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; --dataset-name jsonl reads one object per line") from None
    if not isinstance(loaded, list):
        raise ConfigError(f"{path}: wanted a JSON list of conversations, got {type(loaded).__name__}")
    return loaded


def _turns(conversation: Any) -> list[str]:
    turns = conversation.get("conversations", conversation.get("conversation")) if isinstance(conversation, dict) else 0
    if not isinstance(turns, list):
        return []
    return [str(turn["value"]) for turn in turns[:2] if isinstance(turn, dict) and "value" in turn]


def _made_up(dataset: Dataset, count: int, rng: random.Random, tokens: Tokens) -> list[Prompt]:
    made: list[Prompt] = []
    while len(made) < count:
        length = round(rng.lognormvariate(math.log(PROMPT_MEDIAN), PROMPT_SIGMA))
        output = round(rng.lognormvariate(math.log(OUTPUT_MEDIAN), OUTPUT_SIGMA))
        output = dataset.output_len or output
        if length < LEAST_TOKENS or output < LEAST_TOKENS or length > MOST_PROMPT or length + output > MOST_TOTAL:
            continue
        text = tokens.written(rng, length)
        made.append(Prompt(text, tokens.count(text) if tokens.known else None, output))
    return made


def _jsonl(dataset: Dataset, count: int, tokens: Tokens) -> list[Prompt]:
    assert dataset.path is not None
    found = []
    for number, line in enumerate(dataset.path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            found.append(_from_line(line, f"{dataset.path}:{number}", dataset, tokens))
    if not found:
        raise ConfigError(f'{dataset.path} is empty; wanted one object like {{"prompt": "..."}} per line')
    return [found[i % len(found)] for i in range(count)]


def _from_line(line: str, where: str, dataset: Dataset, tokens: Tokens) -> Prompt:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise ConfigError(f'{where}: wanted an object with a string "prompt", got {line[:60]}')
    output = dataset.output_len or fields.get("output_tokens") or fields.get("max_tokens") or 128
    if not isinstance(output, int) or isinstance(output, bool) or output < 1:
        raise ConfigError(f'{where}: "output_tokens" must be a positive integer, got {output!r}')
    return Prompt(fields["prompt"], tokens.count(fields["prompt"]) if tokens.known else None, output)


def _within(prompt: Prompt, context_length: int | None) -> Prompt:
    """Cut so that the server does not refuse it; only where lengths are known."""
    if context_length is None or prompt.num_tokens is None or isinstance(prompt.content, str):
        return prompt
    room = context_length - 1
    content: Sequence[int] = prompt.content[: max(1, room - min(prompt.max_tokens, room // 2))]
    return Prompt(list(content), len(content), min(prompt.max_tokens, context_length - len(content)))
