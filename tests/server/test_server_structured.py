"""What an output must look like, by every name clients use for it."""

from __future__ import annotations

import pytest
from api_client import Api, assert_error
from scripted_engine import ScriptedEngine

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.structured_outputs import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}


class Watched(ScriptedEngine):
    """Notes what it is asked for; refuses the pattern ``(``."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[StructuredOutputs | None] = []
        self.checked: list[StructuredOutputs | None] = []

    def check_controls(self, params) -> None:
        self.checked.append(params.structured_outputs)
        if params.structured_outputs.regex == "(":
            param = params.structured_outputs.param
            raise InvalidRequest(f"{param} cannot be followed: unclosed group", param=param, code="invalid_grammar")

    def generate(self, prompt, params, request_id=None):
        self.forms.append(params.structured_outputs)
        return super().generate(prompt, params, request_id)


FORMS = [
    ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        StructuredOutputs(json=SCHEMA),
    ),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
    ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
    ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
]


@pytest.mark.parametrize(("fields", "form"), FORMS, ids=str)
def test_every_name_means_the_same(fields, form) -> None:
    api = Api(engine := Watched())
    assert api.chat(**fields).status_code == 200
    assert api.complete(**fields).status_code == 200
    assert engine.forms == [form] * 2
    assert engine.checked == ([] if form is None else [form] * 2)  # compiled ahead, off the event loop


@pytest.mark.parametrize(
    ("params", "form"),
    [
        ({"json_schema": '{"type": "object"}'}, StructuredOutputs(json='{"type": "object"}')),
        ({"regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"ebnf": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
    ],
)
def test_generate_has_sglangs_names(params, form) -> None:
    api = Api(engine := Watched())
    assert api.post("/generate", {"text": "a", "sampling_params": params}).status_code == 200
    assert engine.forms == [form]


def test_the_order_of_properties_is_kept() -> None:
    assert StructuredOutputs(json=SCHEMA).json.index('"z"') < StructuredOutputs(json=SCHEMA).json.index('"a"')


BAD = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"yaml": {}}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
def test_what_makes_no_sense_names_its_field(fields, param) -> None:
    api = Api(Watched())
    for send in (api.chat, api.complete):
        assert param in assert_error(send(**fields), 400, param=param)


def test_generate_names_its_fields_too() -> None:
    api = Api(Watched())
    for params, param in (
        ({"regex": "("}, "regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"json_schema": 5}, "json_schema"),
    ):
        assert_error(api.post("/generate", {"text": "a", "sampling_params": params}), 400, f"sampling_params.{param}")
