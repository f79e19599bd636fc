"""Tensors of a Hugging Face folder: one safetensors file, or shards with an index.

Format: https://github.com/huggingface/safetensors (8 bytes header length, JSON header, data). Everything the header
claims is checked against the file before any tensor is read, so that a cut file cannot read as zeros.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.core.errors import ModelLoadError
from jaxserve.text.tokenizer import read_json

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference reader


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies: byte ``start`` .. ``end`` of ``path``."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFiles(Mapping[str, np.ndarray]):
    """Tensor name -> array, mapped from the file when asked for (read-only)."""

    def __init__(self, folder: Path):
        """Reads and checks all headers.

        Raises:
            ModelLoadError: no safetensors file; a shard named in the index is missing, or lacks a tensor the index
                promises; a file that is cut short or whose header contradicts itself. Names file and tensor.
        """
        self._entries: dict[str, _Entry] = {}
        index_path = folder / INDEX_NAME
        if index_path.is_file():
            self._read_shards(folder, index_path)
        else:
            self._entries = read_header(_only_file(folder))

    def _read_shards(self, folder: Path, index_path: Path) -> None:
        promised = read_json(index_path).get("weight_map")
        if not isinstance(promised, dict) or not promised:
            raise ModelLoadError(f"{index_path}: weight_map is missing or empty")
        for shard in sorted(set(promised.values())):
            path = folder / shard
            if not path.is_file():
                raise ModelLoadError(f"{path}: shard named in {index_path.name} is missing; download the model again")
            for name, entry in read_header(path).items():
                if name in self._entries:
                    raise ModelLoadError(f"{path}: tensor {name} is also in {self._entries[name].path.name}")
                self._entries[name] = entry
        for name, shard in promised.items():
            if name not in self._entries or self._entries[name].path.name != shard:
                raise ModelLoadError(f"{folder / shard}: lacks tensor {name}, which {index_path.name} promises")

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.start == entry.end:
            return np.zeros(entry.shape, entry.dtype)
        raw = np.memmap(entry.path, mode="r", offset=entry.start, shape=(entry.end - entry.start,), dtype=np.uint8)
        return np.asarray(raw).view(entry.dtype).reshape(entry.shape)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._entries[name].path

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _only_file(folder: Path) -> Path:
    path = folder / "model.safetensors"
    if path.is_file():
        return path
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelLoadError(f"{folder}: {len(found)} safetensors files but no {INDEX_NAME}")
    raise ModelLoadError(f"{folder}: no model.safetensors; weights in other formats must be converted to safetensors")


def read_header(path: Path) -> dict[str, _Entry]:
    """Tensor name -> place in the file, all checked.

    Raises:
        ModelLoadError: not a safetensors file, cut short, or contradicting itself.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or header_size > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise ModelLoadError(
                f"{path}: not a complete safetensors file: its header should take {header_size} bytes, "
                f"the file has {num_bytes}"
            )
        try:
            header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            items = list(header.items())
        except (ValueError, AttributeError) as error:
            raise ModelLoadError(f"{path}: damaged header: {error}") from error
    return {name: _checked_entry(path, name, spec, 8 + header_size, num_bytes) for name, spec in items}


def _checked_entry(path: Path, name: str, spec: Any, data_start: int, num_bytes: int) -> _Entry:
    try:
        dtype_name, shape, (start, end) = spec["dtype"], tuple(spec["shape"]), spec["data_offsets"]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)) and start <= end
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ModelLoadError(f"{path}: damaged header entry of tensor {name}: {spec!r}")
    if dtype_name not in _DTYPES:
        raise ModelLoadError(
            f"{path}: tensor {name} has dtype {dtype_name}, which is not supported; supported: {', '.join(_DTYPES)}"
        )
    dtype = _DTYPES[dtype_name]
    wanted = math.prod(shape) * dtype.itemsize
    if end - start != wanted:
        raise ModelLoadError(
            f"{path}: tensor {name} of shape {list(shape)} and dtype {dtype_name} needs {wanted} bytes, "
            f"its header gives it {end - start}"
        )
    if data_start + end > num_bytes:
        raise ModelLoadError(
            f"{path}: cut short: tensor {name} ends at byte {data_start + end}, the file has {num_bytes}; "
            "download the model again"
        )
    return _Entry(path, dtype, shape, data_start + start, data_start + end)
