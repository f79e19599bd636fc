"""Speculative algorithms by name."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from importlib.metadata import entry_points

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.speculative.base import AlgorithmContext, SpeculativeAlgorithm, refuse_draft_model_settings
from jaxserve.speculative.dflash import DflashAlgorithm
from jaxserve.speculative.eagle import Eagle3Algorithm, EagleAlgorithm
from jaxserve.speculative.multi_layer_eagle import MultiLayerEagleAlgorithm
from jaxserve.speculative.ngram import NgramAlgorithm
from jaxserve.speculative.standalone import StandaloneAlgorithm

ENTRY_POINTS = "jaxserve.speculative_algorithms"
_BUILT_IN: dict[str, type[SpeculativeAlgorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        NgramAlgorithm, EagleAlgorithm, Eagle3Algorithm, StandaloneAlgorithm, MultiLayerEagleAlgorithm, DflashAlgorithm,
    )
}  # fmt: skip
_BUILT_IN["NEXTN"] = MultiLayerEagleAlgorithm  # what other engines call it
_RESERVED = ("NONE",)  # what users of other engines would take for no algorithm
_registered: dict[str, type[SpeculativeAlgorithm]] = {}
_numbers = itertools.count(1)
_OLD_GATE = "is_last_shared_read_phase"


def register_speculative_algorithm(name: str, algorithm: type[SpeculativeAlgorithm]) -> None:
    """Makes an algorithm selectable by ``--speculative-algorithm NAME`` (upper and lower case mean the same).

    Raises:
        ConfigError: the name is taken or reserved; the class is no ``SpeculativeAlgorithm``, lacks a method, or still
            defines ``is_last_shared_read_phase``.
    """
    key = name.upper()
    if not name or not name.isascii() or not name.replace("-", "_").replace("_", "a").isalnum():
        raise ConfigError(f"a speculative algorithm's name is letters, digits, - and _, got {name!r}")
    if key in _BUILT_IN or key in _RESERVED:
        raise ConfigError(f"speculative algorithm name {name!r} is reserved for a built-in one; choose another name")
    if key in _registered:
        raise ConfigError(f"speculative algorithm {name!r} is already registered; choose another name")
    if not (isinstance(algorithm, type) and issubclass(algorithm, SpeculativeAlgorithm)):
        raise ConfigError(
            f"speculative algorithm {name!r} must be a subclass of SpeculativeAlgorithm, got {algorithm!r}"
        )
    if hasattr(algorithm, _OLD_GATE):
        raise ConfigError(
            f"speculative algorithm {name!r} defines {_OLD_GATE}, which nobody asks any more: the attention backend "
            "says where reads end, and the worker's last_shared_read_runner says whose event counts; return a worker "
            "that overrides last_shared_read_runner from make_worker() and delete the method"
        )
    if inspect.isabstract(algorithm):
        missing = ", ".join(f"{method}()" for method in sorted(algorithm.__abstractmethods__))
        raise ConfigError(f"speculative algorithm {name!r} must define {missing}")
    _registered[key] = algorithm


@contextlib.contextmanager
def temporarily_registered(algorithm: type[SpeculativeAlgorithm]) -> Iterator[str]:
    """Registers a class for as long as the context lives; yields the name it goes by.

    Raises:
        ConfigError: it is no algorithm.
    """
    name = f"{getattr(algorithm, '__name__', 'class').strip('_')}-{next(_numbers)}"
    register_speculative_algorithm(name, algorithm)
    try:
        yield name
    finally:
        del _registered[name.upper()]


def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name.upper() not in _registered:
            register_speculative_algorithm(entry.name, entry.load())


def speculative_algorithm_names() -> list[str]:
    """Every name ``--speculative-algorithm`` takes."""
    _load_entry_points()
    return [*_BUILT_IN, *_registered]


def find_algorithm(name: str) -> type[SpeculativeAlgorithm]:
    """The class of a name. Raises ConfigError for one that is unknown, or reserved and not built yet."""
    _load_entry_points()
    key = name.upper()
    found = _BUILT_IN.get(key) or _registered.get(key)
    if found is None:
        known = ", ".join(speculative_algorithm_names())
        why = "is not available in this version" if key in _RESERVED else "is unknown"
        raise ConfigError(f"speculative algorithm {name!r} {why}; there are {known}")
    return found


def settled(config: EngineConfig) -> EngineConfig:
    """The settings with what was left to the speculative algorithm filled in; the same without one.

    Raises:
        ConfigError: an unknown name, or settings the algorithm cannot work with.
    """
    name = config.speculative_algorithm
    if name is None:
        refuse_draft_model_settings(config, "there is no --speculative-algorithm")
        return config
    algorithm = find_algorithm(name)
    if config.speculative_token_map is not None and algorithm.refuses_token_map:
        raise ConfigError(
            f"--speculative-token-map {config.speculative_token_map} is not for {algorithm.name or name}: "
            f"{algorithm.refuses_token_map}; leave it out"
        )
    return algorithm.settled(config)


def verify_tokens_of(config: EngineConfig) -> tuple[int, ...]:
    """Tokens per row of the programs that verify for a settled configuration; none without an algorithm."""
    name = config.speculative_algorithm
    return () if name is None else find_algorithm(name).verify_tokens(config)


def make_algorithm(context: AlgorithmContext) -> SpeculativeAlgorithm | None:
    """The algorithm a configuration asks for; None for none.

    Raises:
        ConfigError: an unknown name, or settings the algorithm refuses.
    """
    name = context.config.speculative_algorithm
    return None if name is None else find_algorithm(name)(context)
