"""The test that proves the contract of ``own_algorithm.py``; copy it beside an algorithm of your own."""

from own_algorithm import PromptLookup

from jaxserve.testing import algorithm_conformance


def test_the_algorithm_conforms():
    algorithm_conformance(PromptLookup)
