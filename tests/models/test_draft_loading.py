"""Draft checkpoints: what is shared, what is saved, and what is refused before any work starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import write_tiny

from jaxserve.core.errors import ConfigError, ModelLoadError
from jaxserve.models.draft import FINAL, target_ids_of
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import default_draft_path, init_draft, load_draft, save_draft
from jaxserve.models.loading.weights import LoadedModel, load_model

FIXTURES = Path(__file__).parent.parent / "fixtures"
DRAFTS = FIXTURES / "drafts"
IDS = [3, 50, 97, 98, 99, 200, 257, 259]
OFFSETS = np.array([3, 49, 95, 95, 95, 195, 251, 252])


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(open_checkpoint(FIXTURES / "gqa"), jnp.float32)


@pytest.fixture(scope="module")
def tied_target() -> LoadedModel:
    return load_model(open_checkpoint(FIXTURES / "tied"), jnp.float32)


def changed(tmp_path: Path, name: str, config: Callable[[dict[str, Any]], None] | None = None,
            tensors: Callable[[dict[str, np.ndarray]], None] | None = None) -> Path:  # fmt: skip
    """A copy of a fixture with its configuration or tensors changed in place."""
    path = shutil.copytree(DRAFTS / name, tmp_path / name)
    if config is not None:
        content = json.loads((path / "config.json").read_text())
        config(content)
        (path / "config.json").write_text(json.dumps(content))
    if tensors is not None:
        arrays = load_file(path / "model.safetensors")
        tensors(arrays)
        save_file(arrays, path / "model.safetensors")
    return path


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_arrays_shared_with_the_target_are_the_targets_own(target: LoadedModel) -> None:
    eagle = load_draft(DRAFTS / "eagle", "EAGLE", target, jnp.float32)  # its file holds a copy of the embedding
    dflash = load_draft(DRAFTS / "dflash", "DFLASH", target, jnp.float32)
    eagle3 = load_draft(DRAFTS / "eagle3", "EAGLE3", target, jnp.float32)
    for draft in (eagle, dflash):
        assert draft.leaf("embed_tokens") is target.leaf("embed_tokens")
        assert draft.leaf("lm_head") is target.leaf("lm_head")
    assert eagle3.leaf("embed_tokens") is target.leaf("embed_tokens")
    assert eagle3.leaf("lm_head").shape[0] == eagle3.leaf("target_ids").shape[0] < target.config.vocab_size


def test_an_embedding_of_its_own_is_kept(target: LoadedModel) -> None:
    draft = load_draft(DRAFTS / "eagle3_speculators", "EAGLE3", target, jnp.float32)
    expected = load_file(DRAFTS / "eagle3_speculators" / "model.safetensors")["embed_tokens.weight"]
    np.testing.assert_array_equal(draft.leaf("embed_tokens"), expected)


def test_a_tied_target_gives_its_embedding_as_the_head(tied_target: LoadedModel) -> None:
    draft = init_draft("EAGLE", tied_target, jnp.float32)
    assert draft.leaf("lm_head") is None and draft.leaf("embed_tokens") is tied_target.leaf("embed_tokens")


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("EAGLE", {}),
        ("EAGLE", {"num_layers": 2, "intermediate_size": 24}),
        ("EAGLE3", {"target_ids": IDS}),
        ("EAGLE3", {"num_layers": 2, "feature_points": (0, 1, 2)}),
        ("DFLASH", {"num_layers": 2, "block_size": 5, "mask_token_id": 259}),
        ("DFLASH", {"target_ids": IDS, "feature_points": (1, FINAL)}),
    ],
)
@pytest.mark.parametrize("which", ["target", "tied_target"])
def test_what_is_saved_loads_again(
    algorithm: str, settings: dict[str, Any], which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    target = request.getfixturevalue(which)
    draft = init_draft(algorithm, target, jnp.float32, **settings)
    save_draft(tmp_path / "draft", draft)
    again = load_draft(tmp_path / "draft", algorithm, target, jnp.float32)
    for path in draft.paths:
        found = again.leaf(path)
        if path == "lm_head" and found is None:  # equal to the target's embedding, so that one is used
            found = again.leaf("embed_tokens")
        np.testing.assert_array_equal(draft.leaf(path), found, err_msg=path)
    one, other = (model.bind(model.leaves).draft for model in (draft, again))
    for name in ("feature_points", "draft_vocab_size", "block_size", "mask_token_id", "target_hidden_size", "decoder"):
        assert getattr(one, name) == getattr(other, name), name


def test_weights_are_saved_in_the_dtype_asked_for(target: LoadedModel, tmp_path: Path) -> None:
    save_draft(tmp_path, init_draft("EAGLE3", target, jnp.float32, target_ids=IDS), jnp.bfloat16)
    header = (tmp_path / "model.safetensors").read_bytes()[:4000].decode("latin-1")
    assert '"BF16"' in header and '"F32"' not in header
    assert load_draft(tmp_path, "EAGLE3", target, jnp.float32).leaf("fc").dtype == jnp.float32


# -- the draft vocabulary ----------------------------------------------------------------------------------------------


def known(ids: list[int]) -> np.ndarray:
    return np.isin(np.arange(260), ids)


def test_offsets_become_target_ids() -> None:
    np.testing.assert_array_equal(target_ids_of(OFFSETS, known(IDS), 8, 260), IDS)
    np.testing.assert_array_equal(target_ids_of(OFFSETS, None, 8, 260), IDS)
    assert target_ids_of(None, None, 260, 260) is None
    assert target_ids_of(np.zeros(260, np.int64), None, 260, 260) is None
    np.testing.assert_array_equal(target_ids_of(np.zeros(8, np.int64), known(list(range(8))), 8, 260), range(8))
    np.testing.assert_array_equal(target_ids_of(np.array([7]), known([7]), 1, 260), [7])


@pytest.mark.parametrize(
    ("d2t", "t2d", "draft_vocab", "message"),
    [
        (None, None, 8, "d2t is missing"),
        (np.zeros(8, np.int64), None, 8, "all zeros"),
        (np.zeros(8, np.int64), known(IDS), 8, "contradict"),
        (OFFSETS[:7], known(IDS), 8, "wanted 8 integers"),
        (OFFSETS.astype(np.float32), known(IDS), 8, "wanted 8 integers"),
        (np.array(IDS), None, 8, "outside"),
        (np.array(IDS), known(IDS), 8, "holds target ids"),
        (OFFSETS + np.eye(8, dtype=int)[7], None, 8, "outside"),
        (OFFSETS - 4 * np.eye(8, dtype=int)[0], None, 8, "outside"),
        (OFFSETS + np.eye(8, dtype=int)[3], None, 8, "rise strictly"),
        (OFFSETS, known(IDS)[:200], 8, "wanted 260 entries"),
        (OFFSETS, known(IDS[:7]), 8, "marks 7"),
        (OFFSETS, known([4, *IDS[1:]]), 8, "stands for 3 by d2t, 4 by t2d"),
        (np.arange(260), None, 260, "outside"),
        (OFFSETS, None, 300, "1 .. 260"),
    ],
)
def test_a_bad_mapping_is_refused(d2t: Any, t2d: Any, draft_vocab: int, message: str) -> None:
    """O-29."""
    with pytest.raises(ModelLoadError, match=message):
        target_ids_of(d2t, t2d, draft_vocab, 260)


def test_a_checkpoint_whose_mapping_is_gone_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    path = changed(tmp_path, "eagle3", tensors=lambda t: t.pop("d2t"))
    with pytest.raises(ModelLoadError, match=r"eagle3: tensor d2t is missing.*train-draft"):
        load_draft(path, "EAGLE3", target, jnp.float32)


# -- the wrong checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("eagle", "EAGLE3", "wants an EAGLE-3 head, this is an EAGLE head; use --speculative-algorithm EAGLE"),
        ("eagle3", "EAGLE", "wants an EAGLE head, this is an EAGLE-3 head; use --speculative-algorithm EAGLE3"),
        ("eagle3_speculators", "DFLASH", "wants a DFLASH head, this is an EAGLE-3 head"),
        ("dflash", "EAGLE3", "wants an EAGLE-3 head, this is a DFLASH head"),
        ("dflash", "STANDALONE", "wants a whole model, this is a DFLASH head"),
        ("eagle", "STANDALONE", "wants a whole model, this is an EAGLE head"),
        ("../gqa", "EAGLE3", "wants an EAGLE-3 head, this is a whole model; .*STANDALONE"),
        ("../gqa.gguf", "EAGLE", "wants an EAGLE head, this is a whole model"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(target: LoadedModel, name: str, asked: str, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        load_draft(DRAFTS / name, asked, target, jnp.float32)


def test_an_algorithm_without_a_draft_model_is_refused(target: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="NGRAM takes no draft checkpoint"):
        load_draft(DRAFTS / "eagle", "NGRAM", target, jnp.float32)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash"])
def test_a_draft_for_another_target_is_refused(tied_target: LoadedModel, name: str) -> None:
    algorithm = name.upper()
    with pytest.raises(ModelLoadError, match=r"48.*40.*another draft or another target"):
        load_draft(DRAFTS / name, algorithm, tied_target, jnp.float32)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("eagle3", {"vocab_size": 300}, "vocab_size is 300, the target's is 260"),
        ("eagle3", {"target_hidden_size": 64}, "trained for a target of hidden size 64, this target's is 48"),
        (
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}},
            "layer 2, the target's layers are 0",
        ),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false is not supported"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "fc.weight has shape"),
        ("eagle3", {"draft_vocab_size": 9}, "wanted 9 integers"),
        ("eagle3_speculators", {"norm_before_fc": True}, "norm_before_fc is not supported"),
        ("dflash", {"block_size": 1}, "block_size must be an integer >= 2"),
        ("dflash", {"dflash_config": {"mask_token_id": 260, "target_layer_ids": [0, 1]}}, "260 token ids, got 260"),
        (
            "dflash",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            "wanted full_attention",
        ),
        ("eagle", {"num_hidden_layers": 3}, "layers.2.self_attn.q_proj.weight is missing"),
        ("eagle", {"num_hidden_layers": 1}, "does not have here: layers.1"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    target: LoadedModel, tmp_path: Path, name: str, config: dict[str, Any], said: str
) -> None:
    path = changed(tmp_path, name, config=lambda content: content.update(config))
    with pytest.raises(ModelLoadError, match=said) as error:
        load_draft(path, name.split("_")[0].upper(), target, jnp.float32)
    assert str(path) in str(error.value)


def test_a_block_that_need_not_be_causal_may_have_a_window(target: LoadedModel, tmp_path: Path) -> None:
    config = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False}
    path = changed(tmp_path, "dflash", config=lambda content: content.update(config))
    draft = load_draft(path, "DFLASH", target, jnp.float32)
    assert draft.bind(draft.leaves).window == 8


def test_a_head_that_is_missing_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    path = changed(tmp_path, "eagle3", tensors=lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight is missing"):
        load_draft(path, "EAGLE3", target, jnp.float32)


def test_a_folder_without_a_checkpoint_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"found no config\.json"):
        load_draft(tmp_path, "EAGLE3", target, jnp.float32)


def test_standalone_loads_a_whole_model_of_the_same_vocabulary(target: LoadedModel, tmp_path: Path) -> None:
    draft = load_draft(write_tiny(tmp_path / "small"), "STANDALONE", target, jnp.float32)
    assert draft.config.hidden_size == 64 and draft.config.vocab_size == target.config.vocab_size
    other = write_tiny(tmp_path / "other", vocab_size=300)
    with pytest.raises(ModelLoadError, match="knows 300 token ids, the target 260"):
        load_draft(other, "STANDALONE", target, jnp.float32)


@pytest.mark.parametrize(
    ("algorithm", "settings", "said"),
    [
        ("NGRAM", {}, "not known"),
        ("EAGLE", {"target_ids": IDS}, "no vocabulary of its own"),
        ("EAGLE3", {"target_ids": [5, 4]}, "target_ids"),
        ("EAGLE3", {"target_ids": [4, 400]}, "target_ids"),
        ("EAGLE3", {"feature_points": (1, 3)}, r"0 \.\. 2"),
        ("EAGLE3", {"feature_points": (1, FINAL)}, r"no name for the final norm"),
        ("DFLASH", {"feature_points": (1, 2)}, r"0 \.\. 1"),
        ("DFLASH", {"mask_token_id": 260}, "mask token"),
        ("DFLASH", {"block_size": 1}, "blocks of >= 2"),
    ],
)
def test_settings_of_a_new_draft_are_checked(
    target: LoadedModel, algorithm: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        init_draft(algorithm, target, jnp.float32, **settings)


def test_a_default_draft_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="no default draft model for --speculative-algorithm EAGLE;"):
        default_draft_path("EAGLE")
