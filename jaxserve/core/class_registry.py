"""Classes by name: built in, registered, or offered by an installed package."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from jaxserve.core.errors import ConfigError

T = TypeVar("T")


class ClassRegistry(Generic[T]):
    """What a flag may name.

    Args:
        what: what messages call a class of it, such as ``tool call parser``.
        flag: the flag that takes a name.
        group: entry point group in which installed packages offer classes.
        base: what offered classes must derive from.
        built_in: name -> class.
    """

    def __init__(self, what: str, flag: str, group: str, base: type[T], built_in: Mapping[str, type[T]]):
        self._what, self._flag, self._group, self._base = what, flag, group, base
        self._classes = dict(built_in)

    def register(self, name: str, found: type[T]) -> None:
        """Adds a class; the same one again is no mistake.

        Raises:
            ConfigError: the name is taken by another one.
        """
        if self._classes.get(name, found) is not found:
            raise ConfigError(f"the {self._what} {name!r} is registered already; choose another name")
        self._classes[name] = found

    def find(self, name: str) -> type[T]:
        """The class of that name.

        Raises:
            ConfigError: there is none (names those there are), or an offered one cannot be imported or is of another
                kind.
        """
        if name not in self._classes and (offered := self._offered(name)) is not None:
            self.register(name, offered)
        if name not in self._classes:
            known = ", ".join(sorted(self._classes))
            raise ConfigError(f"{self._flag} must be one of {known}, or a registered one, got {name!r}")
        return self._classes[name]

    def _offered(self, name: str) -> type[T] | None:
        group, base = self._group, self._base
        for found in entry_points(group=group, name=name):
            try:
                offered = found.load()
            except Exception as error:  # whatever the module raises
                raise ConfigError(f"{name!r} of the entry point group {group} cannot be loaded: {error}") from error
            if not (isinstance(offered, type) and issubclass(offered, base)):
                raise ConfigError(
                    f"{name!r} of the entry point group {group} must be a {base.__name__}, got {offered!r}"
                )
            return offered
        return None
