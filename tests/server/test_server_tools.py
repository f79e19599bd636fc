"""Tools, tool calls and reasoning over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_client import CHAT, Api, assert_error, events
from scripted_engine import ScriptedEngine

from jaxserve.text.tool_calls.hermes import HermesParser
from jaxserve.text.tool_calls.registry import register_tool_call_parser

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def api_for(script: str, **settings: Any) -> Api:
    return Api(ScriptedEngine(script=script), **{"tool_call_parser": "hermes"} | settings)


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The message that the deltas of a stream make, and its finish reason."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] == len(calls):
                    assert part["id"] and part["type"] == "function" and part["function"]["name"]
                    calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
                else:
                    assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


def answers(api: Api, **fields: Any) -> list[dict[str, Any]]:
    """The message of a whole answer and the one of a stream, ids of calls left out."""
    choice = api.chat(**fields).json()["choices"][0]
    *chunks, done = events(api.chat(stream=True, **fields))
    assert done == "[DONE]"
    found = [choice["message"] | {"finish_reason": choice["finish_reason"]}, joined(chunks)]
    for message in found:
        message.pop("refusal", None)
        message["content"] = message["content"] or None
        for call in message.get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    return found


def test_a_call_is_a_call_whole_and_streamed() -> None:
    for message in answers(api_for("Let me see.\n" + CALL), tools=TOOLS):
        assert message == {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}],
            "finish_reason": "tool_calls",
        }


def test_two_calls_have_ids_and_indexes_of_their_own() -> None:
    api = api_for(CALL + "\n" + '<tool_call>{"name": "now"}</tool_call>')
    calls = api.chat(tools=TOOLS).json()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "now"] and calls[0]["id"] != calls[1]["id"]
    whole, streamed = answers(api, tools=TOOLS)
    assert whole == streamed
    for message in answers(api, tools=TOOLS, parallel_tool_calls=False):
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


@pytest.mark.parametrize("choice", ["none", None])
def test_without_tools_or_with_choice_none_text_stays_text(choice: str | None) -> None:
    api = api_for(CALL)
    for message in answers(api, tools=TOOLS if choice else None, tool_choice=choice):
        assert message == {"role": "assistant", "content": CALL, "finish_reason": "stop"}
    assert "tools" not in api.engine.chat_options


def test_a_call_cut_off_by_max_tokens() -> None:
    """O-17: cut: ``length`` in both; whole: ``tool_calls`` in both, and equal arguments."""
    arguments = json.dumps({"city": "x" * 70})
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    seen = set()
    for limit in range(10, len(call) + 3):
        whole, streamed = answers(api_for(call), tools=TOOLS, max_tokens=limit)
        assert whole == streamed
        is_whole = limit >= call.index("}}") + 2
        assert whole["finish_reason"] == ("tool_calls" if is_whole else "length"), limit
        if is_whole:
            assert json.loads(whole["tool_calls"][0]["function"]["arguments"]) == json.loads(arguments)
        seen.add((is_whole, "tool_calls" in whole))
    assert seen == {(False, False), (False, True), (True, True)}


def test_an_output_that_ends_in_the_middle_of_a_call_is_no_tool_call() -> None:
    for message in answers(api_for(CALL[:50]), tools=TOOLS):
        assert message["finish_reason"] == "stop" and message["tool_calls"]
    for message in answers(api_for(CALL + "and <tool_call>{"), tools=TOOLS, max_tokens=len(CALL) + 10):
        assert message["finish_reason"] == "length" and message["content"]


def test_text_that_only_looks_like_a_call_is_lost_nowhere() -> None:
    for message in answers(api_for("a < b <tool_call>no"), tools=TOOLS):
        assert message == {"role": "assistant", "content": "a < b <tool_call>no", "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("choice", "script", "name"),
    [
        ("required", '[{"name": "weather", "parameters": {"city": "Rome"}}]', "weather"),
        ({"type": "function", "function": {"name": "weather"}}, '{"city": "Rome"}', "weather"),
    ],
)
def test_a_call_that_must_be_made_follows_a_schema(choice: Any, script: str, name: str) -> None:
    asked = []

    class Watched(ScriptedEngine):
        def check_controls(self, params):
            asked.append(json.loads(params.structured_outputs.json))

    api = Api(Watched(script=script))  # needs no parser
    about_text = {"type": "json_object"}  # and there will be none
    plain = answers(api, tools=TOOLS, tool_choice=choice)
    for message in plain + answers(api, tools=TOOLS, tool_choice=choice, response_format=about_text):
        assert message["content"] is None and message["finish_reason"] == "tool_calls"
        assert message["tool_calls"] == [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ]
    assert len(asked) == 4 and asked == asked[:1] * 4
    if choice == "required":
        assert asked[0]["type"] == "array" and len(asked[0]["items"]["anyOf"]) == 2 and "maxItems" not in asked[0]
        api.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        assert asked[-1]["maxItems"] == 1
    else:
        assert asked[0]["required"] == ["city"]


def test_logprobs_of_a_stream_with_calls_are_complete() -> None:
    api = api_for("Well. " + CALL)
    fields: dict[str, Any] = {"tools": TOOLS, "logprobs": True}
    content = api.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events(api.chat(stream=True, **fields))
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in streamed for entry in part["content"]] == content
    assert len(content) == len("Well. " + CALL) + 1


def test_control_tokens_of_a_notation_stay_in_the_text() -> None:
    class Marked(HermesParser):
        marks = ("<|eot|>", "<tool_call>")

    class Watched(ScriptedEngine):
        def generate(self, prompt, params, request_id=None, **options):
            seen.append(params.shown_special_ids)
            return super().generate(prompt, params, request_id, **options)

    seen: list[tuple[int, ...]] = []
    register_tool_call_parser("marked-for-a-test", Marked)
    api = Api(Watched(), tool_call_parser="marked-for-a-test")
    api.chat(tools=TOOLS)
    api.chat()
    assert seen == [(258,), ()]


def test_without_a_parser_auto_is_refused_with_what_to_do() -> None:
    message = assert_error(Api(ScriptedEngine()).chat(tools=TOOLS), 400, param="tools", code="no_tool_call_parser")
    assert "--tool-call-parser" in message and "required" in message


BAD = [
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "params": {}}}]}, "tools"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "jsn"}}, "response_format"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
def test_what_makes_no_sense_is_a_400_that_names_its_field(fields: dict[str, Any], param: str) -> None:
    assert_error(api_for("x").chat(**fields), 400, param=param)


def test_calls_and_their_answers_reach_the_template() -> None:
    seen = []

    class Listening(ScriptedEngine):
        def encode_chat(self, messages, **options):
            seen.extend([messages, options])
            return super().encode_chat(messages, **options)

    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    api = Api(Listening(), tool_call_parser="hermes")
    assert api.chat(messages=messages, tools=TOOLS).status_code == 200
    [given, options] = seen
    assert given[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert given[2] == {"role": "tool", "content": "Rain.", "tool_call_id": "call_1", "name": "weather"}
    assert options["tools"] == TOOLS
    bad = [
        {"role": "tool", "content": "no id"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
    ]
    for message in bad:
        assert_error(api.chat(messages=[messages[0], message]), 400, param="messages")


def test_reasoning_comes_apart_from_the_answer() -> None:
    script = "<think>\nRain is wet.\n</think>\n\nYes."
    for message in answers(Api(ScriptedEngine(script=script), reasoning_parser="qwen3")):
        assert message["content"] == "Yes." and message["reasoning_content"] == "Rain is wet."
    for message in answers(Api(ScriptedEngine(script=script), reasoning_parser="qwen3"), separate_reasoning=False):
        assert message["content"] == script and "reasoning_content" not in message
    for message in answers(Api(ScriptedEngine(script="Hm.</think>Yes."), reasoning_parser="deepseek_r1")):
        assert message["content"] == "Yes." and message["reasoning_content"] == "Hm."


def test_reasoning_and_a_call_in_one_output() -> None:
    api = api_for("<think>I shall look.</think>\n" + CALL, reasoning_parser="qwen3")
    for message in answers(api, tools=TOOLS):
        assert message["reasoning_content"] == "I shall look." and message["content"] is None
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        assert message["finish_reason"] == "tool_calls"


def test_an_output_with_a_form_is_all_answer() -> None:
    api = Api(ScriptedEngine(script='{"a": 1}'), reasoning_parser="deepseek_r1")
    api.engine.check_controls = lambda params: None
    for message in answers(api, response_format={"type": "json_object"}):
        assert message["content"] == '{"a": 1}'


def test_switches_and_templates_reach_the_template() -> None:
    api = Api(ScriptedEngine(), chat_template="T")
    assert api.chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert api.engine.chat_options == {
        "add_generation_prompt": True, "template": "T", "variables": {"enable_thinking": False},
    }  # fmt: skip
    assert api.chat(continue_final_message=True).status_code == 200
    options = api.engine.chat_options
    assert options["continue_final_message"] is True and options["add_generation_prompt"] is False
    assert_error(api.chat(chat_template="x"), 400, param="chat_template", code="untrusted_chat_template")
    trusting = Api(ScriptedEngine(), trust_request_chat_template=True)
    assert trusting.chat(chat_template="x").status_code == 200 and trusting.engine.chat_options["template"] == "x"
    assert CHAT["messages"]


STRICT = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}, TOOLS[1]]


class Watched(ScriptedEngine):
    """Notes the forms that outputs must have."""

    def __init__(self, script: str):
        super().__init__(script=script)
        self.forms: list[Any] = []

    def check_controls(self, params: Any) -> None:
        self.forms.append(params.structured_outputs)


def test_strict_functions_have_their_calls_held_to_their_schemas() -> None:
    """And reasoning is told apart still, for text stays free."""
    engine = Watched("<think>Hm.</think>Let me see.\n" + CALL)
    api = Api(engine, tool_call_parser="hermes", reasoning_parser="qwen3")
    whole, streamed = answers(api, tools=STRICT)
    assert whole == streamed and whole["reasoning_content"] == "Hm." and whole["content"] == "Let me see."
    assert [call["function"]["arguments"] for call in whole["tool_calls"]] == ['{"city": "Paris"}']
    form = engine.forms[0]
    assert form.param == "tools" and form.calls.notation == "hermes"
    assert json.loads(form.calls.functions) == [tool["function"] for tool in STRICT]


def test_functions_that_are_not_strict_hold_nothing() -> None:
    engine = Watched(CALL)
    assert Api(engine, tool_call_parser="hermes").chat(tools=TOOLS).status_code == 200
    assert Api(engine, tool_call_parser="hermes").chat(tools=STRICT, tool_choice="none").status_code == 200
    assert engine.forms == []


def test_a_notation_that_cannot_be_held_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = Watched('[weather(city="Paris")]')
    message = Api(engine, tool_call_parser="pythonic").chat(tools=STRICT).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "weather" and engine.forms == []
    assert "nothing enforces schemas in calls by pythonic" in caplog.text
