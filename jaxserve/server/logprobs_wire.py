"""Log-probabilities in the shapes of the two APIs.

Values are natural logs of the softmax of the model's raw logits, before temperature and filters. JSON has no
infinity, so nothing below ``FLOOR`` is written: -inf and NaN become -9999.0.

A token that is only part of a character is written ``bytes:\\xe4\\xb8`` instead of U+FFFD, so that different tokens
keep different names; the ``bytes`` field of the chat API is exact in any case.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxserve.core.request import CompletionOutput, TokenLogprob
from jaxserve.server.engine_protocol import TokenizerLike

FLOOR = -9999.0


def finite(logprob: float) -> float:
    """The value, or ``FLOOR`` where JSON has no number for it."""
    return logprob if logprob >= FLOOR else FLOOR  # a comparison with NaN is false


def token_name(tokenizer: TokenizerLike, token_id: int) -> tuple[str, bytes]:
    """How a token is written in JSON, and its bytes."""
    raw = tokenizer.token_bytes(token_id)
    if not raw:
        text = tokenizer.token_text(token_id)
        return text, text.encode("utf-8", "replace")
    try:
        return raw.decode("utf-8"), raw
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _chat_entry(tokenizer: TokenizerLike, token_id: int, logprob: float) -> dict[str, Any]:
    name, raw = token_name(tokenizer, token_id)
    return {"token": name, "logprob": finite(logprob), "bytes": list(raw)}


def chat_logprobs(tokenizer: TokenizerLike, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``choice.logprobs`` of the chat API: one entry per token."""
    content = []
    for one in logprobs:
        entry = _chat_entry(tokenizer, one.token_id, one.logprob)
        entry["top_logprobs"] = [_chat_entry(tokenizer, token_id, logprob) for token_id, logprob in one.top]
        content.append(entry)
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``choice.logprobs`` of the completions API for one output, chunk after chunk.

    ``text_offset`` counts the characters of the output before each token; a stream goes on counting. A token inside a
    character has the offset of that character.
    """

    def __init__(self, tokenizer: TokenizerLike, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def take_prompt(
        self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob | None], num_top: int
    ) -> dict[str, Any]:
        """The shape for the tokens of an echoed prompt, the first of which has no log-probability."""
        known = [one and dataclasses.replace(one, top=one.top[:num_top]) for one in logprobs]
        shape = self.take([one or TokenLogprob(token, 0.0) for token, one in zip(prompt, known, strict=True)])
        for place, one in enumerate(known):
            if one is None:
                shape["token_logprobs"][place] = shape["top_logprobs"][place] = None
        return shape

    def take(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The shape for the next tokens of the output."""
        tokens: list[str] = []
        top_logprobs: list[dict[str, float]] = []
        text_offset: list[int] = []
        for one in logprobs:
            name, raw = token_name(self._tokenizer, one.token_id)
            tokens.append(name)
            text_offset.append(self._num_characters)
            if one.token_id not in self._skipped:
                self._num_characters += len(self._decoder.decode(raw))
            top = {name: finite(one.logprob)} if one.top else {}
            for token_id, logprob in one.top:
                top.setdefault(token_name(self._tokenizer, token_id)[0], finite(logprob))
            top_logprobs.append(dict(sorted(top.items(), key=lambda item: -item[1])))
        return {
            "tokens": tokens,
            "token_logprobs": [finite(one.logprob) for one in logprobs],
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two parts of ``choice.logprobs`` of the completions API as one."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(
    tokenizer: TokenizerLike, logprobs: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[str, Any] | None]:
    """``prompt_logprobs`` in vLLM's shape: for each prompt token a map of token ids, its own and the likeliest."""
    entries: list[dict[str, Any] | None] = []
    for one in logprobs:
        if one is None:
            entries.append(None)
            continue
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(one.top[:num_top], 1)]
        by_id: dict[str, Any] = {str(one.token_id): _vllm_entry(tokenizer, one.token_id, one.logprob, one.rank)}
        for token, value, rank in ranked:
            by_id.setdefault(str(token), _vllm_entry(tokenizer, token, value, rank))
        entries.append(by_id)
    return entries


def _vllm_entry(tokenizer: TokenizerLike, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_name(tokenizer, token_id)[0]}


def sglang_logprobs(
    tokenizer: TokenizerLike, output: CompletionOutput, prompt: Sequence[int], with_text: bool
) -> dict[str, Any]:
    """``meta_info`` in SGLang's shape: ``[logprob, id, text or null]`` of each token, and of the likeliest ones.

    Those of the prompt, if they were asked for, are told with output 0.
    """

    def entry(token_id: int, logprob: float | None) -> list[Any]:
        text = token_name(tokenizer, token_id)[0] if with_text else None
        return [None if logprob is None else finite(logprob), token_id, text]

    def tops(one: TokenLogprob | None) -> list[Any] | None:
        return [entry(token_id, value) for token_id, value in one.top] if one is not None and one.top else None

    shape: dict[str, Any] = {
        "output_token_logprobs": [entry(one.token_id, one.logprob) for one in output.logprobs or ()],
        "output_top_logprobs": [tops(one) for one in output.logprobs or ()],
    }
    if output.prompt_logprobs is not None:
        known = zip(prompt, output.prompt_logprobs, strict=True)
        shape["input_token_logprobs"] = [entry(token, None if one is None else one.logprob) for token, one in known]
        shape["input_top_logprobs"] = [tops(one) for one in output.prompt_logprobs]
    return shape
