"""Compiles programs for an H100 on a machine without a GPU.

Needs the packages ``jax-cuda13-plugin`` and ``jax-cuda13-pjrt`` of the installed jax's version (``--no-deps`` will do)
and ``ptxas`` of a CUDA 13 toolkit. GEMMs aren't autotuned this way, so their kernels may differ from a real card's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

# The chip's public figures, as the compiler's GpuTargetConfigProto; part of the repository, not of the package.
H100_TARGET_CONFIG = Path(__file__).parents[2] / "tests" / "cuda" / "h100.txtpb"


def why_not() -> str | None:
    """What is missing for compiling for an H100 here; None if nothing is."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return f"jax_plugins.xla_cuda13 isn't importable; install jax-cuda13-plugin and -pjrt {jax.__version__}"
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return f"jax_cuda13_plugin isn't importable; install jax-cuda13-plugin {jax.__version__}"
    if cuda_data_dir() is None:
        return "no ptxas: put nvcc on PATH or set CUDA_HOME"
    if not H100_TARGET_CONFIG.is_file():
        return f"{H100_TARGET_CONFIG} is missing: run from a checkout of the repository"
    return None


@functools.cache
def cuda_data_dir() -> Path | None:
    """The CUDA toolkit's folder: ``CUDA_HOME``, else that of the nvcc on PATH, which may be a script calling it."""
    candidates: list[str | Path | None] = [os.environ.get("CUDA_HOME")]
    if nvcc := shutil.which("nvcc"):
        plan = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
        found = re.search(r"_HERE_=(.+)", plan)
        candidates += [Path(found.group(1).strip()).parent] if found else []
        candidates += [Path(os.path.realpath(nvcc)).parent.parent]
    for candidate in [*candidates, "/usr/local/cuda"]:
        if candidate and (Path(candidate) / "bin" / "ptxas").is_file():
            return Path(candidate)
    return None


@functools.cache
def h100_sharding() -> jax.sharding.SingleDeviceSharding:
    """A sharding on one H100 that isn't there: programs can be compiled for it, not run.

    Raises:
        RuntimeError: something is missing (see ``why_not``).
    """
    from jax.experimental import topologies

    if reason := why_not():
        raise RuntimeError(f"can't compile for an H100: {reason}")
    # The plugin refuses machines without a driver unless told, and reads XLA_FLAGS when it is loaded, below.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_cuda_data_dir" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={cuda_data_dir()}".strip()
    topology = topologies.get_topology_desc(
        "h100", platform="cuda", topology="1x1x1", target_config=H100_TARGET_CONFIG.read_text()
    )
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compile_for_h100(
    fn: Callable, *shapes, donate: Sequence[int] = (), options: dict[str, object] | None = None
) -> jax.stages.Compiled:
    """Compiles ``fn`` for one H100; its ``as_text()`` is the schedule that would run.

    Args:
        fn: what ``jax.jit`` takes; it may call the targets that ``native_module("CUDA")`` registers.
        shapes: ``jax.ShapeDtypeStruct`` (or pytrees of them), one per argument.
        donate: argument numbers to donate.
        options: compiler options.

    Raises:
        RuntimeError: something is missing (see ``why_not``).
    """
    sharding = h100_sharding()
    jitted = jax.jit(fn, in_shardings=sharding, out_shardings=sharding, donate_argnums=tuple(donate), keep_unused=True)
    lowered = jitted.trace(*shapes).lower(lowering_platforms=("cuda",))
    with _uncached():
        return lowered.compile(compiler_options=options)


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """No persistent cache: what is fetched from it dumps no thunks, whatever ``xla_dump_to`` says."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax has decided once and for all whether there is one
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
