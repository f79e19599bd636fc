"""Text the user brings to train on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.core.errors import ConfigError, InvalidRequest
from jaxserve.text.chat_template import encode_chat
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.training.continuations import Recipe, Sample

_WANTED = (
    'an object with "text" (a string), "messages" (a list of {role, content}), "prompt" (a string), or "prompt" and '
    '"output" (token ids, as answers are kept in work/continuations.jsonl)'
)
_RECIPE = {field.name for field in dataclasses.fields(Recipe)}


class Corpus(NamedTuple):
    """What the files held.

    Attributes:
        samples: sequences to train on as they are.
        prompts: messages for the target to answer.
    """

    samples: list[Sample]
    prompts: list[str]


def read_corpus(paths: Sequence[Path], tokenizer: Tokenizer, chat_template: str | None, eos_id: int | None,
                model: str) -> Corpus:  # fmt: skip
    """Reads ``.txt`` (one text a file) and ``.jsonl`` files (one object a line).

    Of a conversation, what the assistant says counts as written by the model; of a text, all of it. A file of
    continuations that a training of the same model left is taken as it is, so several drafts can learn from it.

    Args:
        model: name of the model; continuations of another are refused.

    Raises:
        ConfigError: a file that cannot be read or is of another kind, or a line that is not what was wanted; names it.
    """
    corpus = Corpus([], [])
    for path in paths:
        if path.suffix.lower() not in (".txt", ".jsonl"):
            raise ConfigError(f"--data {path}: wanted a .txt or .jsonl file, got {path.suffix or 'no suffix'}")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--data {path} cannot be read: {error}") from error
        if path.suffix.lower() == ".txt":
            corpus.samples.append(Sample(tokenizer.encode(text), 0))
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                place = f"--data {path}, line {number}"
                _read_line(corpus, line, place, tokenizer, chat_template, eos_id, model)
    if not corpus.samples and not corpus.prompts:
        raise ConfigError(f"--data {', '.join(map(str, paths))} holds no text; wanted {_WANTED} a line, or a .txt file")
    return corpus


def _read_line(corpus: Corpus, line: str, place: str, tokenizer: Tokenizer, chat_template: str | None,
               eos_id: int | None, model: str) -> None:  # fmt: skip
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: is not JSON: {error}") from error
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            corpus.samples.append(Sample(tokenizer.encode(record["text"]), 0))
            return
        if isinstance(record.get("prompt"), str):
            corpus.prompts.append(record["prompt"])
            return
        if isinstance(record.get("messages"), list):
            corpus.samples.extend(_turns(record["messages"], place, tokenizer, chat_template, eos_id))
            return
        if record.keys() == {"prompt", "output"} and all(map(_are_ids, record.values(), 2 * [tokenizer.vocab_size])):
            corpus.samples.append(Sample(record["prompt"] + record["output"], len(record["prompt"])))
            return
        if record.keys() == _RECIPE:
            if record["model"] != model:
                raise ConfigError(
                    f"{place}: what {record['model']} wrote, in its token ids; wanted what {model} wrote: leave the "
                    "file out, or give --model that one"
                )
            return
    raise ConfigError(f"{place}: wanted {_WANTED}, got {line[:80]}")


def _are_ids(value: Any, num_ids: int) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < num_ids for each in value)


def _turns(messages: list[Any], place: str, tokenizer: Tokenizer, chat_template: str | None,
           eos_id: int | None) -> list[Sample]:  # fmt: skip
    """A sequence per answer of the assistant, each with all that went before as its prompt."""
    samples = []
    try:
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or not index:
                continue
            prompt = encode_chat(tokenizer, chat_template, messages[:index], add_generation_prompt=True, tools=None)
            answer = tokenizer.encode(message["content"], add_special_tokens=False)
            samples.append(Sample([*prompt, *answer, *([] if eos_id is None else [eos_id])], len(prompt)))
    except (InvalidRequest, KeyError, TypeError) as error:
        raise ConfigError(f"{place}: not a conversation the model's chat template takes: {error}") from error
    if not samples:
        raise ConfigError(f"{place}: the conversation has no answer of an assistant to train on")
    return samples
