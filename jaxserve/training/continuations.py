"""Text a model writes itself, kept on disk: what a draft of this model has to predict.

One JSON object a line: first the settings the file was made with, then ``{"prompt": ids, "output": ids}`` per sequence.
The file grows as answers come, so a generation that was killed goes on where it stopped.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.core.errors import ConfigError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.llm import LLM
from jaxserve.training.prompts import instructions


class Sample(NamedTuple):
    """One training sequence: token ids, of which the first ``num_prompt_tokens`` were not written by the model."""

    ids: list[int]
    num_prompt_tokens: int


@dataclass(frozen=True)
class Recipe:
    """How continuations are made.

    Attributes:
        model: name of the model; a file made by another one is refused.
        max_tokens: longest answer.
        temperature: of every other answer; those between are greedy.
        seed: of the prompts and of sampling.
    """

    model: str
    max_tokens: int = 192
    temperature: float = 0.7
    seed: int = 0


def read_continuations(path: Path, recipe: Recipe) -> list[Sample]:
    """The sequences in a file; [] when there is none. A last line cut by a kill is ignored.

    Raises:
        ConfigError: the file was made with another recipe, or is damaged.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last line break is not a whole line
    if not lines:
        return []
    try:
        first, *others = (json.loads(line) for line in lines)
        samples = [Sample(row["prompt"] + row["output"], len(row["prompt"])) for row in others]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a file of continuations ({error}); delete it to make it anew") from error
    if first != asdict(recipe):
        raise ConfigError(
            f"{path}: made with {first}, wanted {asdict(recipe)}; delete it to make it anew, or choose another folder"
        )
    return samples


def write_continuations(
    path: Path,
    recipe: Recipe,
    llm: LLM,
    num_tokens: int,
    messages: Iterable[str] | None = None,
    progress: Callable[[int], None] = lambda num_new: None,
    wave: int = 128,
) -> list[Sample]:
    """Has the model answer messages until the file holds ``num_tokens`` of answers; returns all of its sequences.

    Args:
        messages: users' messages, in a fixed order; by default ``instructions``. When they end, so does the file.
        progress: told the number of tokens of each wave.
        wave: prompts generated together before the file grows.
    """
    samples = read_continuations(path, recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not samples:
        path.write_text(json.dumps(asdict(recipe)) + "\n", encoding="utf-8")
    else:  # drop what a kill may have cut
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    have = sum(len(sample.ids) - sample.num_prompt_tokens for sample in samples)
    source = enumerate(instructions(recipe.seed) if messages is None else messages)
    waiting: Iterator[tuple[int, str]] = itertools.islice(source, len(samples), None)
    while have < num_tokens and (batch := list(itertools.islice(waiting, wave))):
        prompts = [llm.engine.encode_chat([{"role": "user", "content": text}]) for _, text in batch]
        params = [_params(recipe, index) for index, _ in batch]
        outputs = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
        rows: list[dict[str, Any]] = [{"prompt": p, "output": o} for p, o in zip(prompts, outputs, strict=True)]
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
        samples += [Sample(row["prompt"] + row["output"], len(row["prompt"])) for row in rows]
        new = sum(map(len, outputs))
        have += new
        progress(new)
    return samples


def _params(recipe: Recipe, index: int) -> SamplingParams:
    temperature = recipe.temperature if index % 2 else 0.0
    return SamplingParams(temperature=temperature, max_tokens=recipe.max_tokens, seed=recipe.seed + index)
