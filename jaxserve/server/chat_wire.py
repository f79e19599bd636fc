"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator
from pydantic.config import JsonDict

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.generation_wire import GenerationRequest
from jaxserve.server.settings import ServerSettings
from jaxserve.server.tools_wire import ToolUse, check_tool_calls, check_tools
from jaxserve.server.wire import COMPLETIONS_ONLY, UNSUPPORTED

MESSAGES_SCHEMA: JsonDict = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                    {"type": "null"},
                ]
            },
            "name": {"type": "string"},
            "tool_call_id": {"type": "string"},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
        },
    },
}

ROLES = ("system", "developer", "user", "assistant", "tool")
# beside role and content, by role
_MORE = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}
_MAY_BE_EMPTY = ("tool_calls", "function_call", "refusal", "audio", "reasoning_content", "annotations")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with plain string contents, ready for the chat template. ``developer`` becomes ``system``, arguments of
    calls become objects, answers to calls get the name of the function.

    Raises:
        ValueError: says what a list of messages must look like.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("must be a list with at least one message")
    checked = [_check_message(position, message) for position, message in enumerate(messages)]
    names: dict[str, str] = {}  # of the functions called so far, by id
    for message in checked:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])  # some templates ask for it
    return checked


def _check_message(position: int, message: Any) -> dict[str, Any]:
    where = f"[{position}]"
    if not isinstance(message, dict):
        raise ValueError(f'{where} must be an object like {{"role": "user", "content": "Hi"}}')
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}")
    more: dict[str, Any] = {}
    for name, value in message.items():
        if name in _MAY_BE_EMPTY and not value:
            continue  # clients send back what they were sent, empty fields included
        if name == "name" and (value is None or isinstance(value, str)):
            continue
        if name in _MORE.get(role, ()):
            more[name] = check_tool_calls(f"{where}.{name}", value) if name == "tool_calls" else value
            if name != "tool_calls" and not isinstance(value, str):
                raise ValueError(f"{where}.{name} must be a string")
        elif name not in ("role", "content"):
            raise ValueError(f"{where}.{name} is not supported; leave it out")
    if role == "tool" and not more.get("tool_call_id"):
        raise ValueError(f"{where}.tool_call_id must say which call the message answers")
    content = message.get("content")
    if content is None and ("tool_calls" in more or "reasoning_content" in more):
        content = ""
    checked = {"role": "system" if role == "developer" else role, "content": _text_of(where, content), **more}
    if message.get("name"):
        checked["name"] = message["name"]
    return checked


def _text_of(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}.content must be a string or a list of text parts")
    texts: list[str] = []
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            seen = f"; parts of type {kind!r} are not supported" if isinstance(kind, str) and kind != "text" else ""
            raise ValueError(f'{where}.content[{position}] must be {{"type": "text", "text": "..."}}{seen}')
        texts.append(part["text"])
    return "\n".join(texts)


def template_options(
    settings: ServerSettings,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
    template: str | None = None,
) -> dict[str, Any]:
    """Options of ``EngineLike.encode_chat``: what asks for nothing is left out."""
    goes_on = bool(continue_final_message)
    options: dict[str, Any] = {
        "add_generation_prompt": not goes_on if add_generation_prompt is None else add_generation_prompt
    }
    more = {
        "template": template or settings.chat_template,
        "tools": tools,
        "variables": variables,
        "continue_final_message": goes_on,
    }
    return options | {name: value for name, value in more.items() if value}


class ChatCompletionRequest(GenerationRequest):
    """``messages`` plus sampling fields. Without ``max_tokens`` the answer may fill the context."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {**UNSUPPORTED, **COMPLETIONS_ONLY}

    messages: Any = Field(json_schema_extra=MESSAGES_SCHEMA)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    return_token_details: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = Field(None, json_schema_extra={"type": ["array", "null"], "items": {"type": "object"}})
    tool_choice: Any = Field(None, json_schema_extra={"type": ["string", "object", "null"]})
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None  # False: reasoning stays in the content

    _check_messages = field_validator("messages")(check_messages)
    _check_tools = field_validator("tools")(check_tools)

    def tool_use(self) -> ToolUse:
        """What it says about tools.

        Raises:
            InvalidRequest: a choice that the tools do not offer, or another field that forbids calls.
        """
        use = ToolUse.of(self.tools or [], self.tool_choice, self.parallel_tool_calls)
        form = self.form()
        is_forced = use.choice in ("required", "named")  # then there is no text that response_format could be about
        if form is not None and use.choice != "none" and not (is_forced and form.param == "response_format"):
            message = f"{form.param} and tool_choice both say what the output must look like; send one of them"
            if not is_forced:
                message = (
                    f"{form.param} holds the whole output to its form, so the model could not call a tool where it "
                    "chooses to; send tool_choice 'none', or leave one of them out"
                )
            raise InvalidRequest(message, param=form.param, code="invalid_value")
        return use

    def template_options(self, settings: ServerSettings, use: ToolUse) -> dict[str, Any]:
        """How its messages become a prompt, see ``text.chat_template.encode_chat``.

        Raises:
            InvalidRequest: a template of its own, which this server does not take.
        """
        if self.chat_template is not None and not settings.trust_request_chat_template:
            message = (
                "chat_template in a request is refused, because rendering it can take any amount of time; start the "
                "server with --trust-request-chat-template, or with --chat-template FILE"
            )
            raise InvalidRequest(message, param="chat_template", code="untrusted_chat_template")
        return template_options(
            settings,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=list(use.tools),
            variables=self.chat_template_kwargs,
            template=self.chat_template,
        )

    def params(self) -> SamplingParams:
        """The engine's parameters.

        Raises:
            InvalidRequest: a value out of range or fields that contradict each other.
        """
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.max_tokens is not None and self.max_tokens != limit:
            message = f"max_tokens is {self.max_tokens} but max_completion_tokens is {limit}; send one of them"
            raise InvalidRequest(message, param="max_tokens", code="invalid_value")
        num_logprobs: int | None = None
        if self.logprobs:
            num_logprobs = self.top_logprobs or 0
        elif self.top_logprobs:
            message = f"top_logprobs needs logprobs: true, got top_logprobs={self.top_logprobs} without it"
            raise InvalidRequest(message, param="top_logprobs", code="invalid_value")
        try:
            more: dict[str, Any] = {}
            if (form := self.tool_use().form()) is not None:
                more["structured_outputs"] = form
            return self.sampling_params(max_tokens=limit, logprobs=num_logprobs, **more)
        except InvalidRequest as error:
            if error.param == "logprobs":  # the engine's field; the client's is called top_logprobs
                message = error.message.replace("logprobs", "top_logprobs", 1)
                raise InvalidRequest(message, param="top_logprobs", code=error.code) from None
            if error.param == "max_tokens" and self.max_completion_tokens is not None:
                message = error.message.replace("max_tokens", "max_completion_tokens", 1)
                raise InvalidRequest(message, param="max_completion_tokens", code=error.code) from None
            raise
