"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.generation_wire import GenerationRequest

ROLES = ("system", "developer", "user", "assistant")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with plain string contents, ready for the chat template. ``developer`` becomes ``system``.

    Raises:
        ValueError: says what a list of messages must look like.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("must be a list with at least one message")
    return [_check_message(position, message) for position, message in enumerate(messages)]


def _check_message(position: int, message: Any) -> dict[str, Any]:
    where = f"[{position}]"
    if not isinstance(message, dict):
        raise ValueError(f'{where} must be an object like {{"role": "user", "content": "Hi"}}')
    role = message.get("role")
    if role not in ROLES:
        extra = " (tool messages are not supported)" if role in ("tool", "function") else ""
        raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}{extra}, not {role!r}")
    for name, value in message.items():
        if name in ("tool_calls", "function_call", "refusal", "audio", "reasoning_content") and not value:
            continue  # clients send back what they were sent, empty fields included
        if name == "name" and (value is None or isinstance(value, str)):
            continue
        if name not in ("role", "content"):
            raise ValueError(f"{where}.{name} is not supported; leave it out")
    checked = {"role": "system" if role == "developer" else role, "content": _text_of(where, message.get("content"))}
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


class ChatCompletionRequest(GenerationRequest):
    """``messages`` plus sampling fields. Without ``max_tokens`` the answer may fill the context."""

    messages: Any = Field(json_schema_extra={"type": "array", "items": {"type": "object"}})
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None

    _check_messages = field_validator("messages")(check_messages)

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
            return self.sampling_params(max_tokens=limit, logprobs=num_logprobs)
        except InvalidRequest as error:
            if error.param == "logprobs":  # the engine's field; the client's is called top_logprobs
                message = error.message.replace("logprobs", "top_logprobs", 1)
                raise InvalidRequest(message, param="top_logprobs", code=error.code) from None
            if error.param == "max_tokens" and self.max_completion_tokens is not None:
                message = error.message.replace("max_tokens", "max_completion_tokens", 1)
                raise InvalidRequest(message, param="max_completion_tokens", code=error.code) from None
            raise
