"""Looking for tags in text that is still growing."""

from __future__ import annotations

from collections.abc import Iterable


def held_length(text: str, tags: Iterable[str]) -> int:
    """Length of the end of ``text`` that may still turn into white space and a tag: what must not be shown yet."""
    partial = max((n for tag in tags for n in range(1, len(tag)) if text.endswith(tag[:n])), default=0)
    before = text[: len(text) - partial]
    return partial + len(before) - len(before.rstrip())
