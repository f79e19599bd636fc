"""Attention backends by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.metadata import entry_points

from jaxserve.attention.base import AttentionBackend, SharedReadEnds, no_sinks_text
from jaxserve.attention.hybrid import HybridBackend
from jaxserve.attention.native import NativeBackend
from jaxserve.attention.paged_cuda import PagedCudaBackend, why_not
from jaxserve.attention.xla import PlannedBackend, XlaBackend, XlaLiveBackend
from jaxserve.barrier.native import ffi_platform
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode

_BUILT_IN: dict[str, Callable[[], AttentionBackend]] = {
    backend.name: backend for backend in (XlaBackend, XlaLiveBackend, PlannedBackend, NativeBackend, PagedCudaBackend)
}
_registered: dict[str, Callable[[], AttentionBackend]] = {}
ENTRY_POINTS = "jaxserve.attention_backends"


class _UnauditedReads:
    """Mixed into a backend whose author declared nothing: the base class's answers were never meant for it."""

    def shared_read_ends(self, forward_mode: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.UNKNOWN


def register_attention_backend(name: str, backend: type[AttentionBackend]) -> None:
    """Makes a backend selectable by ``--attention-backend NAME``.

    A class that does not define ``shared_read_ends`` itself counts as not audited: it answers UNKNOWN in every mode,
    and gets the full-execution fence. What it inherits from a built-in backend was said of that backend's reads.

    Raises:
        ConfigError: the name is taken, or the class is not an ``AttentionBackend`` with its own ``attend``.
    """
    if name in _BUILT_IN or name in _registered or name in ("auto", "hybrid"):
        raise ConfigError(f"attention backend {name!r} is already registered; choose another name")
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise ConfigError(f"attention backend {name!r} must be a subclass of AttentionBackend, got {backend!r}")
    if backend.attend is AttentionBackend.attend:
        raise ConfigError(f"attention backend {name!r} must define attend()")
    if not _declares_itself(backend):
        backend = _unaudited(name, backend)
    _registered[name] = backend


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("jaxserve.attention.")


def _declares_itself(backend: type[AttentionBackend]) -> bool:
    """Whether its author, not only a class of ours that it derives from, says where its reads end."""
    return any("shared_read_ends" in vars(cls) for cls in backend.__mro__ if not _is_ours(cls))


def _unaudited(name: str, backend: type[AttentionBackend]) -> type[AttentionBackend]:
    return type(backend.__name__, (_UnauditedReads, backend), {"name": name})


def as_registered(backend: AttentionBackend) -> AttentionBackend:
    """A backend as registration would take it: one that declares nothing becomes a copy that answers UNKNOWN."""
    kind = type(backend)
    if _is_ours(kind) or _declares_itself(kind):
        return backend
    taken = copy.copy(backend)
    taken.__class__ = _unaudited(backend.name or kind.__name__, kind)
    return taken


def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name not in _registered and entry.name not in _BUILT_IN:
            register_attention_backend(entry.name, entry.load())


def backend_names() -> list[str]:
    """Every name ``--attention-backend`` takes."""
    _load_entry_points()
    return ["auto", *_BUILT_IN, "hybrid", *_registered]


def _single(name: str) -> AttentionBackend:
    factory = _BUILT_IN.get(name) or _registered.get(name)
    if factory is None:
        raise ConfigError(f"unknown attention backend {name!r}; known are {', '.join(backend_names())}")
    return factory()


def make_backend(config: EngineConfig, platform: str, dtype: str, has_sinks: bool = False) -> AttentionBackend:
    """The backend a configuration asks for.

    Args:
        has_sinks: whether the model it is for has attention sinks.

    Raises:
        ConfigError: an unknown name, a backend the platform cannot run or that lacks sinks the model has, or children
            without ``hybrid``.
    """
    backend = _make(config, platform, dtype)
    if has_sinks and not backend.supports_sinks:
        raise ConfigError(no_sinks_text(backend))
    return backend


def _make(config: EngineConfig, platform: str, dtype: str) -> AttentionBackend:
    _load_entry_points()
    native_runs = platform == "cpu" and dtype == "float32"
    default = "native" if native_runs else "xla"
    if config.graph_backend == "cuda-graph" and ffi_platform(platform) == "CUDA":
        default = PagedCudaBackend.name  # the kernel that those graphs hold
    name = default if config.attention_backend == "auto" else config.attention_backend
    children = [config.prefill_attention_backend, config.decode_attention_backend]
    if name != "hybrid":
        if any(children):
            flags = "--prefill-attention-backend and --decode-attention-backend"
            raise ConfigError(f"{flags} need --attention-backend hybrid")
        chosen = [name]
    else:
        chosen = [child or default for child in children]
    if "native" in chosen and not native_runs:
        raise ConfigError(f"the native backend runs float32 on the CPU, not {dtype} on {platform}; choose xla")
    if PagedCudaBackend.name in chosen:
        reason = "this is " + platform if ffi_platform(platform) != "CUDA" else why_not(dtype, config.page_size)
        if reason is not None:
            raise ConfigError(f"the paged-cuda backend runs bfloat16 on NVIDIA GPUs: {reason}; choose xla")
    if name != "hybrid":
        return _single(name)
    return HybridBackend(prefill=_single(chosen[0]), decode=_single(chosen[1]))
