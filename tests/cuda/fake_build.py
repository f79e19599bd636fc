"""Builds csrc/cuda against a fake CUDA runtime, so that its host side runs on machines without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import jaxlib
import pybind11

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).parent / "fake"
BUILD = ROOT / "build" / "fake_cuda"


def sources() -> list[Path]:
    """The twin without its kernels, the bindings, and what stands for a device."""
    folders = [ROOT / "csrc" / "common", ROOT / "csrc" / "cuda", FAKE]
    return [ROOT / "csrc" / "module.cc", *(path for folder in folders for path in sorted(folder.rglob("*.cc")))]


def build(cuda_include: Path) -> Path:
    """Compiles what changed; returns the extension's path. Raises CalledProcessError if it doesn't compile."""
    jaxlib_include = Path(jaxlib.__file__).parent / "include"
    foreign = [jaxlib_include, pybind11.get_include(), sysconfig.get_path("include"), cuda_include]
    # `-Dcuda=`: pybind11 knows classes by their C++ name, and the real twin may be loaded in the same process.
    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-DJAXSERVE_CUDA=1"]
    flags += ["-Dcuda=cuda_on_cpu", f"-I{ROOT / 'csrc'}", f"-I{FAKE}", *(f"-isystem{path}" for path in foreign)]
    headers = [*(ROOT / "csrc").glob("**/*.h"), *FAKE.glob("*.h"), Path(__file__)]
    newest_header = max(path.stat().st_mtime for path in headers)
    BUILD.mkdir(parents=True, exist_ok=True)
    objects, changed = [], False
    for source in sources():
        target = BUILD / f"{source.parent.name}_{source.stem}.o"
        objects.append(target)
        if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, newest_header):
            subprocess.run(["g++", *flags, "-c", source, "-o", target], check=True)
            changed = True
    library = BUILD / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    if changed or not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", fresh], check=True)
        fresh.replace(library)  # another process may have the old one loaded
    return library


def load(library: Path) -> tuple[ModuleType, ctypes.CDLL]:
    """The twin's Python module, and the fake's own switches."""
    spec = importlib.util.spec_from_file_location("fake_cuda._cuda", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, ctypes.CDLL(str(library))
