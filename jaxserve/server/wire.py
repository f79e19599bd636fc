"""What every request body has in common: strict types, no unknown fields, nothing ignored that would change the output.

A field of the OpenAI, vLLM or SGLang API that is not supported is refused by name unless its value asks for nothing
(``length_penalty: 1``). Fields that only label a request (``user``) are accepted and have no effect.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from jaxserve.core.errors import InvalidRequest

# field -> values that ask for nothing; null always does
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "documents": ([],),
    "function_call": ("none", "auto"),  # without functions these two ask for nothing
    "functions": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "mm_processor_kwargs": ({},),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

# what only completions have
COMPLETIONS_ONLY: dict[str, tuple[Any, ...]] = {"echo": (False,)}

# what only chat has
CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "parallel_tool_calls": (True, False),
    "separate_reasoning": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

HARMLESS = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


class WireModel(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(strict=True, extra="forbid")

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    harmless: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def known_fields(cls) -> list[str]:
        """Names a client may mean when it misspells one."""
        return [*cls.model_fields, *cls.unsupported, *cls.harmless]

    @classmethod
    def without_unsupported(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Drops fields that have no effect.

        Raises:
            InvalidRequest: a field that is not supported asks for something.
        """
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in cls.unsupported:
                # `True == 1` must not let `length_penalty: true` pass for 1
                asks_nothing = value is None or any(
                    value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
                    for neutral in cls.unsupported[name]
                )
                if not asks_nothing:
                    message = f"{name} is not supported; leave it out, got {name}={_brief(value)}"
                    raise InvalidRequest(message, param=name, code="unsupported_field")
            elif name not in cls.harmless:
                kept[name] = value  # unknown: the model refuses it by name
        return kept


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
