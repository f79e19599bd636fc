"""Training as a whole on a tiny model: it learns, a kill changes nothing, bad input is refused before work starts."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import write_markov, write_tiny

from jaxserve.cli.main import main
from jaxserve.core.errors import ConfigError
from jaxserve.models.draft import FINAL
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import init_draft, load_draft
from jaxserve.models.loading.weights import LoadedModel, load_model
from jaxserve.training.report import write_report
from jaxserve.training.settings import TrainSettings
from jaxserve.training.train_draft import TextSource, train_draft
from jaxserve.training.warm_start import warm_start

SMALL = {"sequence_length": 64, "batch_rows": 2, "draft_vocab_size": 100, "eval_every": 8, "checkpoint_every": 4,
         "learning_rate": 3e-3, "held_out": 0.1}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token follows from the last one with certainty, and texts it would write."""
    path = tmp_path_factory.mktemp("walk")
    table = np.full((260, 260), -30.0, np.float32)
    for letter in range(260):  # letters of the alphabet follow each other, everything else leads there
        table[letter, ord("a") + (letter * 7 + 3) % 26] = 0.0
    write_markov(path / "model", table, num_hidden_layers=2, num_attention_heads=4)
    random = np.random.default_rng(0)
    lines = []
    for _ in range(40):
        text = [int(random.integers(97, 123))]
        while len(text) < 60:
            text.append(ord("a") + (text[-1] * 7 + 3) % 26)
        lines.append(json.dumps({"text": bytes(text).decode()}))
    (path / "text.jsonl").write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedModel:
    return load_model(open_checkpoint(folder / "model"), jnp.float32)


def train(
    folder: Path, output: Path, algorithm: str = "EAGLE3", until: int | None = None, **settings: Any
) -> dict[str, Any]:
    source = TextSource((folder / "text.jsonl",))
    chosen = TrainSettings(algorithm, **{**SMALL, "epochs": 3.0, **settings})
    return train_draft(chosen, str(folder / "model"), source, output, quiet=True, until=until)


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[Path, dict[str, Any]]:
    return folder / "eagle3", train(folder, folder / "eagle3")


def test_a_draft_learns_what_its_target_writes(trained: tuple[Path, dict[str, Any]], target: LoadedModel) -> None:
    output, report = trained
    first, last = report["history"][0], report["history"][-1]
    assert last["held_out_loss"] < 0.5 * first["held_out_loss"] and last["loss"] < first["loss"]
    assert min(last["accepted"]) > 0.8 and last["mean_length"] == pytest.approx(1 + sum(last["accepted"]), abs=1e-3)
    assert report["draft_vocabulary_covers"] == 1.0
    loaded = load_draft(output, "EAGLE3", target, jnp.float32)
    assert loaded.leaf("target_ids").shape == (100,) and loaded.leaf("lm_head").shape == (100, 272)


def test_the_course_is_written_down(trained: tuple[Path, dict[str, Any]]) -> None:
    output, report = trained
    assert json.loads((output / "training.json").read_text()) == report
    with (output / "training.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [record["step"] for record in report["history"]]
    assert float(rows[-1]["accepted_2"]) == report["history"][-1]["accepted"][1]
    picture = "training.png" if importlib.util.find_spec("matplotlib") else "training.svg"
    assert (output / picture).stat().st_size > 1000


def test_a_killed_training_ends_with_the_same_weights(
    folder: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    whole, report = trained
    assert train(folder, tmp_path, until=11) == {"step": 11}  # the checkpoint is of step 8, which had an evaluation
    assert not (tmp_path / "model.safetensors").exists()
    (tmp_path / "work" / "eagle3.partial").write_bytes(b"cut")  # killed while writing the next one
    again = train(folder, tmp_path)
    assert [r["step"] for r in again["history"]] == [r["step"] for r in report["history"]]
    one, other = (load_file(path / "model.safetensors") for path in (whole, tmp_path))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)

    with pytest.raises(ConfigError, match=r"with seed 0 was begun here, this one has 1; .*choose another --output"):
        train(folder, tmp_path, seed=1)
    (tmp_path / "work" / "eagle3.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="not a checkpoint of a training"):
        train(folder, tmp_path)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH"])
def test_the_layers_asked_for_are_read(folder: Path, target: LoadedModel, tmp_path: Path, algorithm: str) -> None:
    asked = {"target_layers": (0, 1) if algorithm == "DFLASH" else (0,), "epochs": 1.0}
    train(folder, tmp_path, algorithm, until=5, **asked)
    train(folder, tmp_path, algorithm, **asked)  # a checkpoint of it is taken up again
    loaded = load_draft(tmp_path, algorithm, target, jnp.float32)
    wanted = (1, FINAL) if algorithm == "DFLASH" else (1,)
    assert loaded.bind(loaded.leaves).feature_points == wanted


def test_states_are_computed_once(
    folder: Path, trained: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = trained

    def refuse(*arguments: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("jaxserve.training.target_states._program", lambda *arguments: refuse)
    assert train(folder, whole)["history"]


def test_blocks_are_learned_through_the_command(
    folder: Path, target: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    output = folder / "dflash"
    flags = ["--data", str(folder / "text.jsonl"), "--epochs", "1", "--block-size", "4", "--mask-token-id", "259",
             "--anchors", "16", "--quiet"]  # fmt: skip
    for name, value in SMALL.items():
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
    draft = warm_start(init_draft("EAGLE3", target, jnp.float32, target_ids=range(100)), target)
    np.testing.assert_array_equal(draft.leaf("layers.0.down_proj"), target.leaf("layers.1.down_proj"))
    np.testing.assert_array_equal(draft.leaf("layers.0.qkv_proj")[:, 64:], target.leaf("layers.1.qkv_proj"))
    np.testing.assert_array_equal(draft.leaf("norms")[-1], target.leaf("norms")[-1])
    # The highest of the states (2, 1, 0) is the first.
    assert np.abs(np.asarray(draft.leaf("fc"))[:, :64] - np.eye(64)).max() < 0.05


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "MTP"}, "--algorithm must be eagle3 or dflash, got mtp; MTP layers come with their model"),
        ({"num_layers": 0}, "--num-layers must be at least 1"),
        ({"epochs": float("nan")}, "--epochs must be a number above 0"),
        ({"held_out": 0.9}, r"--held-out must be above 0 and at most 0\.5"),
        ({"block_size": 64, "sequence_length": 32}, "--block-size 64 does not fit"),
        ({"weight_decay": -1.0}, "--weight-decay must be a number >= 0"),
        ({"intermediate_size": 0}, "--intermediate-size must be at least 1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainSettings(**{"algorithm": "EAGLE3", **settings})


def test_what_cannot_work_is_refused_before_anything_slow(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.training.train_draft.load_model", lambda *arguments: pytest.fail("began to work"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        train(folder, tmp_path / "file")
    with pytest.raises(ConfigError, match="--sequence-length 600 exceeds the model's 512"):
        train(folder, tmp_path / "out", sequence_length=600)
    with pytest.raises(ConfigError, match="--mask-token-id 260 is not one of the model's 260"):
        train(folder, tmp_path / "out", "DFLASH", mask_token_id=260)
    with pytest.raises(ConfigError, match="--target-layers 0,2: the model has layers 0 to 1"):
        train(folder, tmp_path, target_layers=(0, 2))
    with pytest.raises(ConfigError, match="--data-tokens must be at least 1"):
        TextSource((), 0)
    model = shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no chat template to answer prompts by"):
        train_draft(TrainSettings("EAGLE3"), str(model), TextSource(), tmp_path / "out", quiet=True)


def test_too_little_text_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "short"}')
    shutil.copytree(folder / "model", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"0 rows of 64 tokens to train on and 1 held out; wanted at least 2 and 1"):
        train(tmp_path, tmp_path / "out")


def test_a_checkpoint_that_lost_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path, until=4)
    path = tmp_path / "work" / "eagle3.safetensors"
    arrays = load_file(path)
    arrays.pop("0")
    save_file(arrays, path)
    with pytest.raises(ConfigError, match="not a checkpoint of a training"):
        train(folder, tmp_path)


def test_without_matplotlib_the_picture_is_an_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    history = [
        {"step": step, "loss": 3 / step, "held_out_loss": 4 / step, "accepted": [0.1 * step, 0.0], "mean_length": 1.5,
        "seconds": 1.0} for step in (1, 2, 3)
    ]  # fmt: skip
    text = write_report(tmp_path, {"history": history}).read_text()
    assert text.count("<polyline") == 4 and "up to guess 2" in text and "step 3" in text
