"""Files that say which ids an EAGLE head may draft, and what a head is that was cut to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, ModelLoadError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import init_draft, load_draft
from jaxserve.models.loading.token_map import check_range, read_token_map, with_token_map
from jaxserve.models.loading.weights import LoadedModel, load_model
from jaxserve.speculative.base import AlgorithmContext
from jaxserve.speculative.eagle import EagleAlgorithm
from jaxserve.speculative.registry import settled

FIXTURES = Path(__file__).parent.parent / "fixtures"
IDS = [3, 50, 97, 98, 99, 200, 257, 259]


def written(path: Path, ids: Any) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(ids))
    elif path.suffix == ".npy":
        np.save(path, np.asarray(ids))
    else:
        save_file({"ids": np.asarray(ids)}, path)
    return path


@pytest.mark.parametrize("name", ["map.json", "map.npy", "map.safetensors"])
def test_every_form_says_the_same_whatever_the_order(tmp_path: Path, name: str) -> None:
    found = read_token_map(written(tmp_path / name, IDS[::-1]))
    assert found.tolist() == IDS and found.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "ids", "said"),
    [
        ("map.json", {"ids": [1]}, "no list of integers; wanted a .json file with a list of ids"),
        ("map.json", [1, 2.0], "no list of integers"),
        ("map.json", [True], "no list of integers"),
        ("map.json", [1, 2**70], "wanted one row of integers"),
        ("map.json", [], "names no id"),
        ("map.json", [4, -1], "ids must be >= 0, got -1"),
        ("map.json", [4, 7, 4], "4 comes more than once"),
        ("map.npy", [[1, 2]], r"one row of integers, got int64 of shape \[1, 2\]"),
        ("map.npy", [1.5], "got float64"),
        ("map.npy", np.array([1, None]), "damaged, or no token map"),
        ("map.safetensors", [True, False], "got bool"),
    ],
)
def test_what_is_no_map_is_refused(tmp_path: Path, name: str, ids: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-token-map .*{name}: .*{said}"):
        read_token_map(written(tmp_path / name, ids))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("hot.pt", b"PK", r"files of torch .*python -c .import json, torch; .*torch.load\('hot.pt'\).*'hot.json'"),
        ("hot.txt", b"1 2", "wanted a .json file .* got .txt"),
        ("hot", b"1 2", "got no suffix"),
        ("hot.json", b"[1, 2", "damaged"),
        ("hot.npy", b"\x93NUM", "damaged"),
        ("hot.npy", b"", "damaged"),
        ("hot.safetensors", b"12", "damaged"),
        ("hot.json", None, "cannot be read: No such file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_token_map(tmp_path / name)


def test_several_tensors_are_refused(tmp_path: Path) -> None:
    save_file({"a": np.arange(3), "b": np.arange(2)}, tmp_path / "two.safetensors")
    with pytest.raises(ConfigError, match=r"holds 2 tensors \(a, b\)"):
        read_token_map(tmp_path / "two.safetensors")


def test_ids_of_another_tokenizer_are_refused() -> None:
    check_range("x", np.array(IDS), 260)
    with pytest.raises(ConfigError, match=r"0 \.\. 258, what the target's tokenizer knows, but 1 are not.* 259;"):
        check_range("x", np.array(IDS), 259)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "is not for EAGLE3: EAGLE-3 heads bring the ids .* d2t; leave it out"),
        ({"speculative_algorithm": "NGRAM"}, "is not for NGRAM: "),
        ({"speculative_algorithm": "STANDALONE"}, "is not for STANDALONE: "),
        ({"speculative_algorithm": "DFLASH"}, "is not for DFLASH: "),
        ({"speculative_algorithm": "nextn"}, "is not for MTP: "),
        ({}, "is for draft models, and there is no --speculative-algorithm"),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, r"names 3 ids, fewer than .*-eagle-topk 4"),
    ],
)
def test_where_it_means_nothing_it_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    path = str(written(tmp_path / "map.json", [1, 2, 3]))
    head = {"speculative_draft_model_path": str(FIXTURES / "drafts" / "eagle")} if settings else {}
    with pytest.raises(ConfigError, match=f"--speculative-token-map .*{said}"):
        settled(EngineConfig(speculative_token_map=path, **head, **settings))


# -- the head ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gqa", "tied"])
def target(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(open_checkpoint(FIXTURES / request.param), jnp.float32)


def test_logits_are_those_of_the_whole_head_at_the_ids(target: LoadedModel) -> None:
    whole = init_draft("EAGLE", target, jnp.float32)
    cut = with_token_map(whole, np.array(IDS))
    states = np.random.default_rng(0).standard_normal((5, target.config.hidden_size)).astype(np.float32)
    one, other = (model.bind(model.leaves) for model in (whole, cut))
    np.testing.assert_allclose(other.logits(states), np.asarray(one.logits(states))[:, IDS], rtol=1e-5, atol=1e-6)
    assert other.target_ids[...].tolist() == IDS and other.draft_vocab_size == len(IDS)
    for path in ("embed_tokens", "fc", "norms"):
        assert cut.leaf(path) is whole.leaf(path)
    assert cut.leaf("lm_head").shape[0] == len(IDS)


def test_a_map_of_all_ids_changes_nothing(target: LoadedModel) -> None:
    whole = init_draft("EAGLE", target, jnp.float32)
    assert with_token_map(whole, np.arange(target.config.vocab_size)) is whole


def test_a_head_with_ids_of_its_own_takes_no_map() -> None:
    target = load_model(open_checkpoint(FIXTURES / "gqa"), jnp.float32)
    head = load_draft(FIXTURES / "drafts" / "eagle3", "EAGLE3", target, jnp.float32)
    with pytest.raises(ModelLoadError, match="by its tensor d2t; leave out --speculative-token-map"):
        with_token_map(head, np.array(IDS))


def test_programs_can_be_compiled_for_it_without_weights(tmp_path: Path) -> None:
    target = load_model(open_checkpoint(FIXTURES / "gqa"), jnp.float32)
    config = EngineConfig(
        speculative_algorithm="EAGLE", speculative_draft_model_path=str(FIXTURES / "drafts" / "eagle"),
        speculative_token_map=str(written(tmp_path / "map.json", IDS)),
    )  # fmt: skip
    shapes = []
    for load in ("load", "load_abstract"):
        algorithm = EagleAlgorithm(AlgorithmContext(config, 260, lambda text: []))
        getattr(algorithm, load)(target, *([None] if load == "load" else []))
        shapes.append(
            dict(zip(algorithm.draft.paths, [(x.shape, x.dtype) for x in algorithm.draft.leaves], strict=True))
        )
    assert shapes[0] == shapes[1]
    algorithm = EagleAlgorithm(AlgorithmContext(config, 259, lambda text: []))
    with pytest.raises(ConfigError, match="made for another tokenizer"):
        algorithm.load(target, None)
