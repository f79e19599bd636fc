"""The documents of a corpus file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.core.errors import ConfigError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def documents(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text) of each document; blank lines are no documents. Reads as it goes.

    Args:
        path: a ``.txt`` file with one document per line, or a ``.jsonl`` file with an object per line whose ``text`` is
            the document. UTF-8.

    Raises:
        ConfigError: no such file, another kind of file, or a line that is not what its kind says.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".txt", ".jsonl"):
        raise ConfigError(
            f"external corpus {path}: wanted a .txt file (a document per line) or a .jsonl file (an object with "
            f'"text" per line), got {kind or "no suffix"}'
        )
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if text.strip():
                    yield number, _document(text.rstrip(b"\r\n"), kind, f"{path}, line {number}")
    except OSError as error:
        raise ConfigError(f"external corpus {path} cannot be read: {error.strerror or error}") from error


def _document(line: bytes, kind: str, place: str) -> str:
    if kind == ".txt":
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: is not UTF-8: {error.reason} at byte {error.start}") from error
    import orjson  # only here: an engine without such a file does without it

    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place}: is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ConfigError(f'{place}: wanted an object with a string "text", got {line[:80].decode("utf-8", "replace")}')
    return record["text"]
