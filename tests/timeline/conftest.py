"""A tiny engine recorded behind the fine and the coarse fence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorded import Recorded, record
from tiny import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TINY."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def recorded(tiny: Path) -> Iterator[Callable[..., Recorded]]:
    """``recorded(**settings)``: a run with these engine settings, recorded once for the same ones."""
    made: dict[tuple, Recorded] = {}

    def run(**settings: object) -> Recorded:
        key = tuple(sorted(settings.items()))
        if key not in made:
            made[key] = record(tiny, **settings)
        return made[key]

    yield run
