"""The pytest fixture of the race check: ``from jaxserve.testing import race_check`` in a test module or conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.barrier.race_check import RaceCheck


@pytest.fixture
def race_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[RaceCheck]:
    """Checks every access to shared rows made during the test; the test fails with a report at the first race.

    Engines made by the test (or by a fixture that asks for this one) check themselves after each step. Programs of
    engines made before are not built for the check: reads that only XLA sees are missed there.

    Yields:
        The check; ``check()`` fails at once instead of at the end of the test.
    """
    monkeypatch.setenv("JAXSERVE_RACE_CHECK", "1")
    check = RaceCheck()
    try:
        yield check
        check.check()
    finally:
        check.close()
