"""The test that proves the declaration of ``own_backend.py``; copy it beside a backend of your own."""

from own_backend import AuditedBackend

from jaxserve.testing import backend_conformance


def test_the_declaration_holds():
    backend_conformance(AuditedBackend)
