"""A draft checkpoint as it lies on disk, in one form for every layout that is published.

Layouts read: EAGLE and EAGLE-3 as their authors and SGLang publish them, vLLM's *speculators*
(``transformer_layer_config`` inside), and DFLASH as Z Lab publishes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.loading.safetensors_files import SafetensorsFiles
from jaxserve.text.tokenizer import read_json

# What a checkpoint can be, and how to say it.
KINDS = {
    "EAGLE": "an EAGLE head",
    "EAGLE3": "an EAGLE-3 head",
    "DFLASH": "a DFLASH head",
    "MTP": "multi-token-prediction (MTP) layers",
    "STANDALONE": "a whole model",
}


@dataclass(frozen=True)
class DraftFiles:
    """A draft checkpoint, opened.

    Attributes:
        path: its folder.
        config: ``config.json``, with the keys of *speculators*' inner configuration lifted to the top.
        speculators: whether it is a *speculators* checkpoint.
        tensors: by canonical name: no ``model.`` in front, and ``layers.0`` for ``midlayer``.
        kind: a key of ``KINDS``, by its tensors.
    """

    path: Path
    config: dict[str, Any]
    speculators: bool
    tensors: Mapping[str, np.ndarray] = field(repr=False)
    kind: str


def open_draft_files(path: Path) -> DraftFiles:
    """Opens a draft checkpoint; no weights are read yet.

    Raises:
        ModelLoadError: no such folder, a missing or damaged file, or a checkpoint of no known kind.
    """
    if path.suffix == ".gguf" and path.is_file():
        return DraftFiles(path, {}, False, {}, "STANDALONE")
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"{path}: wanted a draft checkpoint, a folder with config.json and model.safetensors; found no config.json"
        )
    raw = read_json(path / "config.json")
    speculators = "transformer_layer_config" in raw
    config = {**raw, **raw["transformer_layer_config"]} if speculators else dict(raw)
    for key in ("draft_vocab_size", "architectures"):  # said outside and meant for the draft
        if speculators and key in raw:
            config[key] = raw[key]
    if config.get("quantization_config"):
        raise ModelLoadError(f"{path / 'config.json'}: quantization_config is not supported for draft models")
    tensors = _CanonicalNames(SafetensorsFiles(path))
    return DraftFiles(path, config, speculators, tensors, _kind(path, raw, tensors))


def _kind(path: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
    names = set(tensors)
    if "fc.weight" in names:
        if "layers.0.hidden_norm.weight" in names:
            return "EAGLE3"
        if "hidden_norm.weight" in names or "dflash_config" in config:
            return "DFLASH"
        fc = tensors["fc.weight"]
        if fc.ndim == 2 and fc.shape[1] == 2 * fc.shape[0]:
            return "EAGLE"
    elif "layers.0.self_attn.q_proj.weight" in names and "embed_tokens.weight" in names:
        return "STANDALONE"
    elif any(re.search(r"(^|\.)mtp\.", name) for name in names):
        return "MTP"
    raise ModelLoadError(
        f"{path}: not a checkpoint of any known kind ({', '.join(KINDS.values())}); its tensors begin with "
        f"{', '.join(sorted(names)[:5])}"
    )


class _CanonicalNames(Mapping[str, np.ndarray]):
    """Tensors under canonical names."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = tensors
        self._names = {_canonical(name): name for name in tensors}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
