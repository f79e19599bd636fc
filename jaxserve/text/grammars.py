"""Grammars that outputs must follow, by llguidance."""

from __future__ import annotations

import collections
import json
import logging
import threading
from typing import Any

import numpy as np

from jaxserve.core.errors import ConfigError, InvalidRequest
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.structured_outputs import StrictCalls, StructuredOutputs
from jaxserve.core.token_constraint import TokenConstraint
from jaxserve.text.token_limits import TokenLimits, bad_sequences
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tool_calls.registry import tool_call_parser
from jaxserve.text.tool_calls.strict import CallGrammar

log = logging.getLogger(__name__)

MOST_COMPILED = 64  # grammars that are kept


class GrammarConstraint(TokenConstraint):
    """Follows one output with an ``llguidance.LLMatcher``."""

    def __init__(self, matcher: Any, eos_token_ids: tuple[int, ...]):
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def fill_mask(self, words: np.ndarray) -> None:
        if not words.flags.c_contiguous or words.dtype != np.uint32:
            raise ValueError(f"wanted contiguous uint32 words, got {words.dtype} with strides {words.strides}")
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():  # some limit of the parser, met on the way
            self.error = self._matcher.get_error()
            words[:] = 0
            for token in self._eos_token_ids:
                words[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiles what requests ask for, and keeps it for the next one. Safe to share between threads.

    Args:
        tokenizer: of the model.
        vocab_size: ids of the model, those without a token included.
        eos_token_ids: ids that end an output; a grammar allows them where it may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokens: Any = None  # llguidance's own view of the vocabulary, made when it is first needed
        self._compiled: collections.OrderedDict[StructuredOutputs, Any] = collections.OrderedDict()

    def check(self, wanted: StructuredOutputs) -> None:
        """Compiles a grammar, which may take a second if it is large.

        Raises:
            InvalidRequest: the schema, expression or grammar is not sound, or nothing satisfies it.
            ConfigError: llguidance is not installed, or cannot read the model's tokenizer.
        """
        self._matcher(wanted)

    def start(self, wanted: StructuredOutputs) -> GrammarConstraint:
        """The constraint of a new output. Raises as ``check``."""
        return GrammarConstraint(self._matcher(wanted).deep_copy(), self._eos_token_ids)

    def limited(self, params: SamplingParams, inner: TokenConstraint | None) -> TokenLimits:
        """``inner``, if there is one, together with the tokens and words that ``params`` forbid."""
        bad = bad_sequences(self._tokenizer, params.bad_words)
        return TokenLimits(params.allowed_token_ids, bad, self._eos_token_ids, self._vocab_size, inner)

    def _matcher(self, wanted: StructuredOutputs) -> Any:
        with self._lock:
            matcher = self._compiled.get(wanted)
            if matcher is not None:
                self._compiled.move_to_end(wanted)
                return matcher
            llguidance = _library()
            if self._tokens is None:
                self._tokens = self._vocabulary(llguidance)
        source = _source(llguidance, wanted) if wanted.calls is None else self._of_calls(wanted.calls)
        matcher = llguidance.LLMatcher(self._tokens, source, log_level=0)
        if matcher.is_error():
            raise _unsound(wanted, matcher.get_error())
        with self._lock:
            self._compiled[wanted] = matcher
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _of_calls(self, calls: StrictCalls) -> str:
        grammar = CallGrammar(json.loads(calls.functions), self._tokenizer.added_ids, self._eos_token_ids)
        return f"%llguidance {{}}\n{tool_call_parser(calls.notation).strict_rules(grammar)}"

    def _vocabulary(self, llguidance: Any) -> Any:
        if not self._eos_token_ids:
            raise ConfigError(
                "the model names no end-of-sequence token, so no grammar could end; set it in config.json"
            )
        text = self._tokenizer.backend.to_str()
        try:
            return llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids))
        except Exception as error:
            raise ConfigError(f"llguidance cannot read this model's tokenizer: {error}") from error


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(f"structured outputs need llguidance (pip install llguidance): {error}") from error
    return llguidance


def _source(llguidance: Any, wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's own form."""
    make = llguidance.LLMatcher
    if wanted.json_object:
        return make.grammar_from_json_schema('{"type": "object"}')
    if wanted.json is not None:
        return make.grammar_from_json_schema(wanted.json)
    if wanted.regex is not None:
        return make.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        alternatives = " | ".join(json.dumps(each, ensure_ascii=False) for each in wanted.choice)
        return make.grammar_from_lark(f"start: {alternatives}")
    from llguidance.gbnf_to_lark import any_to_lark

    assert wanted.grammar is not None
    try:
        return make.grammar_from_lark(any_to_lark(wanted.grammar))
    except Exception as error:  # a parser's: of several kinds
        raise _unsound(wanted, str(error)) from error


def _unsound(wanted: StructuredOutputs, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{wanted.param} cannot be followed: {' '.join(why.split())}", param=wanted.param, code="invalid_grammar"
    )
