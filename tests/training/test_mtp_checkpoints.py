"""MTP layers beside their target: what the folder holds, and that the target's own stays as it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from walk import MIMO, write_mimo

from jaxserve.cli.main import main
from jaxserve.core.errors import ModelLoadError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.mtp import count_mtp_layers, dummy_mtp_layers, load_mtp_layers
from jaxserve.models.loading.mtp_files import LAYERS_FILE, save_with_mtp_layers
from jaxserve.models.loading.safetensors_files import INDEX_NAME
from jaxserve.models.loading.weights import LoadedModel, load_model
from jaxserve.training.warm_start import warm_start_mtp


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(open_checkpoint(MIMO), jnp.float32)


def assert_served(folder: Path, source: Path, layers: list[LoadedModel]) -> None:
    """The folder is the model of ``source`` with these layers."""
    checkpoint, own = open_checkpoint(folder), open_checkpoint(source)
    kept = {name for name in own.tensors if ".mtp." not in name}
    assert {name for name in checkpoint.tensors if ".mtp." not in name} == kept
    for name in kept:
        np.testing.assert_array_equal(checkpoint.tensors[name], own.tensors[name], err_msg=name)
    assert count_mtp_layers(checkpoint) == len(layers)
    loaded = load_mtp_layers(checkpoint, load_model(checkpoint, jnp.float32), jnp.float32)
    for wanted, found in zip(layers, loaded, strict=True):
        for path in wanted.paths:
            np.testing.assert_array_equal(found.leaf(path), wanted.leaf(path), err_msg=path)


def random_layers(target: LoadedModel, count: int) -> list[LoadedModel]:
    """MTP layers none of whose numbers are alike, norms included."""
    layers = dummy_mtp_layers(target, jnp.float32, count, seed=5)
    for number, layer in enumerate(layers):
        place = layer.paths.index("norms")
        noise = np.random.default_rng(number).standard_normal(layer.leaves[place].shape)
        layer.leaves[place] = layer.leaves[place] + 0.3 * noise
    return layers


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("num_before", [0, 2])
def test_layers_are_written_as_they_are_read(tmp_path: Path, num_shards: int, num_before: int) -> None:
    """Whether the model is sharded or not, and whether it had MTP layers or not."""
    source = write_mimo(tmp_path / "model", num_before, num_shards)
    (source / "chat_template.jinja").write_text("hello")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "training.json").write_text("of another training")
    (source / "pytorch_model.bin").write_bytes(b"weights once more")
    before = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    checkpoint = open_checkpoint(source)
    layers = random_layers(load_model(checkpoint, jnp.float32), 3)
    folder = tmp_path / "out"
    for _ in range(2):  # once more into what is there
        assert save_with_mtp_layers(folder, checkpoint, layers, jnp.float32, ("training.json",)) == folder / LAYERS_FILE
        assert_served(folder, source, layers)
    shards = {path.name for path in source.glob("*.safetensors")}
    copied = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == {
        *shards, *copied, LAYERS_FILE, INDEX_NAME, "additional_chat_templates"
    }  # fmt: skip
    assert open_checkpoint(folder).tool_chat_template == "tools"
    for name in shards:  # not stored twice, where nothing has to be left out
        assert os.path.samefile(folder / name, source / name) == (num_before == 0)
    assert {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()} == before
    total = json.loads((folder / INDEX_NAME).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in open_checkpoint(folder).tensors.values())


def test_files_that_cannot_be_linked_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", refuse)
    source = write_mimo(tmp_path / "model")
    checkpoint = open_checkpoint(source)
    layers = dummy_mtp_layers(load_model(checkpoint, jnp.float32), jnp.float32, 1)
    save_with_mtp_layers(tmp_path / "out", checkpoint, layers, jnp.float32)
    assert_served(tmp_path / "out", source, layers)
    assert not os.path.samefile(tmp_path / "out" / "model.safetensors", source / "model.safetensors")


def test_a_folder_cut_short_has_no_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is what adds them, and an old one is gone before anything changes."""
    source = write_mimo(tmp_path / "model")
    checkpoint = open_checkpoint(source)
    layers = dummy_mtp_layers(load_model(checkpoint, jnp.float32), jnp.float32, 2)
    save_with_mtp_layers(tmp_path / "out", checkpoint, layers, jnp.float32)
    monkeypatch.setattr(shutil, "copyfile", lambda *arguments: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception, match="killed"):
        save_with_mtp_layers(tmp_path / "out", checkpoint, layers[:1], jnp.float32)
    with pytest.raises(ModelLoadError, match="holds no MTP layers"):
        count_mtp_layers(open_checkpoint(tmp_path / "out"))


# -- where training begins ---------------------------------------------------------------------------------------------


def test_a_new_layer_begins_as_its_target_ends(target: LoadedModel) -> None:
    [layer] = dummy_mtp_layers(target, jnp.float32, 1)
    begun = warm_start_mtp(layer, target)
    # The last layer with a sliding window, and the only one whose MLP is dense.
    for source, names in ((3, ("qkv_proj", "o_proj", "sinks")), (0, ("gate_up_proj", "down_proj"))):
        for name in names:
            np.testing.assert_array_equal(begun.leaf(f"layer.{name}"), target.leaf(f"layers.{source}.{name}"))
    norms, theirs = np.asarray(begun.leaf("norms")), np.asarray(target.leaf("norms"))
    np.testing.assert_array_equal(norms[2:], theirs[[6, 1, 8]])
    assert np.abs(np.asarray(begun.leaf("eh_proj"))[:, 32:] - np.eye(32)).max() < 0.02


def test_layers_that_are_there_go_on(train: Any, tmp_path: Path) -> None:
    """Training begins with those the checkpoint has; further ones are made. Its own files stay as they are."""
    source = write_mimo(tmp_path / "model", num_mtp_layers=1)
    before = (source / "model.safetensors").read_bytes()
    report = train(tmp_path / "out", "MTP", model=source, num_layers=2, epochs=0.1, learning_rate=1e-9)
    assert report["steps"] == 2
    checkpoint = open_checkpoint(tmp_path / "out")
    assert count_mtp_layers(checkpoint) == 2 and (source / "model.safetensors").read_bytes() == before
    theirs = load_file(source / "model.safetensors")["model.mtp.layers.0.eh_proj.weight"]
    ours = load_file(tmp_path / "out" / LAYERS_FILE)
    np.testing.assert_allclose(ours["model.mtp.layers.0.eh_proj.weight"].astype(np.float32), theirs, atol=4e-3)
    new = ours["model.mtp.layers.1.eh_proj.weight"].astype(np.float32)
    assert np.abs(new[:, 32:] - np.eye(32)).max() < 0.02


def test_damaged_layers_are_refused_before_anything_slow(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_mimo(tmp_path / "model", num_mtp_layers=2)
    tensors = {name: np.array(x) for name, x in open_checkpoint(source).tensors.items()}
    save_file({n: x for n, x in tensors.items() if ".mtp.layers.0." not in n}, source / "model.safetensors")
    monkeypatch.setattr("jaxserve.training.train_draft.load_model", lambda *arguments: pytest.fail("began to work"))
    with pytest.raises(ModelLoadError, match=r"numbered from 0 without gaps, found \[1\]"):
        train(tmp_path / "out", "MTP", model=source)


def test_the_command_says_how_to_serve_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train-draft", "--algorithm", "mtp", "--model", str(folder / "mimo"), "--output", str(tmp_path / "out"),
               "--data", str(folder / "text.jsonl"), "--num-layers", "1", "--sequence-length", "64", "--epochs", "0.1",
               "--quiet"]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr()
    assert (
        "tokens per step" in said.out
        and f"serve with: --model {tmp_path / 'out'} --speculative-algorithm MTP" in said.err
    )
    assert main([*command, "--anchors", "3"]) != 0
    assert "--anchors is a setting of dflash; --algorithm mtp does not look at it" in capsys.readouterr().err
