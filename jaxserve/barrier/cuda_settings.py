"""Environment settings under which the CUDA fences would fence nothing."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.core.errors import ConfigError

# Each makes XLA dispatch from a thread of its own.
_ASYNC_DISPATCH_SETTINGS = ("PJRT_GPU_ENABLE_ASYNC_DISPATCH", "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT")
_FALSE = ("", "0", "f", "false", "n", "no", "off")


def check_cuda_settings(environ: Mapping[str, str]) -> None:
    """Refuses settings under which a jitted call returns before its work is enqueued. Pass ``os.environ``.

    Raises:
        ConfigError: such a setting is on; the message names every one and says what to do.
    """
    found = [f"{name}={environ[name]}" for name in _ASYNC_DISPATCH_SETTINGS if _is_on(environ.get(name, ""))]
    if found:
        raise ConfigError(
            f"{' and '.join(found)}: XLA would enqueue programs from another thread after the call returned, so an "
            "event wait issued then would bind to the previous step and fence nothing; "
            f"unset {' and '.join(setting.partition('=')[0] for setting in found)}"
        )


def _is_on(value: str) -> bool:
    # Anything that isn't plainly off counts as on: the parsers that read these differ in what they accept.
    return value.strip().lower() not in _FALSE
