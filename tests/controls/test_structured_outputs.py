"""Outputs that follow a schema, an expression, a grammar, with and without speculation, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
from drafters import Prophet
from rig import add, check_idle, generate, make_engine, prompt_of, run
from tiny import EOS

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.structured_outputs import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"status": {"enum": ["ok"]}, "items": {"type": "array", "items": {"type": "integer", "minimum": 0,
                   "maximum": 99}, "minItems": 3, "maxItems": 3}},
    "required": ["status", "items"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
FORMS = {
    "schema": {"json": SCHEMA},
    "schema text": {"json": json.dumps(SCHEMA)},
    "regex": {"regex": "[ab]{3}-[0-9]{2,4}"},
    "choice": {"choice": ["positive", "negative", 'qu"ote\n', "ünï"]},
    "gbnf": {"grammar": 'root ::= "[" item ("," item)* "]"\nitem ::= "x" | "yy"'},
    "lark": {"grammar": 'start: "<" /[a-f]+/ ">"'},
}
LENGTH = 60
FEW_PAGES = 24  # as in test_logit_controls.py, whose programs are found again


def is_right(name: str, text: str) -> bool:
    """Whether a whole output has its form."""
    if name.startswith("schema"):
        value = json.loads(text)
        return (
            list(value) == ["status", "items"]
            and value["status"] == "ok"
            and len(value["items"]) == 3
            and all(isinstance(item, int) and 0 <= item <= 99 for item in value["items"])
        )
    if name == "choice":
        return text in FORMS["choice"]["choice"]
    pattern = {"regex": "[ab]{3}-[0-9]{2,4}", "gbnf": r"\[(x|yy)(,(x|yy))*\]", "lark": "<[a-f]+>"}[name]
    return re.fullmatch(pattern, text) is not None


def requests() -> list[tuple[str, list[int], SamplingParams]]:
    """(form, prompt, params); some free ones among them."""
    found = []
    for i, (name, form) in enumerate([*FORMS.items(), ("free", None)]):
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                max_tokens=LENGTH, temperature=temperature, seed=i, structured_outputs=form,
                ignore_eos=form is None,
            )  # fmt: skip
            found.append((name, prompt_of(6 + 3 * i, seed=7), params))
    return found


def outputs_of(engine):
    outputs = generate(engine, [(prompt, params) for _, prompt, params in requests()])
    for (name, _, _), output in zip(requests(), outputs, strict=True):
        assert output.error is None
        if name == "free":
            assert output.finish_reason == "length"
        elif output.finish_reason == "stop":
            assert is_right(name, output.text), (name, output.text)
            assert output.token_ids[-1] == EOS
        else:  # cut off on the way
            assert output.finish_reason == "length" and name in ("gbnf", "lark")
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def engine(tiny):
    made = make_engine(tiny, num_pages=FEW_PAGES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(engine):
    return outputs_of(engine)


def test_outputs_have_their_form(plain):
    assert sum(output[-1] == EOS for output in plain) >= 8


@pytest.mark.parametrize(
    "settings",
    [
        {"disable_overlap_schedule": True},
        {"speculative_algorithm": "TREE-PROPHET"},
        {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 4},
    ],
    ids=lambda settings: settings.get("speculative_algorithm", "no overlap"),
)
def test_they_are_the_same_however_they_are_made(tiny, plain, prophets, settings, monkeypatch):
    """O-18."""
    answers = [[*prompt, *output] for (_, prompt, _), output in zip(requests(), plain, strict=True)]
    monkeypatch.setattr(Prophet, "answers", answers)
    if "speculative_algorithm" in settings:
        settings = {**settings, "speculative_adaptive": False, "speculative_num_draft_tokens": 6}
    other = make_engine(tiny, num_pages=FEW_PAGES, **settings)
    for _ in range(2):  # NGRAM has seen the outputs the second time
        assert outputs_of(other) == plain
    if other.scheduler.speculation is not None:
        assert other.scheduler.speculation.figures.num_accepted > 30
    check_idle(other)
    other.close()


UNSOUND = [
    {"json": {"type": "nonsense"}},
    {"json": {"type": "object", "minProperties": 3, "maxProperties": 1}},
    {"json": "{"},
    {"json": "[1]"},
    {"json": True},
    {"regex": "("},
    {"grammar": "start: nothing_of_that_name"},
    {"grammar": "root ::= ("},
    {"choice": []},
    {"choice": ["a", 5]},
    {},
    {"regex": "a", "choice": ["a"]},
    {"xml": "a"},
    "regex",
]


@pytest.mark.parametrize("form", UNSOUND, ids=str)
def test_what_cannot_be_followed_is_refused(engine, form):
    with pytest.raises(InvalidRequest) as caught:
        add(engine, [1], SamplingParams(structured_outputs=form))
    assert caught.value.param == "structured_outputs" and "structured_outputs" in str(caught.value)
    check_idle(engine)


def test_without_a_backend_it_is_refused(tiny):
    free = make_engine(tiny, grammar_backend="none")
    with pytest.raises(InvalidRequest, match="--grammar-backend none"):
        add(free, [1], SamplingParams(structured_outputs={"regex": "a"}))
    free.close()


def test_a_limit_of_the_parser_ends_that_output_alone(engine, monkeypatch):
    from jaxserve.text.grammars import GrammarConstraint

    fill = GrammarConstraint.fill_mask

    def failing(self, words):
        fill(self, words)
        if words[1] & 2:  # "!" may come
            self.error = "the lexer is too complex"

    monkeypatch.setattr(GrammarConstraint, "fill_mask", failing)
    params = {"max_tokens": 6, "temperature": 0.0}
    bad = add(engine, [1], SamplingParams(structured_outputs={"regex": "!!!"}, **params))
    good = add(engine, [1], SamplingParams(structured_outputs={"regex": "abc"}, **params))
    collected = run(engine)
    assert collected[bad].finish_reason == "error" and "too complex" in collected[bad].error
    assert collected[good].text == "abc" and collected[good].finish_reason == "stop"


def test_min_tokens_and_ignore_eos_give_way(engine):
    params = {"max_tokens": 9, "temperature": 0.0, "structured_outputs": {"choice": ["yes"]}}
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 8}):
        (output,) = generate(engine, [([1], SamplingParams(**params, **more))])
        assert (output.text, output.finish_reason) == ("yes", "stop")


def test_several_outputs_of_one_request_follow_it_each(engine):
    form = StructuredOutputs(regex="[a-z]{4}[0-9]")
    request_id = add(engine, [1], SamplingParams(max_tokens=20, seed=2, n=4, structured_outputs=form))
    collected = run(engine)
    texts = [collected.outputs[request_id, i].text for i in range(4)]
    assert len(set(texts)) > 1 and all(re.fullmatch("[a-z]{4}[0-9]", text) for text in texts)
