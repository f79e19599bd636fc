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
from jaxserve.testing.lossless import Draws, check_lossless, examine_lossless
from jaxserve.testing.lossless_report import Comparison, Difference, Distribution, LosslessError, LosslessReport

if TYPE_CHECKING:
    from jaxserve.testing.race_fixture import race_check

__all__ = [
    "AlgorithmConformanceError",
    "AlgorithmReport",
    "Comparison",
    "ConformanceError",
    "ConformanceReport",
    "Difference",
    "Distribution",
    "Draws",
    "LosslessError",
    "LosslessReport",
    "Violation",
    "algorithm_conformance",
    "backend_conformance",
    "check_lossless",
    "examine_algorithm",
    "examine_backend",
    "examine_lossless",
    "race_check",
]


def __getattr__(name: str) -> Any:
    if name == "race_check":  # it needs pytest, which the command line does without
        from jaxserve.testing.race_fixture import race_check

        return race_check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
