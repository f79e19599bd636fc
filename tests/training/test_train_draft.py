"""Training as a whole on a tiny model: it learns, a kill changes nothing, bad input is refused before work starts."""

from __future__ import annotations

import csv
import importlib.util
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
from walk import LETTERS, SMALL

from jaxserve.cli.main import main
from jaxserve.core.errors import ConfigError
from jaxserve.models.draft import FINAL
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import init_draft, load_draft
from jaxserve.models.loading.draft_config import trained_steps_of
from jaxserve.models.loading.draft_files import open_draft_files
from jaxserve.models.loading.token_map import read_token_map
from jaxserve.models.loading.weights import LoadedModel, load_model
from jaxserve.training.report import write_report
from jaxserve.training.settings import TrainSettings
from jaxserve.training.train_draft import TextSource, train_draft
from jaxserve.training.warm_start import warm_start

Trained = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedModel:
    return load_model(open_checkpoint(folder / "model"), jnp.float32)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "MTP"])
def test_a_draft_learns_what_its_target_writes(trained: Trained, algorithm: str) -> None:
    _, report = trained(algorithm)
    first, last = report["history"][0], report["history"][-1]
    assert last["held_out_loss"] < 0.5 * first["held_out_loss"] and last["loss"] < first["loss"]
    assert min(last["accepted"]) > 0.8 and last["mean_length"] == pytest.approx(1 + sum(last["accepted"]), abs=1e-3)
    assert report["draft_vocabulary_covers"] == 1.0


def test_heads_are_written_in_their_published_layouts(trained: Trained, target: LoadedModel) -> None:
    loaded = load_draft(trained("EAGLE3")[0], "EAGLE3", target, jnp.float32)
    assert loaded.leaf("target_ids").shape == (100,) and loaded.leaf("lm_head").shape == (100, 272)
    eagle = trained("EAGLE")[0]
    loaded = load_draft(eagle, "EAGLE", target, jnp.float32)
    assert loaded.leaf("lm_head") is target.leaf("lm_head") and loaded.leaf("target_ids") is None
    names = set(load_file(eagle / "model.safetensors"))
    assert "fc.weight" in names and not names & {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
    # It says how many guesses it was trained for, and the ids its loss was about are beside it.
    assert trained_steps_of(open_draft_files(eagle)) == 3
    ids = read_token_map(eagle / "token_map.json")
    assert ids.size == 100 and set(LETTERS) <= set(ids.tolist())


def test_the_course_is_written_down(trained: Trained) -> None:
    output, report = trained("EAGLE3")
    assert json.loads((output / "training.json").read_text()) == report
    with (output / "training.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [record["step"] for record in report["history"]]
    assert float(rows[-1]["accepted_2"]) == report["history"][-1]["accepted"][1]
    picture = "training.png" if importlib.util.find_spec("matplotlib") else "training.svg"
    assert (output / picture).stat().st_size > 1000


@pytest.mark.parametrize(
    ("algorithm", "settings", "file"),
    [
        ("EAGLE", {}, "model.safetensors"),
        ("EAGLE3", {}, "model.safetensors"),
        ("MTP", {"num_layers": 2}, "mtp-layers.safetensors"),
    ],
)
def test_a_killed_training_ends_with_the_same_weights(
    train: Any, trained: Trained, tmp_path: Path, algorithm: str, settings: dict[str, Any], file: str
) -> None:
    whole, report = trained(algorithm)
    # The checkpoint is of step 8, which had an evaluation.
    assert train(tmp_path, algorithm, until=11, **settings) == {"step": 11}
    assert not (tmp_path / "config.json").exists() and not (tmp_path / file).exists()
    (tmp_path / "work" / f"{algorithm.lower()}.partial").write_bytes(b"cut")  # killed while writing the next one
    again = train(tmp_path, algorithm, **settings)
    assert [r["step"] for r in again["history"]] == [r["step"] for r in report["history"]]
    one, other = (load_file(path / file) for path in (whole, tmp_path))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_a_checkpoint_of_another_training_is_refused(train: Any, tmp_path: Path) -> None:
    train(tmp_path, until=4)
    with pytest.raises(ConfigError, match=r"with seed 0 was begun here, this one has 1; .*choose another --output"):
        train(tmp_path, seed=1)
    path = tmp_path / "work" / "eagle3.safetensors"
    arrays = load_file(path)
    arrays.pop("0")
    save_file(arrays, path)
    with pytest.raises(ConfigError, match="not a checkpoint of a training"):
        train(tmp_path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="not a checkpoint of a training"):
        train(tmp_path)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH"])
def test_the_layers_asked_for_are_read(train: Any, target: LoadedModel, tmp_path: Path, algorithm: str) -> None:
    asked = {"target_layers": (0, 1) if algorithm == "DFLASH" else (0,), "epochs": 1.0}
    train(tmp_path, algorithm, until=5, **asked)
    train(tmp_path, algorithm, **asked)  # a checkpoint of it is taken up again
    loaded = load_draft(tmp_path, algorithm, target, jnp.float32)
    wanted = (1, FINAL) if algorithm == "DFLASH" else (1,)
    assert loaded.bind(loaded.leaves).feature_points == wanted


def test_states_are_computed_once(train: Any, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained("EAGLE3")

    def refuse(*arguments: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("jaxserve.training.target_states._program", lambda *arguments: refuse)
    assert train(whole)["history"]


def test_blocks_are_learned_through_the_command(
    folder: Path, target: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    output = folder / "dflash"
    flags = ["--data", str(folder / "text.jsonl"), "--block-size", "4", "--mask-token-id", "259",
             "--anchors", "16", "--quiet"]  # fmt: skip
    for name, value in {**SMALL, "epochs": 1, "draft_vocab_size": 100}.items():
        flags += ["--" + name.replace("_", "-"), str(value)]
    command = [
        "train-draft",
        "--algorithm",
        "dflash",
        "--model",
        str(folder / "model"),
        "--output",
        str(output),
        *flags,
    ]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "tokens per step" in said.out and "--speculative-algorithm DFLASH" in said.err
    history = json.loads((output / "training.json").read_text())["history"]
    assert history[-1]["held_out_loss"] < history[0]["held_out_loss"]
    loaded = load_draft(output, "DFLASH", target, jnp.float32)
    model = loaded.bind(loaded.leaves)
    assert (model.block_size, model.mask_token_id) == (4, 259)
    np.testing.assert_array_equal(  # the head is the target's, for the ids the draft knows
        loaded.leaf("lm_head"), target.leaf("lm_head")[loaded.leaf("target_ids")].astype(jnp.bfloat16)
    )


def test_a_new_draft_begins_as_its_target_ends(tmp_path: Path) -> None:
    target = load_model(open_checkpoint(write_tiny(tmp_path)), jnp.float32)
    eagle = warm_start(init_draft("EAGLE", target, jnp.float32), target)
    # It reads as the target's layer does, adds nothing yet, and passes the target's state on.
    theirs, ours = (
        np.asarray(each.ravel()) for each in (target.leaf("layers.1.qkv_proj"), eagle.leaf("layers.0.qkv_proj"))
    )
    assert np.corrcoef(theirs, ours)[0, 1] > 0.9999 and ours.std() == pytest.approx(0.02, rel=0.05)
    assert not eagle.leaf("layers.0.o_proj").any() and not eagle.leaf("layers.0.down_proj").any()
    assert np.abs(np.asarray(eagle.leaf("fc"))[:, 64:] - np.eye(64)).max() < 0.05
    draft = warm_start(init_draft("EAGLE3", target, jnp.float32, target_ids=range(100)), target)
    np.testing.assert_array_equal(draft.leaf("layers.0.down_proj"), target.leaf("layers.1.down_proj"))
    np.testing.assert_array_equal(draft.leaf("layers.0.qkv_proj")[:, 64:], target.leaf("layers.1.qkv_proj"))
    np.testing.assert_array_equal(draft.leaf("norms")[-1], target.leaf("norms")[-1])
    # The highest of the states (2, 1, 0) is the first.
    assert np.abs(np.asarray(draft.leaf("fc"))[:, :64] - np.eye(64)).max() < 0.05


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "MEDUSA"}, "--algorithm must be one of eagle, eagle3, dflash, mtp; got medusa"),
        ({"num_layers": 0}, "--num-layers must be at least 1"),
        ({"epochs": float("nan")}, "--epochs must be a number above 0"),
        ({"held_out": 0.9}, r"--held-out must be above 0 and at most 0\.5"),
        ({"algorithm": "DFLASH", "block_size": 64, "sequence_length": 32}, "--block-size 64 does not fit"),
        ({"weight_decay": -1.0}, "--weight-decay must be a number >= 0"),
        ({"intermediate_size": 0}, "--intermediate-size must be at least 1"),
        ({"algorithm": "EAGLE", "cross_entropy_weight": -0.1}, "--cross-entropy-weight must be a number >= 0"),
        ({"cross_entropy_weight": 0.5}, "is a setting of eagle; --algorithm eagle3 does not look at it: leave it out"),
        ({"anchors": 8}, "--anchors is a setting of dflash"),
        ({"algorithm": "EAGLE", "target_layers": (0,)}, "--target-layers is a setting of eagle3, dflash"),
        ({"algorithm": "DFLASH", "draft_steps": 2}, "--draft-steps is a setting of eagle, eagle3"),
        ({"algorithm": "MTP", "draft_vocab_size": 0}, "--draft-vocab-size is a setting of eagle, eagle3, dflash"),
        ({"algorithm": "MTP", "step_decay": 0.5}, "--step-decay is a setting of eagle, eagle3; --algorithm mtp"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainSettings(**{"algorithm": "EAGLE3", **settings})


def test_what_cannot_work_is_refused_before_anything_slow(
    folder: Path, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.training.train_draft.load_model", lambda *arguments: pytest.fail("began to work"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        train(tmp_path / "file")
    for name in ("model", "mimo"):
        with pytest.raises(ConfigError, match="is the folder of the model, whose files would be lost; give another"):
            train(folder / name, "MTP", model=folder / name)
    llama = "--algorithm mtp trains for MiMoV2FlashForCausalLM models, --model .* is LlamaForCausalLM; give another"
    with pytest.raises(ConfigError, match=llama):
        train(tmp_path / "out", "MTP", model=folder / "model")
    for algorithm in ("EAGLE", "EAGLE3", "DFLASH"):
        with pytest.raises(ConfigError, match=r"is MiMoV2FlashForCausalLM; give another --model, or --algorithm mtp"):
            train(tmp_path / "out", algorithm, model=folder / "mimo")
    with pytest.raises(ConfigError, match="--sequence-length 600 exceeds the model's 512"):
        train(tmp_path / "out", sequence_length=600)
    with pytest.raises(ConfigError, match="--mask-token-id 260 is not one of the model's 260"):
        train(tmp_path / "out", "DFLASH", mask_token_id=260)
    with pytest.raises(ConfigError, match="--target-layers 0,2: the model has layers 0 to 1"):
        train(tmp_path, target_layers=(0, 2))
    with pytest.raises(ConfigError, match="--data-tokens must be at least 1"):
        TextSource((), 0)
    model = shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no chat template to answer prompts by"):
        train_draft(TrainSettings("EAGLE3"), str(model), TextSource(), tmp_path / "out", quiet=True)


def test_too_little_text_is_refused(train: Any, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "short"}')
    with pytest.raises(ConfigError, match=r"0 rows of 64 tokens to train on and 1 held out; wanted at least 2 and 1"):
        train(tmp_path / "out", data=tmp_path / "text.jsonl")


def test_without_matplotlib_the_picture_is_an_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    history = [
        {"step": step, "loss": 3 / step, "held_out_loss": 4 / step, "accepted": [0.1 * step, 0.0], "mean_length": 1.5,
        "seconds": 1.0} for step in (1, 2, 3)
    ]  # fmt: skip
    text = write_report(tmp_path, {"history": history}).read_text()
    assert text.count("<polyline") == 4 and "up to guess 2" in text and "step 3" in text
