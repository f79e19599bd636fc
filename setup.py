"""Builds the native extensions: ``jaxserve._cpu`` always, ``jaxserve._cuda`` where a CUDA toolkit is found.

JAXSERVE_CUDA=1    require the CUDA twin (fail if no toolkit is found)
JAXSERVE_CUDA=0    never build it
CUDA_HOME          where the toolkit is (default: the folder of nvcc, then /usr/local/cuda)
JAXSERVE_BUILD_JOBS    files compiled at a time (default: one per core)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import jaxlib
import pybind11
from pybind11.setup_helpers import ParallelCompile
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
COMMON = ["csrc/module.cc", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc/common").glob("*.cc")))]
CXX_FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi"]
NVCC_FLAGS = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90,code=sm_90"]


def ffi_include() -> str:
    """The XLA FFI headers. ``jaxlib`` carries them; importing jax itself is not needed to build."""
    include = Path(jaxlib.__file__).parent / "include"
    header = include / "xla/ffi/api/c_api.h"
    if not header.is_file():
        raise SystemExit(f"jaxlib {jaxlib.__version__} has no FFI headers at {header}; install jaxlib >= 0.10.2")
    minor = re.search(r"#define XLA_FFI_API_MINOR (\d+)", header.read_text())
    print(f"building against XLA FFI 0.{minor.group(1) if minor else '?'} (jaxlib {jaxlib.__version__})")
    return str(include)


def nvcc_home() -> Path | None:
    """The toolkit of the nvcc on PATH, which may be a script that calls the real one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    plan = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    found = re.search(r"_HERE_=(.+)", plan)
    return Path(found.group(1).strip()).parent if found else Path(os.path.realpath(nvcc)).parent.parent


def cuda_home() -> Path | None:
    wanted = os.environ.get("JAXSERVE_CUDA", "")
    if wanted == "0":
        return None
    for candidate in [os.environ.get("CUDA_HOME"), nvcc_home(), "/usr/local/cuda"]:
        if candidate and all((Path(candidate) / part).is_file() for part in ("bin/nvcc", "include/cuda_runtime.h")):
            return Path(candidate)
    if wanted == "1":
        raise SystemExit("JAXSERVE_CUDA=1, but no CUDA toolkit: put nvcc on PATH or set CUDA_HOME")
    return None


def is_newer(target: str, sources: list[str]) -> bool:
    return os.path.exists(target) and all(os.path.getmtime(target) > os.path.getmtime(s) for s in sources)


class BuildExt(build_ext):
    """Compiles each extension in its own folder (both share module.cc) and hands .cu files to nvcc."""

    def build_extension(self, ext: Extension) -> None:
        shared_temp = self.build_temp
        self.build_temp = os.path.join(shared_temp, ext.name)
        try:
            objects = self._compile_cuda(ext)
            ext.extra_objects = [*ext.extra_objects, *objects]
            ext.depends = [*ext.depends, *objects]  # a kernel compiled anew must be linked anew
            super().build_extension(ext)
        finally:
            self.build_temp = shared_temp

    def _compile_cuda(self, ext: Extension) -> list[str]:
        objects = []
        home = cuda_home()
        for source in [s for s in ext.sources if s.endswith(".cu")]:
            ext.sources.remove(source)
            target = os.path.join(self.build_temp, source + ".o")
            objects.append(target)
            if not self.force and is_newer(target, [source, *ext.depends]):
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            includes = [f"-I{path}" for path in ext.include_dirs]
            subprocess.run(
                [str(home / "bin/nvcc"), *NVCC_FLAGS, "-Xcompiler", "-fPIC", *includes, "-c", source, "-o", target],
                check=True,
            )
        return objects


def extensions() -> list[Extension]:
    # -isystem: the warnings of other people's headers are not ours to fix.
    foreign = ["-isystem", ffi_include(), "-isystem", pybind11.get_include()]
    headers = [str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.h")]

    def sources(twin: str) -> list[str]:
        found = sorted(p for pattern in ("*.cc", "*.cu") for p in (ROOT / "csrc" / twin).rglob(pattern))
        return COMMON + [str(p.relative_to(ROOT)) for p in found]

    built = [
        Extension("jaxserve._cpu", sources("cpu"), include_dirs=["csrc"], extra_compile_args=[*CXX_FLAGS, *foreign],
                  extra_link_args=["-pthread"], depends=headers, language="c++")
    ]  # fmt: skip
    home = cuda_home()
    if home is not None and (ROOT / "csrc/cuda/twin.h").is_file():
        built.append(
            Extension(
                "jaxserve._cuda",
                sources("cuda"),
                include_dirs=["csrc"],
                define_macros=[("JAXSERVE_CUDA", "1")],
                library_dirs=[str(home / "lib64")],
                # Static: the extension loads on machines without CUDA, where its calls then fail with a reason.
                libraries=["cudart_static", "dl", "rt", "pthread"],
                extra_compile_args=[*CXX_FLAGS, *foreign, "-isystem", str(home / "include")],
                depends=headers,
                language="c++",
            )
        )
    return built


with ParallelCompile("JAXSERVE_BUILD_JOBS", default=0):
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
