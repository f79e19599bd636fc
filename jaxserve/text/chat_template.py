"""Chat messages to prompt text and token ids, by the template the checkpoint brings.

Text a client sends can spell control tokens (``<|im_end|>``). Such text must not end a turn, so every string of the
messages is searched for control tokens before rendering, and each one found gets a private-use character put inside.
The template sees (nearly) the text as sent, the tokenizer finds control tokens only where the template wrote them, and
the mark is removed before the text is encoded. Messages without such text render and encode exactly as usual.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from jaxserve.core.errors import InvalidRequest
from jaxserve.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Message = Mapping[str, Any]
_PRIVATE_USE = range(0xE000, 0xF900)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks assistant text for training; here it just renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    bos_token: str = "",
    eos_token: str = "",
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Prompt text of a conversation.

    Args:
        template: jinja source, or None when the checkpoint has none.
        messages: dicts with ``role`` and ``content`` (text, or a list of ``{"type": "text", "text": ...}`` parts).
        variables: more names the template may use, e.g. ``enable_thinking``.

    Raises:
        InvalidRequest: no template, malformed messages, unsupported content, or an error raised by the template.
    """
    template = _required(template)
    checked = _checked_messages(messages, template)
    return _render(template, checked, add_generation_prompt, tools, bos_token, eos_token, variables)


def encode_chat(
    tokenizer: Tokenizer,
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """Token ids of a conversation, with control tokens only where the template put them.

    The template decides about BOS; where it writes none and the tokenizer adds BOS to text, one is added.

    Args:
        continue_final_message: leave out what the template writes behind the last message, so that the output goes on
            with it; ``add_generation_prompt`` must be false.

    Raises:
        InvalidRequest: as ``render_chat``; or tools, and a template that has no place for them.
    """
    template = _required(template)
    checked = _checked_messages(messages, template)
    if tools and not takes_tools(template):
        raise InvalidRequest(
            "this model's chat template has no place for tools, so the model would not see them; start the server with "
            "--chat-template FILE and a template that lists them, e.g. examples/chatml_tools.jinja",
            param="tools", code="template_without_tools",
        )  # fmt: skip
    mark = _unused_character(checked, tools, variables)
    guard = _Guard(sorted(tokenizer.special_texts, key=len, reverse=True), mark)
    bos_id = tokenizer.bos_token_id
    guarded = [guard.message(message) for message in checked]
    end = None
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt: false, got true",
                param="continue_final_message", code="invalid_value",
            )  # fmt: skip
        end = _unused_character(checked, tools, variables, mark)
        guarded[-1]["content"] += end
    text = _render(
        template,
        guarded,
        add_generation_prompt,
        guard.strings(tools),
        _text_of(tokenizer, bos_id),
        _text_of(tokenizer, tokenizer.eos_token_id),
        guard.strings(variables),
    )
    if end is not None:
        text, found, _ = text.rpartition(end)
        if not found:
            raise InvalidRequest(
                "the chat template leaves out the last message, so it cannot be continued", param="messages",
                code="chat_template_error",
            )  # fmt: skip
    ids = tokenizer.encode_rendered(text, mark)
    if tokenizer.adds_bos and bos_id is not None and ids[:1] != [bos_id]:
        ids.insert(0, bos_id)
    return ids


def _text_of(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.backend.id_to_token(token_id) or ""


class _Guard:
    """Puts the mark inside everything in client strings that a tokenizer could read as a control token."""

    def __init__(self, specials: list[str], mark: str):
        self._specials = specials
        self._mark = mark

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        # The role was checked against those the template knows; some templates build control tokens from it.
        return {key: value if key == "role" else self.strings(value) for key, value in message.items()}

    def strings(self, value: Any) -> Any:
        """``value`` with all strings inside it guarded."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self.strings(k): self.strings(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.strings(v) for v in value]
        return value

    def _text(self, text: str) -> str:
        for special in self._specials:
            if special in text:
                text = text.replace(special, special[:1] + self._mark + special[1:])
        # The template may write the other part of a control token right behind or in front of this text.
        if any(text.endswith(s[:n]) for s in self._specials for n in range(1, len(s))):
            text = text + self._mark
        if any(text.startswith(s[n:]) for s in self._specials for n in range(1, len(s))):
            text = self._mark + text
        return text


def _unused_character(*values: Any) -> str:
    """A private-use character that occurs nowhere in ``values``."""
    used = set(json.dumps(values, ensure_ascii=False, default=str))
    mark = next((c for c in map(chr, _PRIVATE_USE) if c not in used), None)
    if mark is None:
        raise InvalidRequest("messages use every private-use character there is; leave one out", param="messages")
    return mark


def _required(template: str | None) -> str:
    if template is None:
        raise InvalidRequest(
            "this model has no chat template, so messages cannot be turned into a prompt; use the completions API with "
            "a plain prompt, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    return template


def _checked_messages(messages: Any, template: str) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest(
            f"messages must be a non-empty list, got {messages!r}", param="messages", code="invalid_messages"
        )
    return [_checked_message(message, i, template) for i, message in enumerate(messages)]


def _checked_message(message: Any, index: int, template: str) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with role and content, got {message!r}", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not (role in ROLES or f"'{role}'" in template or f'"{role}"' in template):
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, or a role the chat template names, got {role!r}",
            param="messages",
            code="invalid_role",
        )
    checked = dict(message)
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise InvalidRequest(f"{where}.content is missing; wanted text", param="messages", code="invalid_content")
    checked["content"] = "" if content is None else _joined_content(content, where)
    return checked


def _joined_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(
            f"{where}.content must be text or a list of text parts, got {type(content).__name__}",
            param="messages",
            code="invalid_content",
        )
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(
                f"{where}.content[{i}] must be {{'type': 'text', 'text': ...}}, got {kind!r}; only text is supported",
                param="messages",
                code="unsupported_content",
            )
        texts.append(part["text"])
    return "".join(texts)


def _render(
    template: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    bos_token: str,
    eos_token: str,
    variables: Mapping[str, Any] | None,
) -> str:
    names = {
        **(variables or {}),
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        return _compiled(template).render(names)
    except InvalidRequest:
        raise
    except Exception as error:  # a template can raise anything: undefined names, None + text, raise_exception
        raise InvalidRequest(
            f"the chat template cannot render these messages: {error}", param="messages", code="chat_template_error"
        ) from error


def template_mistake(template: str) -> str | None:
    """What is wrong with the syntax of a template; None: nothing."""
    try:
        _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None


@lru_cache(maxsize=16)
def takes_tools(template: str) -> bool:
    """Whether a template does anything with the tools it is given."""
    try:
        return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(template))
    except jinja2.TemplateError:
        return True  # rendering will say what is wrong with it


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models have not been trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
