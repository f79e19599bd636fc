"""Tokenizers built from GGUF metadata."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import byte_alphabet

from jaxserve.core.errors import ModelLoadError
from jaxserve.text.gguf_tokenizer import tokenizer_from_gguf


def gpt2_metadata(pre: str = "gpt-2", words: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    """BYTE with merges for ``words`` (ASCII; a leading space is spelt ``Ġ``)."""
    tokens, merges = byte_alphabet(), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<s>", "</s>", "<tool>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }
    return {**base, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}


def pieces(pre: str, text: str, words: tuple[str, ...]) -> list[str]:
    tokenizer = tokenizer_from_gguf(gpt2_metadata(pre, words), "m.gguf")
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", " ", " 1"]),
        ("smollm", ["1", "2", "3", "4", " ", " ", "1"]),
        ("llama-bpe", ["123", "4", " ", " ", "1"]),
        ("qwen2", ["1", "2", "3", "4", " ", " ", "1"]),
        ("default", ["123", "4", " ", " ", "1"]),
    ],
)
def test_pre_tokenizer_kind_decides_about_digits(pre: str, expected: list[str]) -> None:
    assert pieces(pre, "1234  1", ("1234", "Ġ1")) == expected


def test_llama3_takes_whole_words_and_adds_bos() -> None:
    # ignore_merges: a word that is a token is taken as it is, though no merge leads to it.
    metadata = gpt2_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("hello")
    metadata["tokenizer.ggml.token_type"].append(1)
    tokenizer = tokenizer_from_gguf(metadata, "m.gguf")
    assert tokenizer.encode("hello") == [256, 259]
    assert tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_bos_token": False}, "m").encode("hello") == [259]
    assert tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2"}, "m").encode("hello") == list(b"hello")


def test_token_types_become_added_tokens() -> None:
    tokenizer = tokenizer_from_gguf(gpt2_metadata(), "m.gguf")
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.encode("a</s><tool>") == [97, 257, 258]
    assert tokenizer.decode([97, 257, 258]) == "a<tool>"


def test_unused_tokens_at_the_end_are_no_vocabulary() -> None:
    metadata = gpt2_metadata()
    metadata["tokenizer.ggml.tokens"] += ["[PAD0]", "[PAD1]"]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    assert tokenizer_from_gguf(metadata, "m.gguf").vocab_size == 259


def sentencepiece_metadata(**keys: Any) -> dict[str, Any]:
    words = ["▁", "h", "i", "t", "e", "r", "re", "▁t", "▁th", "▁the", "▁there", "▁h", "▁hi", "hi"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *words]
    base = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {**base, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}


def test_sentencepiece_merges_by_score() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(), "m.gguf")
    names = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hi there é")]
    assert names == ["<s>", "▁hi", "▁there", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hi there é")) == "hi there é"
    assert tokenizer.decode(tokenizer.encode("  hi")) == "  hi"
    bare = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False), "m.gguf")
    assert [bare.backend.id_to_token(i) for i in bare.encode("hi there")] == ["hi", "▁there"]
    assert bare.decode(bare.encode(" hi")) == " hi"


def test_sentencepiece_score_goes_before_order_in_the_vocabulary() -> None:
    metadata = sentencepiece_metadata(add_space_prefix=False, add_bos_token=False)
    letters = [(letter, 0.0) for letter in "abcxyz"]
    for token, score in (*letters, ("ab", -5.0), ("bc", -1.0), ("xy", -1.0), ("yz", -5.0)):
        metadata["tokenizer.ggml.tokens"].append(token)
        metadata["tokenizer.ggml.token_type"].append(1)
        metadata["tokenizer.ggml.scores"].append(score)
    tokenizer = tokenizer_from_gguf(metadata, "m.gguf")
    assert [tokenizer.token_text(i) for i in tokenizer.encode("abcxyz")] == ["a", "bc", "xy", "z"]


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        (gpt2_metadata("jina-v9"), "tokenizer.ggml.pre is 'jina-v9'"),
        (gpt2_metadata(pre=None), "tokenizer.ggml.pre is missing"),
        (gpt2_metadata(model="rwkv"), "'rwkv'"),
        (gpt2_metadata(model=None), "tokenizer.ggml.model is missing"),
        (gpt2_metadata(tokens=None), "tokenizer.ggml.tokens is missing"),
        (gpt2_metadata(token_type=[1]), "token_type has 1 entries"),
        (gpt2_metadata(merges=["q zzz"]), "tokenizer.ggml.merges do not fit"),
        (gpt2_metadata(bos_token_id=259), "tokenizer.ggml.bos_token_id is 259"),
        (gpt2_metadata(add_eos_token=True), "add_eos_token"),
        (gpt2_metadata(tokens=[*byte_alphabet(), "x", "y", "z"]), "'x' more than once"),
        (sentencepiece_metadata(scores=None), "tokenizer.ggml.scores is missing"),
        (sentencepiece_metadata(scores=[0.0]), "scores has 1 entries"),
    ],
)
def test_refusals_name_the_key(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=f"m.gguf: .*{named}"):
        tokenizer_from_gguf(metadata, "m.gguf")
