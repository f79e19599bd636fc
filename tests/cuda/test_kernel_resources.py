"""What our kernels use of an H100's multiprocessor, by the compiler's own report. Needs nvcc and no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxserve.attention.paged_cuda import HEAD_DIMS
from jaxserve.testing import deviceless

CSRC = Path(__file__).parents[2] / "csrc"
DECODER = ("embed_rows", "add_norm", "rotate_heads", "gate_up", "copy_columns", "copy_areas")
NAMES = ("paged_attention", "merge_attention", *DECODER)
REGISTERS, THREADS = 65536, 128  # of a multiprocessor; of a block
SHARED_BYTES = 227 * 1024


class Use(NamedTuple):
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def parse(report: str) -> dict[str, Use]:
    """{"paged_attention<64>": ...} from what ``ptxas -v`` says."""
    found = {}
    for part in report.split("Compiling entry function ")[1:]:
        name = re.search(r"\d(" + "|".join(NAMES) + r")(?:ILi(\d+)E)?E", part)
        assert name is not None, part.splitlines()[0]
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        ).groups()  # type: ignore[union-attr]
        shared = re.search(r"(\d+) bytes smem", part)
        registers = re.search(r"Used (\d+) registers", part)
        label = f"{name[1]}<{name[2]}>" if name[2] else name[1]
        found[label] = Use(int(registers[1]), int(shared[1]) if shared else 0, int(stack), int(stores) + int(loads))  # type: ignore[index]
    return found


def compiled(source: str, folder: Path) -> dict[str, Use]:
    home = deviceless.cuda_data_dir()
    if home is None or not (home / "bin" / "nvcc").is_file():
        pytest.skip("no nvcc: put it on PATH or set CUDA_HOME")
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90,code=sm_90", f"-I{CSRC}"]
    command = [home / "bin" / "nvcc", *flags, "-Xptxas", "-v", "-cubin", "-o", folder / "cubin", CSRC / "cuda" / source]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return parse(done.stderr + done.stdout)


@pytest.fixture(scope="module")
def used(tmp_path_factory) -> dict[str, Use]:
    """Of the attention kernels."""
    return compiled("paged_attention.cu", tmp_path_factory.mktemp("attention"))


@pytest.fixture(scope="module")
def used_by_decoder(tmp_path_factory) -> dict[str, Use]:
    """Of the other kernels of captured steps."""
    return compiled("decoder/kernels.cu", tmp_path_factory.mktemp("decoder"))


def test_there_is_a_kernel_for_every_head_dimension(used):
    assert set(used) == {*(f"paged_attention<{dim}>" for dim in HEAD_DIMS), "merge_attention"}


def test_nothing_is_spilled(used, used_by_decoder):
    assert set(used_by_decoder) == set(DECODER)
    uses = used | used_by_decoder
    assert {name: use for name, use in uses.items() if use.spill_bytes or use.stack_bytes} == {}


def test_the_small_kernels_fill_a_multiprocessor(used_by_decoder):
    """2048 threads, in blocks of 256."""
    assert {name: use for name, use in used_by_decoder.items() if -(-use.registers // 8) * 8 > REGISTERS // 2048} == {
        "gate_up": used_by_decoder["gate_up"]  # loads and unpacks two runs of eight; six blocks fit
    }
    assert -(-used_by_decoder["gate_up"].registers // 8) * 8 * 256 * 6 <= REGISTERS


@pytest.mark.parametrize(("dim", "blocks"), [(64, 5), (96, 3), (128, 3), (192, 2), (256, 2)])
def test_enough_blocks_fit_a_multiprocessor(used, dim, blocks):
    use = used[f"paged_attention<{dim}>"]
    rounded = -(-use.registers // 8) * 8  # registers come in eights
    assert min(REGISTERS // (rounded * THREADS), SHARED_BYTES // (use.shared_bytes + 1024)) >= blocks


def test_the_report_is_read_as_it_is_written():
    report = """\
ptxas info    : Compiling entry function '_ZN8jaxserve15paged_attentionILi64EEEvNS0_14PagedAttentionE' for 'sm_90'
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 95 registers, used 1 barriers, 6912 bytes smem
"""
    assert parse(report) == {"paged_attention<64>": Use(95, 6912, 16, 12)}
