"""A model's folder written anew, with MTP layers beside its own tensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.models.loading.checkpoint import Checkpoint
from jaxserve.models.loading.mtp import MTP_PREFIX
from jaxserve.models.loading.safetensors_files import INDEX_NAME, SafetensorsFiles
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.models.mimo_v2_mtp import mtp_tensors

LAYERS_FILE = "mtp-layers.safetensors"
_COPIED = (".json", ".jinja", ".txt", ".model")  # configuration, tokenizer, chat template
_TEMPLATES = "additional_chat_templates"


def save_with_mtp_layers(
    folder: Path, checkpoint: Checkpoint, layers: Sequence[LoadedModel], dtype: Any, leave_out: Iterable[str] = ()
) -> Path:
    """Writes ``checkpoint`` with ``layers`` as its MTP layers, as a folder that serves both.

    Files of weights are linked where the file system can, for they are large and stay as they are; all others are
    copied. A file that holds MTP layers of the checkpoint's own is written anew without them. The index comes last: a
    folder without it, where that was cut short, is one without MTP layers or one that is refused.

    Args:
        folder: another one than the checkpoint's.
        checkpoint: a Hugging Face folder, opened.
        layers: first the one that drafts the nearest token.
        dtype: of the layers on disk.
        leave_out: names of files that are not to be copied.

    Returns:
        The file that holds the layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX_NAME).unlink(missing_ok=True)
    source = SafetensorsFiles(checkpoint.path)
    files: dict[Path, list[str]] = {}
    for name in source:
        files.setdefault(source.file_of(name), []).append(name)
    weight_map: dict[str, str] = {}
    for path, names in files.items():
        kept = [name for name in names if not name.startswith(MTP_PREFIX)]
        if len(kept) == len(names):
            _link(path, folder / path.name)
        elif kept:
            _save(folder / path.name, {name: source[name] for name in kept})
        weight_map |= dict.fromkeys(kept, path.name)
    arrays = {
        name: np.asarray(tensor.astype(dtype))
        for number, layer in enumerate(layers)
        for name, tensor in mtp_tensors(layer.bind(layer.leaves), number)
    }
    _save(folder / LAYERS_FILE, arrays)
    weight_map |= dict.fromkeys(arrays, LAYERS_FILE)
    for path in sorted(checkpoint.path.iterdir()):
        if path.is_file() and path.suffix in _COPIED and path.name not in (INDEX_NAME, *leave_out):
            shutil.copyfile(path, folder / path.name)
    if (checkpoint.path / _TEMPLATES).is_dir():
        shutil.copytree(checkpoint.path / _TEMPLATES, folder / _TEMPLATES, dirs_exist_ok=True)
    num_bytes = sum((arrays[name] if name in arrays else source[name]).nbytes for name in weight_map)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    partial = folder / f"{INDEX_NAME}.partial"
    partial.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / INDEX_NAME)
    return folder / LAYERS_FILE


def _link(source: Path, target: Path) -> None:
    """A second name of a file, or a copy where there can be none, in place of what was there."""
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), partial)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, partial)
    if target.exists() and target.samefile(partial):
        partial.unlink()  # renaming one name of a file to another does nothing
    else:
        partial.replace(target)


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    partial = path.with_name(path.name + ".partial")
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial, {"format": "pt"})
    partial.replace(path)
