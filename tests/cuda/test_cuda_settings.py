"""The start-up check of settings that make the CUDA fences useless."""

from __future__ import annotations

import pytest

from jaxserve.barrier.cuda_settings import check_cuda_settings
from jaxserve.core.errors import ConfigError

SETTINGS = ("PJRT_GPU_ENABLE_ASYNC_DISPATCH", "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT")


def test_unset_passes():
    check_cuda_settings({"XLA_FLAGS": "--xla_dump_to=x"})


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", ["", "0", "false", "False", "no", "off", " 0 "])
def test_off_passes(name: str, value: str):
    check_cuda_settings({name: value})


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", "on", "2"])
def test_on_is_refused_with_reason_and_remedy(name: str, value: str):
    with pytest.raises(ConfigError, match=f"{name}={value}: .*fence nothing; unset {name}$"):
        check_cuda_settings({name: value})


@pytest.mark.parametrize(
    "flag",
    ["--xla_gpu_command_buffer_scheduling_mode=CONCURRENT", "--xla_gpu_graph_enable_concurrent_region",
     "--xla_gpu_graph_enable_concurrent_region=true"],
)  # fmt: skip
def test_flags_that_take_the_order_from_graphs_are_refused(flag: str):
    with pytest.raises(ConfigError, match=f"^XLA_FLAGS: {flag} lets .*; remove it$"):
        check_cuda_settings({"XLA_FLAGS": f"--xla_dump_to=x {flag}"})


@pytest.mark.parametrize(
    "flag",
    ["--xla_gpu_command_buffer_scheduling_mode=LHS", "--xla_gpu_graph_enable_concurrent_region=false",
     "--xla_gpu_graph_min_graph_size=3"],
)  # fmt: skip
def test_flags_that_keep_the_order_pass(flag: str):
    check_cuda_settings({"XLA_FLAGS": flag})


def test_every_setting_is_named():
    with pytest.raises(ConfigError) as raised:
        check_cuda_settings(dict.fromkeys(SETTINGS, "1"))
    assert all(f"{name}=1" in str(raised.value) for name in SETTINGS)
    assert f"unset {SETTINGS[0]} and {SETTINGS[1]}" in str(raised.value)
