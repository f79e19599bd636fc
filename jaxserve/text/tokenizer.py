"""Text to token ids and back."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.core.errors import InvalidRequest, ModelLoadError
from jaxserve.text.token_decoder import TextStream, TokenDecoder

# Stands for "something precedes this text" when a middle piece of a text is encoded alone. Random, because a client
# who could write it would get a token id outside the vocabulary.
_JOINT = "\U0010fffe" + secrets.token_hex(16)


class Tokenizer:
    """A ``tokenizers.Tokenizer`` together with the roles of its special tokens. Immutable, safe to share.

    Attributes:
        backend: the wrapped ``tokenizers.Tokenizer``.
        bos_token_id / eos_token_id / pad_token_id: ids of the special tokens, or None.
        special_ids: ids of control tokens; left out of text by ``skip_special_tokens``.
        added_ids: text -> id of control tokens and of other tokens that no merges make.
        vocab_size: highest token id + 1.
        adds_bos: whether ``encode`` puts BOS in front.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        add_bos: bool | None = None,
        source: str = "tokenizer",
    ):
        """Wraps ``backend``, which must not be changed afterwards.

        Args:
            add_bos: True or False as configured; None leaves it to the backend's post-processor.
            source: file the tokenizer came from, for errors.

        Raises:
            ModelLoadError: a decoder that cannot be streamed, or a special id outside the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        for name, token_id in (("bos", bos_token_id), ("eos", eos_token_id), ("pad", pad_token_id)):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ModelLoadError(f"{source}: {name}_token_id is {token_id}, vocabulary size is {self.vocab_size}")
        if add_bos and bos_token_id is None:
            raise ModelLoadError(f"{source}: add_bos_token is true but there is no bos token")
        self.added_ids = {t.content: i for i, t in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.special_texts = frozenset(t.content for t in backend.get_added_tokens_decoder().values() if t.special)
        self._add_bos = add_bos
        self._decoder = TokenDecoder(backend, source)
        self._plain_backend: tokenizers.Tokenizer | None = None
        self._post_processor_adds_bos = (
            bos_token_id is not None and add_bos is not False and backend.encode("").ids[:1] == [bos_token_id]
        )
        self.adds_bos = self._post_processor_adds_bos or bool(add_bos)

    @classmethod
    def from_file(cls, path: str | Path, tokenizer_config: dict[str, Any] | None = None) -> Tokenizer:
        """Reads a ``tokenizer.json``; ``tokenizer_config`` is the content of ``tokenizer_config.json``.

        Raises:
            ModelLoadError: missing or broken file, or a special token that is not in the vocabulary.
        """
        config = tokenizer_config or {}
        path = Path(path)
        if not path.is_file():
            raise ModelLoadError(f"{path}: no such file; the model needs a tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{path}: not a readable tokenizer: {error}") from error
        ids: dict[str, int | None] = {}
        for role in ("bos", "eos", "pad"):
            token = config.get(f"{role}_token")
            text = token.get("content") if isinstance(token, dict) else token
            ids[role] = None if text is None else backend.token_to_id(text)
            if text is None:
                continue
            if ids[role] is None:
                raise ModelLoadError(f"{path}: {role}_token {text!r} of tokenizer_config.json is not in the vocabulary")
            # Being BOS, EOS or padding makes a token a control token, even where the file forgot to say so.
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
        add_bos = config.get("add_bos_token")
        return cls(
            backend,
            bos_token_id=ids["bos"],
            eos_token_id=ids["eos"],
            pad_token_id=ids["pad"],
            add_bos=add_bos if ids["bos"] is not None else None,
            source=str(path),
        )

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            add_special_tokens: add BOS (and whatever else) if the tokenizer is configured to. A text that already
                begins with BOS gets no second one.
            parse_special: turn the text of control tokens into control tokens; False encodes it like any other text.

        Raises:
            InvalidRequest: the text holds lone surrogates, which are not Unicode text.
        """
        _refuse_surrogates(text)
        backend = self.backend if parse_special else self._plain()
        ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens and self._add_bos is not False).ids
        if not add_special_tokens:
            return ids
        bos = [self.bos_token_id]
        if self._post_processor_adds_bos and ids[:2] == bos * 2:
            del ids[0]
        elif self._add_bos and self.bos_token_id is not None and ids[:1] != bos:
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_rendered(self, text: str, mark: str) -> list[int]:
        """Token ids of text in which control tokens marked by the character ``mark`` are to stay plain text.

        ``mark`` is put inside text that would otherwise be read as a control token; it is removed before encoding.
        Where no mark stands the ids equal ``encode(text, add_special_tokens=False)``.

        Raises:
            InvalidRequest: as ``encode``.
        """
        if mark not in text:
            return self.encode(text, add_special_tokens=False)
        _refuse_surrogates(text)
        encoding = self.backend.encode(text, add_special_tokens=False)
        controls = [i for i, token in enumerate(encoding.ids) if token in self.special_ids]
        spans = [encoding.offsets[i] for i in controls]
        ids: list[int] = []
        # Between two control tokens (or an end) lies a piece: characters start .. end, tokens first .. last.
        for i in range(len(controls) + 1):
            start, first = (spans[i - 1][1], controls[i - 1] + 1) if i > 0 else (0, 0)
            end, last = (spans[i][0], controls[i]) if i < len(controls) else (len(text), len(encoding.ids))
            piece = text[start:end]
            if mark in piece:
                ids += self._encode_plain(piece.replace(mark, ""), preceded=i > 0)
            else:
                ids += encoding.ids[first:last]
            ids += encoding.ids[last : last + 1]
        return ids

    def _encode_plain(self, piece: str, *, preceded: bool) -> list[int]:
        if not preceded:
            return self.encode(piece, add_special_tokens=False, parse_special=False)
        ids: list[int] = self._plain().encode(_JOINT + piece, add_special_tokens=False).ids
        return ids[1:]

    def _plain(self) -> tokenizers.Tokenizer:
        # A copy, because the switch belongs to the object and other threads may be encoding.
        if self._plain_backend is None:
            plain = tokenizers.Tokenizer.from_str(self.backend.to_str())
            plain.encode_special_tokens = True
            plain.add_tokens([tokenizers.AddedToken(_JOINT, normalized=False, special=False)])
            self._plain_backend = plain
        return self._plain_backend

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids outside the vocabulary give nothing. Equals the joined deltas of a streamed decode."""
        stream = self.open_stream()
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return "".join([stream.push(i) for i in ids if i not in skipped]) + stream.finish()

    def open_stream(self) -> TextStream:
        """A decode fed one token at a time (special tokens included as given)."""
        return self._decoder.open_stream()

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own; U+FFFD where it holds part of a character. Leading spaces are kept."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token; joined over an output they give its text. Empty outside the vocabulary."""
        return self._decoder.token_bytes(token_id)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text must be valid Unicode, got a lone surrogate at character {error.start}; send well-formed UTF-8",
            code="invalid_unicode",
        ) from None


def read_json(path: str | Path) -> dict[str, Any]:
    """Content of a JSON object file.

    Raises:
        ModelLoadError: missing, not JSON, or not an object; names the file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: wanted a JSON object, got {type(content).__name__}")
    return content
