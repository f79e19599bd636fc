"""The version of the installed package."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Version of the installed distribution, or ``"0+source"`` when run from a source tree that is not installed."""
    try:
        return metadata.version("jaxserve")
    except metadata.PackageNotFoundError:
        return "0+source"
