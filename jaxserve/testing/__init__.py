"""What authors of models, backends and algorithms need to test theirs."""

from typing import TYPE_CHECKING, Any

from jaxserve.testing.algorithm_conformance import (
    AlgorithmConformanceError,
    AlgorithmReport,
    algorithm_conformance,
    examine_algorithm,
)
from jaxserve.testing.conformance import backend_conformance, examine_backend
from jaxserve.testing.conformance_report import ConformanceError, ConformanceReport, Violation

if TYPE_CHECKING:
    from jaxserve.testing.race_fixture import race_check

__all__ = [
    "AlgorithmConformanceError",
    "AlgorithmReport",
    "ConformanceError",
    "ConformanceReport",
    "Violation",
    "algorithm_conformance",
    "backend_conformance",
    "examine_algorithm",
    "examine_backend",
    "race_check",
]


def __getattr__(name: str) -> Any:
    if name == "race_check":  # it needs pytest, which the command line does without
        from jaxserve.testing.race_fixture import race_check

        return race_check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
