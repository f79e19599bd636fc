"""What authors of models, backends and algorithms need to test theirs."""

from jaxserve.testing.algorithm_conformance import (
    AlgorithmConformanceError,
    AlgorithmReport,
    algorithm_conformance,
    examine_algorithm,
)
from jaxserve.testing.conformance import backend_conformance, examine_backend
from jaxserve.testing.conformance_report import ConformanceError, ConformanceReport, Violation

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
]
