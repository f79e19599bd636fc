"""Every CUDA runtime call in csrc/cuda goes through a check macro: one that fails unseen fences nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "csrc" / "cuda"
SOURCES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
MACROS = r"JAXSERVE_CUDA_(?:CHECK|QUERY|REPORT)\("
# Functions that return no error code: they only put one into words.
UNCHECKED = {"cudaGetErrorName", "cudaGetErrorString"}


def unchecked_calls(source: str) -> list[str]:
    """Lines ("number: text") that call CUDA, or launch a kernel, without a check."""
    lines = [re.sub(r'//.*|"[^"\n]*"', "", line) for line in source.splitlines()]
    found = []
    for number, line in enumerate(lines):
        for call in re.finditer(r"\bcu(?:da)?[A-Z]\w*(?=\()", line):
            if call.group() not in UNCHECKED and not re.search(MACROS + r"$", line[: call.start()]):
                found.append(f"{number + 1}: {line.strip()}")
        if "<<<" in line:
            following = next((later for later in lines[number + 1 :] if later.strip()), "")
            if "JAXSERVE_CUDA_CHECK(cudaGetLastError())" not in following:
                found.append(f"{number + 1}: {line.strip()}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "cudaEventRecord(event, stream);",
        "const cudaError_t error = cudaMalloc(&data, bytes);",
        "if (cudaEventQuery(event) == cudaSuccess) return;",
        "JAXSERVE_CUDA_CHECK(cudaFree(a)); cudaFree(b);",
        "JAXSERVE_CHECK(cudaFree(a) == cudaSuccess, name, reason);",
        "(void)cudaGetLastError();",
        "cuStreamSynchronize(stream);",
        "scatter<<<1, 1, 0, stream>>>(s);\nreturn;",
        "scatter<<<1, 1, 0, stream>>>(s);\ncudaGetLastError();",
    ],
)
def test_the_scan_finds(source: str):
    assert unchecked_calls(source)


@pytest.mark.parametrize(
    "source",
    [
        "JAXSERVE_CUDA_CHECK(cudaEventRecord(event, stream));",
        "while (!JAXSERVE_CUDA_QUERY(cudaEventQuery(event))) {}",
        "if (data != nullptr) JAXSERVE_CUDA_REPORT(cudaFree(data));",
        "// cudaEventRecord(event, stream) would bind to the previous one",
        'std::string("cudaMalloc(x)")',
        "cudaEvent_t event = nullptr;",
        "reason = cudaGetErrorString(error);",
        "scatter<<<1, 1, 0, stream>>>(s);\nJAXSERVE_CUDA_CHECK(cudaGetLastError());",
    ],
)
def test_the_scan_accepts(source: str):
    assert unchecked_calls(source) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_call_is_checked(path: Path):
    assert unchecked_calls(path.read_text()) == []


def test_the_scan_reads_real_calls():
    text = "".join(path.read_text() for path in SOURCES)
    assert len(re.findall(MACROS, text)) > 20
