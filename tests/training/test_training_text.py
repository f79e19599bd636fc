"""Text to train on: what files may hold, how it is packed, and that a killed generation goes on."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import EOS, byte_tokenizer_files

from jaxserve.core.errors import ConfigError
from jaxserve.text.tokenizer import Tokenizer, read_json
from jaxserve.training.continuations import Recipe, Sample, read_continuations, write_continuations
from jaxserve.training.corpus import read_corpus
from jaxserve.training.packing import frequent_ids, pack
from jaxserve.training.prompts import instructions

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + m['content'] + '.' }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = byte_tokenizer_files(tmp_path_factory.mktemp("byte"))
    return Tokenizer.from_file(path / "tokenizer.json", read_json(path / "tokenizer_config.json"))


# -- files -------------------------------------------------------------------------------------------------------------


def test_texts_conversations_and_prompts_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "xy"},
                {"role": "user", "content": "v"}, {"role": "assistant", "content": "z"}]  # fmt: skip
    lines = [{"text": "line"}, {"messages": messages}, {"prompt": "why?"}]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    corpus = read_corpus([tmp_path / "a.txt", tmp_path / "b.jsonl"], tokenizer, TEMPLATE, EOS, "tiny")
    assert corpus.prompts == ["why?"]
    assert corpus.samples == [
        Sample([*b"plain"], 0),
        Sample([*b"line"], 0),
        Sample([*b"uu.axy", EOS], 4),
        Sample([*b"uu.axy.uv.az", EOS], 11),
    ]


def test_answers_another_training_left_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = Recipe("tiny", 7, 0.5, 3)
    path = tmp_path / "continuations.jsonl"
    rows = [{"prompt": [1, 2], "output": [3, 259]}, {"prompt": [4], "output": []}]
    path.write_text("".join(json.dumps(row) + "\n" for row in (dataclasses.asdict(recipe), *rows)))
    corpus = read_corpus([path], tokenizer, TEMPLATE, EOS, "tiny")
    assert corpus.samples == read_continuations(path, recipe) == [Sample([1, 2, 3, 259], 2), Sample([4], 1)]
    with pytest.raises(ConfigError, match="line 1: what tiny wrote, in its token ids; wanted what other wrote"):
        read_corpus([path], tokenizer, TEMPLATE, EOS, "other")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "x", r"wanted a \.txt or \.jsonl file, got \.csv"),
        ("a.jsonl", "{", "line 1: is not JSON"),
        ("a.jsonl", '{"text": "x"}\n[1]', 'line 2: wanted an object with "text"'),
        ("a.jsonl", '{"text": 1}', 'line 1: wanted an object with "text"'),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "u"}]}', "no answer of an assistant"),
        ("a.jsonl", '{"messages": [{"role": "user"}, {"role": "assistant"}]}', "not a conversation"),
        ("a.jsonl", '{"prompt": [1], "output": [260]}', 'line 1: wanted an object with "text"'),
        ("a.jsonl", '{"prompt": [1], "output": [-1]}', 'line 1: wanted an object with "text"'),
        ("a.jsonl", "\n", "holds no text"),
        ("missing.txt", None, "cannot be read"),
    ],
)
def test_a_file_that_is_not_what_was_wanted_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_corpus([tmp_path / name], tokenizer, TEMPLATE, EOS, "tiny")


# -- packing -----------------------------------------------------------------------------------------------------------


def test_every_token_is_packed_once_with_its_place() -> None:
    random = np.random.default_rng(0)
    samples = [Sample(random.integers(1, 99, size).tolist(), prompt)
               for size, prompt in ((5, 2), (20, 3), (3, 0), (2, 1), (9, 9), (7, 1), (16, 4))]  # fmt: skip
    rows = pack(samples, 16)
    found = {
        (tuple(rows.ids[row][where]), tuple(rows.positions[row][where]), tuple(rows.answers[row][where]))
        for row in range(len(rows))
        for segment in range(1, rows.segments[row].max() + 1)
        for where in [rows.segments[row] == segment]
    }
    cut = [(ids[:16], num_prompt) for ids, num_prompt in samples if len(ids) > 2]  # two tokens leave nothing to guess
    assert found == {(tuple(ids), tuple(range(len(ids))), tuple(i >= n for i in range(len(ids)))) for ids, n in cut}
    assert rows.num_tokens == sum(len(ids) for ids, _ in cut) and len(rows) == 4  # 56 tokens in 64 places
    assert not rows.answers[rows.segments == 0].any()


def test_the_draft_knows_what_the_model_writes_most() -> None:
    rows = pack([Sample([9, 9, 9, 7, 7, 7, 5, 5, 3], 3)], 16)  # the 9s are a prompt
    np.testing.assert_array_equal(frequent_ids(rows, 20, 3), [3, 5, 7])
    np.testing.assert_array_equal(frequent_ids(rows, 20, 3, always=[19]), [5, 7, 19])
    np.testing.assert_array_equal(frequent_ids(rows, 20, 5), [0, 1, 3, 5, 7])
    assert frequent_ids(rows, 20, 0) is None and frequent_ids(rows, 20, 20) is None


# -- the model's own answers -------------------------------------------------------------------------------------------


class EchoModel:
    """Stands for an LLM: an answer is the prompt's length and the temperature."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(encode_chat=lambda messages: [*messages[0]["content"].encode()])
        self.num_waves = 0

    def generate(self, prompts, params):
        self.num_waves += 1
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[len(prompt), round(each.temperature * 10), each.seed])])
            for prompt, each in zip(prompts, params, strict=True)
        ]


def test_a_killed_generation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    recipe, messages = Recipe("m", seed=5), [f"message {'x' * i}" for i in range(7)]
    whole = write_continuations(tmp_path / "whole.jsonl", recipe, EchoModel(), 1000, messages, wave=2)
    assert whole[1] == Sample([*b"message x", 9, 7, 6], 9) and whole[2].ids[-2:] == [0, 7]  # every other one is greedy

    path, model = tmp_path / "cut.jsonl", EchoModel()
    write_continuations(path, recipe, model, 10, messages, wave=2)
    assert model.num_waves == 2  # 12 tokens are enough
    with path.open("a") as file:
        file.write('{"prompt":[1,2')  # a kill in the middle of a line
    assert len(read_continuations(path, recipe)) == 4
    assert write_continuations(path, recipe, model, 1000, messages, wave=2) == whole
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_answers_of_another_recipe_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_continuations(path, Recipe("m"), EchoModel(), 1, ["x"])
    with pytest.raises(ConfigError, match="made with"):
        read_continuations(path, Recipe("another"))
    path.write_text("[]\n")
    with pytest.raises(ConfigError, match="made with"):
        read_continuations(path, Recipe("m"))
    path.write_text("{\n")
    with pytest.raises(ConfigError, match="not a file of continuations"):
        read_continuations(path, Recipe("m"))


def test_instructions_are_many_and_the_same_each_time() -> None:
    first = list(itertools.islice(instructions(3), 2000))
    assert first == list(itertools.islice(instructions(3), 2000))
    assert len(set(first)) == 2000 and not any("{" in text and "}" in text and "name}" in text for text in first)
