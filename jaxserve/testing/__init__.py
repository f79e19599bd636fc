"""What authors of models, backends and algorithms need to test theirs."""

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
]
