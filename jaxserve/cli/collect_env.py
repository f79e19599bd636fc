"""``jaxserve collect-env``: print what a bug report needs: versions, devices, settings."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.flags import add_engine_flags, engine_config
from jaxserve.core.config import EngineConfig
from jaxserve.server.version import version

if TYPE_CHECKING:
    from jaxserve.attention.base import AttentionBackend

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "safetensors", "fastapi", "uvicorn", "pydantic", "orjson")
PREFIXES = ("JAX", "XLA", "CUDA_VISIBLE_DEVICES", "HF_HOME", "OMP_NUM_THREADS", "TF_GPU")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's flags: which fence a configuration gets is one of the facts."""
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints one ``name: value`` per line; what cannot be found out says why instead of failing."""
    config = engine_config(arguments)
    facts = FACTS | {
        "attention backend": lambda: _backend(config).name,
        "shared reads": lambda: _shared_reads(config),
        "speculation": lambda: _speculation(config),
        "graph splits": _graph_splits,
    }
    for name, find in facts.items():
        try:
            print(f"{name}: {find()}")
        except Exception as error:
            print(f"{name}: unknown ({type(error).__name__}: {error})")
    for variable in sorted(os.environ):
        if variable.startswith(PREFIXES):
            hidden = any(word in variable for word in SECRET)
            print(f"env {variable}: {'(set, not shown)' if hidden else os.environ[variable]}")
    return 0


def _packages() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def _cpu() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores usable"


def _memory() -> str:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * page_bytes / 2**30:.1f} GiB"


def _ffi() -> str:
    # jaxlib does not tell at run time; its headers, which the extension is built with, do
    import jax

    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    numbers = {}
    for line in header.read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "#define" and words[1] in ("XLA_FFI_API_MAJOR", "XLA_FFI_API_MINOR"):
            numbers[words[1]] = words[2]
    return f"{numbers['XLA_FFI_API_MAJOR']}.{numbers['XLA_FFI_API_MINOR']}"


def _devices() -> str:
    import jax

    return ", ".join(f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices())


def _extension() -> str:
    built = [name for name in ("_cpu", "_cuda") if importlib.util.find_spec(f"jaxserve.{name}") is not None]
    return ", ".join(built) if built else "not built (see BUILD.md)"


def _products() -> str:
    import jax

    from jaxserve.models.skinny_matmul import SKINNY_ROWS, skinny_unavailable

    if jax.default_backend() != "cpu":
        return "XLA's"
    reason = skinny_unavailable()
    return f"XLA's: {reason}" if reason else f"the extension's, for up to {SKINNY_ROWS[-1]} rows of float32"


def _backend(config: EngineConfig) -> AttentionBackend:
    import jax

    from jaxserve.attention.registry import make_backend

    platform = jax.default_backend()
    dtype = ("float32" if platform == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype
    return make_backend(config, platform, dtype)


def _fences(config: EngineConfig) -> dict[str, tuple[str, str]]:
    """Per forward mode: where reads are declared to end and where they end, and the fence of such a step."""
    from jaxserve.core.forward_mode import ForwardMode
    from jaxserve.runner.phase_runner import resolve_read_ends
    from jaxserve.scheduler.war_barrier import fence_for

    backend, found = _backend(config), {}
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        declared, resolved = resolve_read_ends(
            backend, mode, has_marker=config.shared_read_marker, unsound=config.compat_unsound_fallback
        )
        cleared = _live_drafts(config) if mode is ForwardMode.TARGET_VERIFY else None
        fence = fence_for(
            resolved, mode, force_coarse=config.force_coarse_war_barrier, disabled=config.disable_war_barrier,
            published=None if cleared is None else False, coarse_reason=cleared,
        )  # fmt: skip
        ends = declared.name if declared is resolved else f"{declared.name} -> {resolved.name}"
        found[mode.name] = ends, ":".join(fence)
    return found


def _shared_reads(config: EngineConfig) -> str:
    return ", ".join(f"{mode} {ends} ({fence})" for mode, (ends, fence) in _fences(config).items())


def _live_drafts(config: EngineConfig) -> str | None:
    """The algorithm whose verify steps read drafts behind the marker, which takes the full-execution fence."""
    if config.speculative_algorithm is None:
        return None
    from jaxserve.runner.step_program import DraftRows
    from jaxserve.speculative.registry import find_algorithm

    algorithm = find_algorithm(config.speculative_algorithm)
    return algorithm.name.lower() if algorithm.draft_form(config).rows is DraftRows.LIVE else None


def _speculation(config: EngineConfig) -> str:
    if config.speculative_algorithm is None:
        return "off"
    from jaxserve.speculative.registry import find_algorithm, settled

    config = settled(config)
    assert config.speculative_algorithm is not None
    algorithm = find_algorithm(config.speculative_algorithm)
    drafts = "trees" if algorithm.draft_form(config).is_tree else "chains"
    pace = "adaptive" if config.speculative_adaptive else "not adaptive"
    fence = _fences(config)["TARGET_VERIFY"][1]
    return f"{algorithm.name}, {config.speculative_num_draft_tokens} draft tokens, {drafts}, {pace}, fence {fence}"


def _graph_splits() -> str:
    import jax

    if jax.default_backend() == "cpu":
        return "none on the CPU; check-programs --target h100 tells those of an H100"
    return "see check-programs --target h100"


FACTS: dict[str, Callable[[], str]] = {
    "jaxserve": version,
    "python": lambda: f"{sys.version.split()[0]} ({platform.python_implementation()})",
    "platform": platform.platform,
    "packages": _packages,
    "cpu": _cpu,
    "memory": _memory,
    "extension": _extension,
    "XLA FFI API": _ffi,
    "devices": _devices,
    "few-row products": _products,
}
