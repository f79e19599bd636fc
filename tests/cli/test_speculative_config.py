"""``--speculative-config``: what its keys mean, and what it refuses."""

from __future__ import annotations

import argparse
import json

import pytest

from jaxserve.cli.flags import add_engine_flags, engine_config, given_engine_flags
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.engine.llm import LLM


def parsed(config: object, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return parser.parse_args(
        ["--speculative-config", config if isinstance(config, str) else json.dumps(config), *flags]
    )


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"method": "ngram"}, {"speculative_algorithm": "NGRAM"}),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 1},
            {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": 5,
                "speculative_ngram_max_match_window_size": 5,
            },
        ),
        (
            {"method": "eagle3", "model": "head", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
            {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": "head",
                "speculative_num_draft_tokens": 3,
            },
        ),
        (
            {"method": "draft_model", "model": "small", "prompt_lookup_max": None},
            {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "small"},
        ),
        ({"method": "MTP"}, {"speculative_algorithm": "MTP"}),
        (
            {"method": "eagle", "token_map": "hot.json"},
            {"speculative_algorithm": "EAGLE", "speculative_token_map": "hot.json"},
        ),
    ],
)
def test_its_keys_are_fields(config: dict, wanted: dict) -> None:
    assert engine_config(parsed(config)) == EngineConfig(**wanted)


def test_flags_may_say_more_and_repeat_but_not_contradict() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    flags = ("--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "5", "--no-speculative-adaptive")
    assert engine_config(parsed(config, *flags)) == EngineConfig(
        speculative_algorithm="NGRAM", speculative_num_draft_tokens=5, speculative_adaptive=False
    )
    with pytest.raises(ConfigError, match="--speculative-num-draft-tokens 5, but --speculative-num-draft-tokens is 4"):
        engine_config(parsed(config, "--speculative-num-draft-tokens", "4"))
    with pytest.raises(ConfigError, match="--speculative-algorithm NGRAM, but --speculative-algorithm is EAGLE"):
        engine_config(parsed(config, "--speculative-algorithm", "EAGLE"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{method: ngram}", "JSON object like"),
        ([1], r"got \[1\]"),
        ({"method": "ngram", "num_speculativ_tokens": 4}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "disable_by_batch_size": 4}, "no key 'disable_by_batch_size'.*draft_tensor_parallel_size"),
        ({"num_speculative_tokens": 4}, "'method' must be one of ngram, .* got nothing"),
        ({"method": "medusa"}, "'method' must be one of ngram, .* got 'medusa'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "'num_speculative_tokens' .* got 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, "got True"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "got '4'"),
        ({"method": "ngram", "model": "head"}, "leave out 'model'"),
        ({"method": "eagle", "model": 3}, "'model' must be a path"),
        ({"method": "eagle", "token_map": [1]}, "'token_map' must be a path"),
        ({"method": "eagle", "model": "head", "prompt_lookup_max": 4}, "'prompt_lookup_max' is for ngram"),
        ({"method": "ngram", "prompt_lookup_min": 2}, "'prompt_lookup_min' must be 1"),
        ({"method": "eagle", "model": "head", "draft_tensor_parallel_size": 2}, "on one device"),
        ({"method": "ngram", "prompt_lookup_max": 18}, "--speculative-ngram-max-trie-depth"),
    ],
)
def test_what_it_refuses(config: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_config(parsed(config))


def test_it_counts_as_a_flag_of_the_engine() -> None:
    assert given_engine_flags(parsed({"method": "ngram"}, "--page-size", "4")) == [
        "--page-size",
        "--speculative-config",
    ]


def test_python_takes_the_same_keys() -> None:
    with pytest.raises(ConfigError, match="--speculative-num-draft-tokens is 3"):
        LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 4}, speculative_num_draft_tokens=3)
    with pytest.raises(ConfigError, match="no key 'depth'"):
        LLM(speculative_config={"method": "ngram", "depth": 4})
