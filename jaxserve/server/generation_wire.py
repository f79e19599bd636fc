"""Fields that chat and text completions share: sampling, stopping, streaming."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from pydantic import Field, field_validator
from pydantic.config import JsonDict

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.sampling_params import MAX_N, SamplingParams
from jaxserve.core.structured_outputs import StructuredOutputs
from jaxserve.server.structure_wire import GUIDED, structured_outputs
from jaxserve.server.wire import HARMLESS, UNSUPPORTED, WireModel

# fields that go to SamplingParams under the same name
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)

_FORMS = ("response_format", "structured_outputs", *GUIDED)
SCHEDULING = ("priority", "cache_salt")
_OBJECT: JsonDict = {"type": ["object", "null"]}


def scheduling_of(body: WireModel) -> dict[str, Any]:
    """Keyword arguments of ``EngineLike.generate``: those that were sent."""
    return {name: value for name in SCHEDULING if (value := getattr(body, name)) is not None}


class StreamOptions(WireModel):
    """``include_usage``: one last chunk with the usage; ``continuous_usage_stats``: usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted, no effect: chunks are never padded


class GenerationRequest(WireModel):
    """Common part of ``/v1/chat/completions`` and ``/v1/completions``. A null field counts as absent."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED
    harmless: ClassVar[tuple[str, ...]] = HARMLESS

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1)
    n: int | None = None
    best_of: int | None = None
    stop: Any = Field(None, json_schema_extra={"type": ["string", "array", "null"], "items": {"type": "string"}})
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    response_format: Any = Field(None, json_schema_extra=_OBJECT)
    structured_outputs: Any = Field(None, json_schema_extra=_OBJECT)
    guided_json: Any = Field(None, json_schema_extra={"type": ["object", "string", "null"]})
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    rid: str | None = None  # what /abort_request may call it
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise ValueError("must be a non-empty string or a list of them")
        return tuple(strings)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def form(self) -> StructuredOutputs | None:
        """The form it wants of the output. Raises InvalidRequest."""
        return structured_outputs({name: getattr(self, name) for name in _FORMS})

    def sampling_params(self, **more: Any) -> SamplingParams:
        """The engine's parameters; fields left out or null take the defaults of ``SamplingParams``.

        Raises:
            InvalidRequest: a value out of range, or fields that contradict each other.
        """
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        given["structured_outputs"] = self.form()
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs are not part of a stream; leave one of them out, or send echo with logprobs"
            raise InvalidRequest(message, param="prompt_logprobs", code="invalid_value")
        params = SamplingParams(**(given | more))
        return params if self.best_of is None else self._with_best_of(params)

    def _with_best_of(self, params: SamplingParams) -> SamplingParams:
        """As many outputs as ``best_of`` says, with the log-probabilities they are compared by."""
        assert self.best_of is not None
        if self.best_of < params.n:
            message = f"best_of must be n ({params.n}) at least, got {self.best_of}"
            raise InvalidRequest(message, param="best_of", code="invalid_value")
        if self.best_of > MAX_N:
            message = f"best_of must be {MAX_N} at most, got {self.best_of}"
            raise InvalidRequest(message, param="best_of", code="invalid_value")
        if self.best_of == params.n:
            return params
        if self.stream:
            message = "best_of compares whole outputs, so it cannot be streamed; leave one of them out"
            raise InvalidRequest(message, param="best_of", code="invalid_value")
        logprobs = 0 if params.logprobs is None else params.logprobs
        return dataclasses.replace(params, n=self.best_of, logprobs=logprobs)

    @property
    def num_returned(self) -> int:
        """Outputs that the client gets of each prompt."""
        return 1 if self.n is None else self.n
