"""Reads the header of a GGUF file: metadata and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.core.errors import ModelLoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """One tensor in the file.

    Attributes:
        name: as in the file.
        shape: numpy order, ``[out, in]`` for matrices.
        kind: how the values are stored.
        start / end: bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    end: int


class GgufHeader:
    """Metadata and tensor directory of one file.

    Attributes:
        metadata: key -> value; arrays as lists.
        tensors: name -> ``GgufTensor``, in file order; every one lies inside the file.
    """

    def __init__(self, path: Path):
        """Reads the header.

        Raises:
            ModelLoadError: not a GGUF file, damaged, cut short, or a version or value type that is not known.
        """
        self._path = path
        self._position = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._data = data
                self._read()
                del self._data
        except (OSError, ValueError, struct.error, OverflowError, MemoryError) as error:
            # mmap refuses empty files with ValueError; reading past the end is struct.error.
            raise self._damaged(f"{type(error).__name__}: {error}") from error

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: not a complete GGUF file ({what}); download the model again")

    def _read(self) -> None:
        if self._data[:4] != b"GGUF":
            raise self._damaged(f"it begins with {bytes(self._data[:4])!r}, not b'GGUF'")
        self._position = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self._path}: GGUF version {version} is not supported; supported: 2 and 3")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        directory = [self._directory_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        for name, shape, kind, offset in directory:
            if name in self.tensors:
                raise self._damaged(f"tensor {name} appears twice")
            self.tensors[name] = self._checked_tensor(name, shape, kind, data_start + offset)

    def _scalar(self, form: str) -> Any:
        form = "<" + form
        (value,) = struct.unpack_from(form, self._data, self._position)
        self._position += struct.calcsize(form)
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        end = self._position + size
        if end > len(self._data):
            raise self._damaged(f"a string of {size} bytes at byte {self._position}")
        raw = self._data[self._position : end]
        self._position = end
        return raw.decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._scalar("I"), self._scalar("Q")
            if item_kind in _SCALARS:
                form = f"<{count}{_SCALARS[item_kind]}"
                values = struct.unpack_from(form, self._data, self._position)
                self._position += struct.calcsize(form)
                return list(values)
            return [self._value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._damaged(f"value type {kind} at byte {self._position}")
        return self._scalar(_SCALARS[kind])

    def _directory_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _checked_tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        try:
            quantization = gguf.GGMLQuantizationType(kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError):
            raise ModelLoadError(f"{self._path}: tensor {name} has unknown storage type {kind}") from None
        if not shape or shape[-1] % block:
            raise self._damaged(f"tensor {name} of shape {list(shape)} is stored in blocks of {block}")
        end = start + math.prod(shape) // block * block_bytes
        if end > len(self._data):
            raise ModelLoadError(
                f"{self._path}: cut short: tensor {name} ends at byte {end}, the file has {len(self._data)}; "
                "download the model again"
            )
        return GgufTensor(name, shape, quantization, start, end)


def dequantize(path: Path, tensor: GgufTensor) -> np.ndarray:
    """Values of one tensor as Float32.

    Raises:
        ModelLoadError: a storage type that cannot be dequantised; names tensor and type.
    """
    raw = np.memmap(path, mode="r", offset=tensor.start, shape=(tensor.end - tensor.start,), dtype=np.uint8)
    num_rows = math.prod(tensor.shape[:-1])
    try:
        return gguf.dequantize(np.asarray(raw).reshape(num_rows, -1), tensor.kind).reshape(tensor.shape)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"{path}: tensor {tensor.name} is stored as {tensor.kind.name}, which is not supported: {error}"
        ) from error
