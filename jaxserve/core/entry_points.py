"""Classes that installed packages offer by name."""

from __future__ import annotations

from importlib.metadata import entry_points

from jaxserve.core.errors import ConfigError


def offered_class(group: str, name: str, base: type) -> type | None:
    """The class that some installed package offers as ``name`` in the entry point group; None if none does.

    Raises:
        ConfigError: it cannot be imported, or is no subclass of ``base``.
    """
    for found in entry_points(group=group, name=name):
        try:
            offered = found.load()
        except Exception as error:  # whatever the module raises
            raise ConfigError(f"{name!r} of the entry point group {group} cannot be loaded: {error}") from error
        if not (isinstance(offered, type) and issubclass(offered, base)):
            raise ConfigError(f"{name!r} of the entry point group {group} must be a {base.__name__}, got {offered!r}")
        return offered
    return None
