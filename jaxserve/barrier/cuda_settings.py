"""Environment settings under which the CUDA fences would fence nothing, or too little."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.core.errors import ConfigError

# Each makes XLA dispatch from a thread of its own.
_ASYNC_DISPATCH_SETTINGS = ("PJRT_GPU_ENABLE_ASYNC_DISPATCH", "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT")
# XLA flags that let commands of a graph run in an order of their own: a marker would no longer follow what is in front
# of it. Flag -> values that keep the order.
_ORDER_FLAGS = {
    "xla_gpu_command_buffer_scheduling_mode": ("", "lhs", "serialize"),
    "xla_gpu_graph_enable_concurrent_region": ("0", "false"),
}
_FALSE = ("", "0", "f", "false", "n", "no", "off")


def check_cuda_settings(environ: Mapping[str, str]) -> None:
    """Refuses settings under which a jitted call returns before its work is enqueued. Pass ``os.environ``.

    Raises:
        ConfigError: such a setting is on, or a flag that ``check_xla_flags`` refuses; the message names every one and
            says what to do.
    """
    check_xla_flags(environ.get("XLA_FLAGS", ""))
    found = [f"{name}={environ[name]}" for name in _ASYNC_DISPATCH_SETTINGS if _is_on(environ.get(name, ""))]
    if found:
        raise ConfigError(
            f"{' and '.join(found)}: XLA would enqueue programs from another thread after the call returned, so an "
            "event wait issued then would bind to the previous step and fence nothing; "
            f"unset {' and '.join(setting.partition('=')[0] for setting in found)}"
        )


def check_xla_flags(flags: str) -> None:
    """Refuses XLA flags under which a marker in a CUDA graph orders nothing. Pass the value of ``XLA_FLAGS``.

    Raises:
        ConfigError: such a flag is given; the message names every one and says what to do.
    """
    found = []
    for word in flags.split():
        name, has_value, value = word.removeprefix("--").partition("=")
        allowed = _ORDER_FLAGS.get(name)
        if allowed is not None and (value.strip("\"'").lower() if has_value else "true") not in allowed:
            found.append(word)
    if found:
        raise ConfigError(
            f"XLA_FLAGS: {' and '.join(found)} lets the parts of a CUDA graph run side by side: a read-done marker "
            "would not come behind the reads; remove it"
        )


def _is_on(value: str) -> bool:
    # Anything that isn't plainly off counts as on: the parsers that read these differ in what they accept.
    return value.strip().lower() not in _FALSE
