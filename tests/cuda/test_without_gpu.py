"""What the CUDA twin does on a machine without a GPU: it loads, and refuses to work with a reason."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True).stdout.startswith(b"GPU")


without_gpu = pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
REASON = r"failed: cudaError(InsufficientDriver|NoDevice|InitializationError|StubLibrary|SystemNotReady): \w+"


def test_the_module_offers_what_the_cpu_twin_offers(cuda_module):
    from jaxserve import _cpu

    missing = set(dir(_cpu)) - set(dir(cuda_module))
    assert not missing
    for name in ("SharedBuffer", "EventRing", "Stream"):
        assert set(dir(getattr(_cpu, name))) <= set(dir(getattr(cuda_module, name)))
    assert cuda_module.platform == "CUDA"


def test_the_module_offers_both_variants_of_the_markers(cuda_module):
    assert set(cuda_module.handlers()) == {
        "jaxserve_snapshot",
        "jaxserve_snapshot_graph",
        "jaxserve_record_end",
        "jaxserve_record_end_graph",
        "jaxserve_hold",
        "jaxserve_compute_stream",
        "jaxserve_paged_attention_bf16",
        "jaxserve_captured_step",
    }


@without_gpu
def test_a_stream_is_refused_with_place_operation_and_reason(cuda_module):
    with pytest.raises(cuda_module.NativeError, match=r"^stream\.cc:\d+: cudaStreamCreateWithFlags " + REASON):
        cuda_module.Stream(2, 1024, 1.0)


@without_gpu
def test_a_ring_is_refused_with_place_operation_and_reason(cuda_module):
    with pytest.raises(cuda_module.NativeError, match=r"^event_ring\.cc:\d+: cudaEventCreateWithFlags " + REASON):
        cuda_module.EventRing("read_done", 4)


@without_gpu
def test_a_buffer_is_refused_with_place_operation_and_reason(cuda_module):
    with pytest.raises(cuda_module.NativeError, match=r"^shared_buffer\.cc:\d+: cudaGetDevice " + REASON):
        cuda_module.SharedBuffer(2, 4, False)


def test_sizes_are_checked_before_the_device(cuda_module):
    with pytest.raises(cuda_module.NativeError, match=r"wanted sizes from 1 to 2\^31 - 1, got \[0, 4\]"):
        cuda_module.SharedBuffer(0, 4, False)
    with pytest.raises(cuda_module.NativeError, match="at least 2 slots, got 1"):
        cuda_module.EventRing("read_done", 1)
    with pytest.raises(cuda_module.NativeError, match="at least one staging block"):
        cuda_module.Stream(0, 1024, 1.0)


def test_errors_belong_to_the_module_that_raised_them(cuda_module):
    from jaxserve import _cpu

    assert cuda_module.NativeError is not _cpu.NativeError
    with pytest.raises(_cpu.NativeError):
        _cpu.EventRing("read_done", 1)
    with pytest.raises(cuda_module.NativeError):
        cuda_module.EventRing("read_done", 1)


def test_the_compute_stream_is_unknown_before_a_program_ran(cuda_module):
    assert cuda_module.compute_stream() == 0


@pytest.mark.parametrize("num_bytes", [0, 63, 65])
def test_a_launch_ticket_has_64_bytes(cuda_module, num_bytes: int):
    cuda_module.set_current_launch(bytes(64))
    with pytest.raises(cuda_module.NativeError, match=f"wanted 64 contiguous bytes, got {num_bytes}"):
        cuda_module.set_current_launch(bytes(num_bytes))
