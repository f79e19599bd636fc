"""Token ids to text, one token at a time.

The rule "ids to text" is read from the tokenizer's own decoder, and both the streamed and the whole decode go through
the code below, so they cannot disagree. Two families exist among language models: byte-level (GPT-2 style, every token
is a run of bytes) and sentencepiece style (``▁`` marks a space, ``<0xNN>`` tokens stand for single bytes).
"""

from __future__ import annotations

import codecs
import json
import re
from functools import cache
from typing import Any

import tokenizers

from jaxserve.core.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"


@cache
def byte_of_char() -> dict[str, int]:
    """The GPT-2 alphabet: printable stand-in of each byte, as character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    chars = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    chars.update({chr(256 + i): b for i, b in enumerate(others)})
    return chars


class TokenDecoder:
    """What one tokenizer's decoder does to each token.

    Attributes:
        byte_level: True when tokens are bytes in the GPT-2 alphabet; False for sentencepiece style.
        replacements: (from, to) applied to each token's text (sentencepiece style only).
        byte_fallback: whether ``<0xNN>`` tokens are single bytes.
        num_stripped_spaces: most spaces removed from the start of the whole text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: str):
        """Reads the decoder of ``backend``; ``source`` names the tokenizer in errors.

        Raises:
            ModelLoadError: a decoder that cannot be streamed exactly.
        """
        self._backend = backend
        self._source = source
        self.byte_level = False
        self.byte_fallback = False
        self.replacements: list[tuple[str, str]] = []
        self.num_stripped_spaces = 0
        decoder = backend.decoder
        if decoder is None:
            raise ModelLoadError(f"{source}: the tokenizer has no decoder; jaxserve needs ByteLevel or Metaspace-style")
        spec: dict[str, Any] = json.loads(decoder.__getstate__())
        parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        fused = False
        for part in parts:
            fused = self._read_part(part, fused)
        if self.byte_level and len([p for p in parts if p["type"] != "Fuse"]) != 1:
            raise self._unsupported("ByteLevel combined with other decoders")
        # A few ids repeat endlessly in output, so pieces are kept once computed.
        self._pieces: dict[int, bytes | int | str] = {}

    def _read_part(self, part: dict[str, Any], fused: bool) -> bool:
        kind = part["type"]
        if kind == "ByteLevel":
            self.byte_level = True
        elif kind == "ByteFallback":
            self.byte_fallback = True
        elif kind == "Fuse":
            return True
        elif kind == "Replace" and "String" in part["pattern"]:
            self.replacements.append((part["pattern"]["String"], part["content"]))
        elif kind == "Metaspace":
            self.replacements.append((part["replacement"], " "))
            self.num_stripped_spaces = 0 if part.get("prepend_scheme") == "never" else 1
        elif kind == "Strip" and fused and part["content"] == " " and part["stop"] == 0:
            self.num_stripped_spaces = part["start"]
        else:
            raise self._unsupported(f"{kind} ({json.dumps(part)})")
        return fused

    def _unsupported(self, what: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self._source}: tokenizer decoder {what} is not supported; wanted ByteLevel, Metaspace, or a sequence of "
            "Replace, ByteFallback, Fuse and Strip of leading spaces"
        )

    def piece(self, token_id: int) -> bytes | int | str:
        """What a token contributes: bytes (byte-level), one byte as int (byte fallback), or text.

        Ids outside the vocabulary contribute nothing, as padded rows of an embedding have no text.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> bytes | int | str:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b"" if self.byte_level else ""
        if self.byte_level:
            alphabet = byte_of_char()
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            return token.encode()  # an added token, which is plain text
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match[1], 16)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, which may be part of a character; leading spaces are kept."""
        piece = self.piece(token_id)
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if isinstance(piece, str) else piece

    def open_stream(self) -> TextStream:
        """A decode that has seen no token yet."""
        return TextStream(self)


class TextStream:
    """One running decode. Constant work per token; text given out is never taken back.

    In sentencepiece style the ``tokenizers`` library turns a whole run of byte tokens into U+FFFD when any part of the
    run is broken, which would take back characters already streamed. Here only the broken bytes become U+FFFD (one per
    byte, as there).
    """

    def __init__(self, decoder: TokenDecoder):
        self._decoder = decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # bytes of an unfinished character (byte fallback only)
        self._spaces_left = decoder.num_stripped_spaces

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; may be empty."""
        piece = self._decoder.piece(token_id)
        if isinstance(piece, bytes):
            return self._utf8.decode(piece)
        if isinstance(piece, int):
            self._run.append(piece)
            return self._strip(self._take_run(final=False))
        return self._strip(self._take_run(final=True) + piece) if piece else ""

    def finish(self) -> str:
        """Text of an unfinished character at the end, as U+FFFD."""
        return self._utf8.decode(b"", final=True) + self._strip(self._take_run(final=True))

    def _take_run(self, *, final: bool) -> str:
        text = ""
        while self._run:
            try:
                text += self._run.decode()
                self._run.clear()
            except UnicodeDecodeError as error:
                text += self._run[: error.start].decode()
                del self._run[: error.start]
                if not final and error.reason == "unexpected end of data":
                    break
                text += REPLACEMENT
                del self._run[:1]
        return text

    def _strip(self, text: str) -> str:
        if not self._spaces_left or not text:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        cut = min(spaces, self._spaces_left)
        self._spaces_left = self._spaces_left - cut if cut == len(text) else 0
        return text[cut:]
