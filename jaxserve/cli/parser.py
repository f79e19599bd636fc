"""An argument parser whose errors name the flag that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxserve.core.errors import ConfigError

TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class Parser(argparse.ArgumentParser):
    """Flags must be written in full: an abbreviation changes its meaning when a flag is added.

    Args:
        rest: name of the attribute that takes what stands behind ``--``; None: nothing may stand there.
    """

    def __init__(self, *, rest: str | None = None, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self._rest = rest

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does, without what belongs to somebody else."""
        if self._rest is None or args is None:
            return super().parse_known_args(args, namespace)
        given = list(args)
        place = given.index("--") if "--" in given else len(given)
        parsed, unknown = super().parse_known_args(given[:place], namespace)
        setattr(parsed, self._rest, tuple(given[place + 1 :]))
        return parsed, unknown

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses all arguments; exits with 2 and a suggestion on an unknown one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            owner = getattr(parsed, "parser", self)
            hints = [owner.hint(argument) for argument in unknown if argument.startswith("-")]
            owner.error(f"unknown argument: {' '.join(unknown)}{''.join(hints)}")
        return parsed

    def hint(self, flag: str) -> str:
        """``; did you mean --x?`` when a flag of that name is near."""
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        close = difflib.get_close_matches(flag.split("=")[0], known, n=1)
        return f"; did you mean {close[0]}?" if close else ""

    def error(self, message: str) -> NoReturn:
        """One line, without the screenful of usage."""
        self.exit(2, f"{self.prog}: error: {message}\n(see {self.prog} --help)\n")


def env_flag(name: str) -> bool:
    """A yes/no environment variable; unset means no.

    Raises:
        ConfigError: a value that is neither.
    """
    value = os.environ.get(name, "").strip().lower()
    if value in TRUE:
        return True
    if value in FALSE:
        return False
    raise ConfigError(f"{name} must be 1 or 0, got {value!r}")


def int_list(text: str) -> tuple[int, ...]:
    """``1,2,4`` or ``1 2 4`` as integers; an argparse ``type``."""
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted integers like 1,2,4, got {text!r}") from None
