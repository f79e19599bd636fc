"""Registering an algorithm: what is refused, and what the message says to do."""

from __future__ import annotations

import pytest

from jaxserve.attention.native import NativeBackend
from jaxserve.attention.registry import _registered as backends
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.engine.engine import Engine
from jaxserve.speculative import registry
from jaxserve.speculative.base import SpeculativeAlgorithm
from jaxserve.speculative.registry import find_algorithm, register_speculative_algorithm, speculative_algorithm_names


class Silent(SpeculativeAlgorithm):
    name = "SILENT"

    def propose(self, contexts, num_drafts):
        raise AssertionError


class NoPropose(SpeculativeAlgorithm):
    pass


class Gated(Silent):
    def is_last_shared_read_phase(self):
        return True


def test_a_name_selects_it_whatever_its_case():
    register_speculative_algorithm("Mine-1", Silent)
    try:
        assert find_algorithm("mine-1") is Silent and "MINE-1" in speculative_algorithm_names()
        with pytest.raises(ConfigError, match="'MINE-1' is already registered"):
            register_speculative_algorithm("MINE-1", Silent)
    finally:
        del registry._registered["MINE-1"]


@pytest.mark.parametrize(
    ("name", "algorithm", "message"),
    [
        ("ngram", Silent, "reserved for a built-in"),
        ("EAGLE3", Silent, "reserved for a built-in"),
        ("", Silent, "letters, digits"),
        ("two words", Silent, "letters, digits"),
        ("x", int, "must be a subclass of SpeculativeAlgorithm, got <class 'int'>"),
        ("x", NoPropose, r"must define propose\(\)"),
        ("x", Gated, "last_shared_read_runner"),
    ],
)
def test_what_is_refused(name, algorithm, message):
    with pytest.raises(ConfigError, match=message):
        register_speculative_algorithm(name, algorithm)
    assert name.upper() not in registry._registered


def test_unknown_and_unavailable_names_differ():
    with pytest.raises(ConfigError, match="'NONE' is not available in this version; there are NGRAM"):
        find_algorithm("NONE")
    with pytest.raises(ConfigError, match="'NGRAMM' is unknown; there are NGRAM"):
        find_algorithm("NGRAMM")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens"),
        ({"speculative_eagle_topk": 0}, "--speculative-eagle-topk"),
        ({"speculative_ngram_fence": "fine"}, "--speculative-ngram-fence must be coarse or relay, got 'fine'"),
        ({"speculative_ngram_min_bfs_breadth": 3}, "--speculative-ngram-min-bfs-breadth"),
        ({"speculative_ngram_max_trie_depth": 12}, "--speculative-ngram-max-trie-depth"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_algorithm="NGRAM", **settings)


def test_trees_need_a_backend_that_can(tiny_model, monkeypatch):
    class ChainsOnly(NativeBackend):
        supports_trees = False

    monkeypatch.setitem(backends, "chains-only", ChainsOnly)
    settings = {"attention_backend": "chains-only", "speculative_algorithm": "NGRAM", "context_length": 64}
    with pytest.raises(ConfigError, match="only verifies chains"):
        Engine(EngineConfig(model=str(tiny_model), speculative_ngram_max_bfs_breadth=4, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_draft_model_path": "x"}, "--speculative-draft-model-path is for draft models, and there is no"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 2}, "--speculative-num-steps .* NGRAM has none"),
        ({"speculative_algorithm": "EAGLE3"}, "EAGLE3 needs a draft model; name it with --spec"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "x", "speculative_num_steps": 2,
             "speculative_num_draft_tokens": 5},
            r"--speculative-num-draft-tokens must be --speculative-num-steps \+ 1, 3, got 5",
        ),
        (
            {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "x", "speculative_eagle_topk": 2,
             "speculative_num_steps": 3, "speculative_num_draft_tokens": 40},
            r"must be in \[4, 11\] with --speculative-num-steps 3 and --speculative-eagle-topk 2, got 40",
        ),
        (
            {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "x", "speculative_num_steps": 2},
            "DFLASH drafts a block in one step",
        ),
    ],
)  # fmt: skip
def test_settings_of_draft_models_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        registry.settled(EngineConfig(**settings))
