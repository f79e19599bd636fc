"""What authors of models, backends and algorithms need to test theirs."""

from jaxserve.testing.conformance import backend_conformance, examine_backend
from jaxserve.testing.conformance_report import ConformanceError, ConformanceReport, Violation

__all__ = ["ConformanceError", "ConformanceReport", "Violation", "backend_conformance", "examine_backend"]
