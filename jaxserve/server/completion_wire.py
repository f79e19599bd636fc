"""The body of ``/v1/completions``."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.generation_wire import GenerationRequest
from jaxserve.server.wire import CHAT_ONLY, UNSUPPORTED

DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompts = list[str] | list[list[int]]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)


def check_prompts(value: Any) -> Prompts:
    """One prompt or several, as text or token ids, always returned as a list of prompts.

    Raises:
        ValueError: says what a prompt must look like.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids >= 0, or a list of such lists")
    if not value:
        raise ValueError("must hold at least one prompt or token")
    if all(isinstance(prompt, str) for prompt in value):
        return list(value)
    if _is_ids(value):
        return [list(value)]
    if all(_is_ids(prompt) for prompt in value):
        return [list(prompt) for prompt in value]
    raise ValueError("must be a string, a list of strings, a list of token ids >= 0, or a list of such lists")


class CompletionRequest(GenerationRequest):
    """``prompt`` plus sampling fields. Choice ``i`` continues prompt ``i // n``. ``max_tokens`` defaults to 16."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {**UNSUPPORTED, **CHAT_ONLY}

    prompt: Any = Field(json_schema_extra={"type": ["string", "array"]})
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None  # False: the text is tokenized without an automatic BOS

    _check_prompt = field_validator("prompt")(check_prompts)

    @property
    def echo_logprobs(self) -> int | None:
        """Alternatives to report with each token of an echoed prompt; None: no echo, or no log-probabilities."""
        return self.logprobs if self.echo else None

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is to be generated. The engine makes one token all the same, which nobody sees."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self) -> SamplingParams:
        """The engine's parameters; ``max_tokens`` stays None where the client left it out.

        Raises:
            InvalidRequest: a value out of range.
        """
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens must be 1 or more, got 0; to look at the prompt alone send echo: true, too"
            raise InvalidRequest(message, param="max_tokens", code="invalid_value")
        more: dict[str, Any] = {"max_tokens": self.max_tokens, "logprobs": self.logprobs}
        if self.only_echoes:
            more |= {"max_tokens": 1, "min_tokens": 0}
        if self.echo_logprobs is not None:
            more["prompt_logprobs"] = max(self.echo_logprobs, self.prompt_logprobs or 0)
        return self.sampling_params(**more)
