"""How one request wants its tokens chosen, and when it wants to stop."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.core.errors import InvalidRequest
from jaxserve.core.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20  # most alternatives reported per token (the OpenAI limit)
MAX_N = 128  # most sequences one request may ask for
MAX_SEED = 2**63 - 1
MAX_LOGIT_BIAS = 300  # most entries of one request's logit_bias (the OpenAI limit)
MAX_BAD_WORDS = 300  # each is looked for behind every token
MAX_BIAS = 100.0  # largest bias, either way
MAX_HELD_STOP_IDS = 64  # most ids, the model's own included, that min_tokens can hold back
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0


def _reject(field: str, wanted: str, got: object) -> InvalidRequest:
    return InvalidRequest(f"{field} must be {wanted}, got {got!r}", param=field, code="invalid_value")


def _check_number(field: str, value: object, low: float, high: float, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _reject(field, wanted, value)
    if not low <= value <= high:
        raise _reject(field, wanted, value)


def _check_int(field: str, value: object, low: int, high: int | None, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise _reject(field, wanted, value)


def _checked_bias(value: object) -> tuple[tuple[int, float], ...]:
    """``logit_bias`` as pairs, from a mapping (JSON's keys are strings) or from pairs."""
    if value is None:
        return ()
    wanted = f"a map of at most {MAX_LOGIT_BIAS} token ids to numbers in [-{MAX_BIAS:.0f}, {MAX_BIAS:.0f}]"
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)):
        raise _reject("logit_bias", wanted, value)
    if len(pairs) > MAX_LOGIT_BIAS:
        raise _reject("logit_bias", wanted, f"{len(pairs)} entries")
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise _reject("logit_bias", wanted, pair)
        token, bias = pair
        if isinstance(token, str) and token.isascii() and token.isdigit():
            token = int(token)
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise _reject("logit_bias", wanted, f"the token id {token!r}")
        if token in found:
            raise _reject("logit_bias", wanted, f"the token id {token} twice")
        _check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS, wanted)
        found[token] = float(bias)
    return tuple(found.items())


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping parameters of one request. Values are checked on construction.

    Attributes:
        max_tokens: most tokens to generate; None means up to the context length. At least 1.
        temperature: 0 is greedy; anything else divides the logits.
        top_p: keep the smallest set of tokens whose probability reaches this; 0 keeps the most likely one.
        top_k: keep the k most likely tokens (ties with the k-th are all kept); 0 or -1 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the most likely one.
        seed: makes sampling repeatable whatever else runs in the batch; 0 .. 2**63-1. None draws a fresh one.
        n: number of independent outputs; output i of a seeded request uses a seed derived from (seed, i).
        stop: strings that end the output; the text before the first match is returned.
        stop_token_ids: token ids that end the output, besides the model's own end-of-sequence ids.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        min_tokens: no stop id, end-of-sequence id or stop string ends the output before it has this many tokens; such
            ids cannot be chosen until then.
        frequency_penalty: lowers a token's logit by this for every time it stands in the output; -2 .. 2.
        presence_penalty: lowers it by this once, if it stands in the output at all; -2 .. 2.
        repetition_penalty: divides the logits of tokens that stand in prompt or output if they are positive, multiplies
            them if negative; 0.01 .. 10, 1 changes nothing.
        logit_bias: (token id, -100 .. 100) pairs, or a mapping: added to these tokens' logits. At most 300.
        allowed_token_ids: the only ids the output may hold; None allows all. An end-of-sequence id has to be among them
            to be chosen.
        bad_words: strings that the output may not hold, as the tokenizer writes them at the start of a text and behind
            a space; other ways to spell them with tokens are not found. At most 300.
        logprobs: number of alternatives reported per output token (0 .. 20); None reports nothing. The values are
            log-softmax of the model's raw logits, before temperature and filters.
        prompt_logprobs: the same for prompt tokens, the first of which has none; None reports nothing.
        pooling: ``last`` or ``mean``: also report the prompt's final hidden states, pooled (what ``/v1/embeddings`` is
            made of); None reports nothing.
        structured_outputs: the form the output must have, see ``StructuredOutputs``; a mapping of its fields will do.
            Such an output ends at an end-of-sequence id whatever ``ignore_eos`` says.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_ids: special tokens that stay in the text all the same, for whoever parses it.
        include_stop_str_in_output: keep the matched stop string at the end of the text.

    Raises:
        InvalidRequest: a value out of range or of the wrong type; ``param`` names it.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: str | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    shown_special_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.stop is None:
            object.__setattr__(self, "stop", ())
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", ())
        if not isinstance(self.stop, (list, tuple)) or not all(isinstance(s, str) for s in self.stop):
            raise _reject("stop", "a string or a list of strings", self.stop)
        if any(not s for s in self.stop):
            raise _reject("stop", "non-empty strings", self.stop)
        object.__setattr__(self, "stop", tuple(self.stop))
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise _reject("stop_token_ids", "a list of token ids", self.stop_token_ids)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, None, "a list of token ids >= 0")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None, "an integer >= 1")
        _check_number("temperature", self.temperature, 0.0, math.inf, "a finite number >= 0")
        _check_number("top_p", self.top_p, 0.0, 1.0, "a number in [0, 1]")
        _check_number("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        _check_int("top_k", self.top_k, -1, 2**31 - 1, "an integer >= -1 (0 and -1 keep all tokens)")
        most = 2**30 if self.max_tokens is None else self.max_tokens
        _check_int("min_tokens", self.min_tokens, 0, most, f"an integer in [0, {most}], max_tokens at most")
        for field in ("frequency_penalty", "presence_penalty"):
            _check_number(field, getattr(self, field), -2.0, 2.0, "a number in [-2, 2]")
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _check_number("repetition_penalty", self.repetition_penalty, low, high, f"a number in [{low}, {high:g}]")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        self._check_limits()
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED, "an integer in [0, 2**63-1]")
        _check_int("n", self.n, 1, MAX_N, f"an integer in [1, {MAX_N}]")
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), 0, MAX_LOGPROBS, f"an integer in [0, {MAX_LOGPROBS}]")
        if self.pooling not in (None, "last", "mean"):
            raise _reject("pooling", "last or mean", self.pooling)
        if self.pooling is not None and self.prompt_logprobs is not None:
            raise _reject("prompt_logprobs", "left out with pooling", self.prompt_logprobs)
        for field in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, field), bool):
                raise _reject(field, "true or false", getattr(self, field))

    def _check_limits(self) -> None:
        if self.allowed_token_ids is not None:
            wanted = "a non-empty list of token ids >= 0"
            if not isinstance(self.allowed_token_ids, (list, tuple)) or not self.allowed_token_ids:
                raise _reject("allowed_token_ids", wanted, self.allowed_token_ids)
            for token in self.allowed_token_ids:
                _check_int("allowed_token_ids", token, 0, None, wanted)
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        words = () if self.bad_words is None else self.bad_words
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) and word.strip() for word in words):
            raise _reject("bad_words", "a list of strings that are not blank", self.bad_words)
        if len(words) > MAX_BAD_WORDS:
            raise _reject("bad_words", f"a list of at most {MAX_BAD_WORDS} strings", f"{len(words)} of them")
        object.__setattr__(self, "bad_words", tuple(words))

    @property
    def limits_tokens(self) -> bool:
        """Whether some tokens may not be chosen whatever came before, or behind some others."""
        return self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def reads_prompt(self) -> bool:
        """Whether every prompt token has to be computed for this request, so that nothing cached can stand for it."""
        return self.prompt_logprobs is not None or self.pooling is not None

    @property
    def has_penalties(self) -> bool:
        """Whether tokens' logits depend on how often they occurred."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @functools.cached_property
    def takes_likeliest(self) -> bool:
        """Whether every token is the likeliest by the model's own logits, and nothing is told of others; masks aside.

        Remembered: it is asked for every row of every step.
        """
        asks = self.logprobs is not None or self.has_penalties or self.logit_bias or self.min_tokens
        return self.greedy and not asks

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax, so that no random number is drawn."""
        return self.temperature == 0.0
