"""The tokenizer a GGUF file describes, from its metadata alone.

Pre-tokenizer expressions follow the public ``tokenizer.json`` files of the models each kind is named after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxserve.core.errors import ModelLoadError
from jaxserve.text.tokenizer import Tokenizer

# GGUF token types
_UNKNOWN, _CONTROL, _USER_DEFINED, UNUSED, _BYTE = 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(*expressions: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in expressions]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _pre_tokenizer(kind: str, source: str) -> pre_tokenizers.PreTokenizer:
    match kind:
        case "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b":
            return _digits_then_gpt2()
        case "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "llama-bpe" | "llama3" | "llama-v3":
            return _split(_LLAMA3)
        case "qwen2" | "deepseek-r1-qwen" | "stablelm2" | "hunyuan" | "megrez":
            return _split(_QWEN2)
        case "default":
            return _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
    raise ModelLoadError(
        f"{source}: tokenizer.ggml.pre is {kind!r}, which is not supported; supported: smollm, starcoder, refact, "
        "command-r, codeshell, exaone, gpt-2, olmo, llama-bpe, qwen2, stablelm2, default"
    )


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Builds the tokenizer from the ``tokenizer.ggml.*`` keys.

    Args:
        metadata: key -> value; arrays as lists.
        source: name of the file, for errors.

    Raises:
        ModelLoadError: a missing key, an unsupported tokenizer model or pre-tokenizer kind (named), lists of different
            lengths, or a special token id outside the vocabulary (the key is named).
    """
    tokens: list[str] = _required(metadata, "tokenizer.ggml.tokens", source)
    token_types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(token_types) != len(tokens):
        raise ModelLoadError(
            f"{source}: tokenizer.ggml.token_type has {len(token_types)} entries, tokenizer.ggml.tokens {len(tokens)}"
        )
    tokens = tokens[: num_used_tokens(token_types)]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelLoadError(f"{source}: tokenizer.ggml.tokens holds {twice!r} more than once")
    special = {role: _special_id(metadata, role, len(tokens), source) for role in ("bos", "eos", "padding", "unknown")}
    kind = _required(metadata, "tokenizer.ggml.model", source)
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, vocab, source)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata, tokens, vocab, special["unknown"], source), True
    else:
        raise ModelLoadError(f"{source}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    controls = {i for i, token_type in enumerate(token_types[: len(tokens)]) if token_type in (_UNKNOWN, _CONTROL)}
    controls |= {i for i in special.values() if i is not None}
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(controls)])
    backend.add_tokens(
        [
            AddedToken(tokens[i], special=False, normalized=False)
            for i, token_type in enumerate(token_types[: len(tokens)])
            if token_type == _USER_DEFINED and i not in controls
        ]
    )
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    if metadata.get("tokenizer.ggml.add_eos_token"):
        raise ModelLoadError(f"{source}: tokenizer.ggml.add_eos_token is true; a prompt cannot end with EOS")
    return Tokenizer(
        backend,
        bos_token_id=special["bos"],
        eos_token_id=special["eos"],
        pad_token_id=special["padding"],
        add_bos=add_bos and special["bos"] is not None,
        source=source,
    )


def num_used_tokens(token_types: list[int]) -> int:
    """Vocabulary size without the unused tokens that converters append to fill up padded embedding rows."""
    count = len(token_types)
    while count and token_types[count - 1] == UNUSED:
        count -= 1
    return count


def _required(metadata: Mapping[str, Any], key: str, source: str) -> Any:
    value = metadata.get(key)
    if value is None:
        raise ModelLoadError(f"{source}: metadata key {key} is missing; convert the model again with its tokenizer")
    return value


def _special_id(metadata: Mapping[str, Any], role: str, num_tokens: int, source: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token_id = metadata.get(key)
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise ModelLoadError(f"{source}: {key} is {token_id}, but the vocabulary has {num_tokens} tokens")
    return token_id


def _byte_level_bpe(
    metadata: Mapping[str, Any], vocab: dict[str, int], source: str
) -> tuple[tokenizers.Tokenizer, bool]:
    kind = _required(metadata, "tokenizer.ggml.pre", source)
    pre_tokenizer = _pre_tokenizer(kind, source)
    # A merge is "left right"; either part may itself begin with a space, hence the search from 1.
    merges = [(m[:cut], m[cut + 1 :]) for m in metadata.get("tokenizer.ggml.merges", ()) if (cut := m.find(" ", 1)) > 0]
    is_llama3 = kind in ("llama-bpe", "llama3", "llama-v3")
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{source}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend, is_llama3


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], vocab: dict[str, int], unknown_id: int | None, source: str
) -> tokenizers.Tokenizer:
    scores: list[float] = _required(metadata, "tokenizer.ggml.scores", source)
    if len(scores) < len(tokens):
        raise ModelLoadError(
            f"{source}: tokenizer.ggml.scores has {len(scores)} entries, tokenizer.ggml.tokens {len(tokens)}"
        )
    # Sentencepiece joins the neighbours whose union scores highest: every split of a token into two tokens is a merge,
    # ranked by the score of the union; equal scores prefer longer parts.
    ranked = [
        (score, len(token[:cut]), len(token[cut:]), token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=False)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    byte_fallback = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if not byte_fallback and unknown_id is None:
        raise ModelLoadError(f"{source}: neither all byte tokens nor tokenizer.ggml.unknown_token_id are given")
    model = models.BPE(
        vocab=vocab,
        merges=[(left, right) for *_, left, right in ranked],
        unk_token=None if unknown_id is None else tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_marks = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_marks]) if prefix else to_marks
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend
