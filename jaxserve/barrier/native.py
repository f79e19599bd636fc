"""Finds the native extension of a platform, checks that it fits the installed jaxlib, registers its FFI targets."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from types import ModuleType

import jax

from jaxserve.core.errors import ConfigError

# JAX knows the CUDA platform by several names but registers FFI targets under this spelling only: the lower-case one
# is accepted and then never found.
_MODULES = {"cpu": "jaxserve._cpu", "CUDA": "jaxserve._cuda"}


def ffi_platform(platform: str) -> str:
    """The spelling of a JAX platform ("cpu", "gpu", "cuda") that FFI registration and our modules use."""
    return "CUDA" if platform.lower() in ("gpu", "cuda") else platform


def runtime_ffi_minor() -> int:
    """Minor version of the XLA FFI interface of the installed jaxlib, read from the headers it carries."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = re.search(r"#define XLA_FFI_API_MINOR (\d+)", header.read_text())
    if found is None:
        raise ConfigError(f"{header} names no XLA_FFI_API_MINOR; jaxserve supports jaxlib 0.10 to 0.12")
    return int(found.group(1))


@functools.cache
def native_module(platform: str) -> ModuleType:
    """The extension for ``platform``, with its handlers registered.

    Raises:
        ConfigError: it is not built, or was built against a newer FFI than the installed jaxlib offers. Such a
            handler would otherwise take the whole backend down when it is first used.
    """
    name = ffi_platform(platform)
    if name not in _MODULES:
        raise ConfigError(f"no native extension for platform {platform!r}; known are cpu and cuda")
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise ConfigError(f"{_MODULES[name]} is not built ({error}); run `pip install -e .` (see BUILD.md)") from error
    runtime = runtime_ffi_minor()
    if module.ffi_api_minor > runtime:
        raise ConfigError(
            f"{_MODULES[name]} was built against XLA FFI 0.{module.ffi_api_minor}, but jaxlib offers 0.{runtime}; "
            "rebuild it against the installed jaxlib (see BUILD.md)"
        )
    for target, capsule in module.handlers().items():
        jax.ffi.register_ffi_target(target, capsule, platform=name)
    return module
