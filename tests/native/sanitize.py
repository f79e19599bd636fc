"""Builds csrc with its C++ tests under sanitizers and runs them; then proves that mistakes would be reported.

    python tests/native/sanitize.py [--sanitizer thread|address] [--twin cpu|cuda] [--no-mutants] [TEST ...]

Both twins: the CUDA twin's host side runs on the fake runtime of tests/cuda/fake, and needs a toolkit's headers.
ThreadSanitizer in one build, AddressSanitizer with LeakSanitizer and UndefinedBehaviorSanitizer in the other.
Objects are kept in build/sanitize and compiled anew when what they include has changed.

Exit code: 0 when no test fails, nothing is reported, and every mutant of mutants.toml is; 1 when not; 2 when a tool is
missing. Run it with the interpreter that has jaxlib: the XLA FFI headers are jaxlib's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
BUILD = ROOT / "build" / "sanitize"
FAKE = ROOT / "tests" / "cuda" / "fake"
TIMEOUT_S = 600  # for one test program, some 25 s on a core of its own; a deadlock must not hold the build for ever
MUTANT_RUNS = 5  # at most: a race is reported when a run shows it, and a busy machine may order one whole run

# -fno-sanitize-recover: undefined behaviour ends the program, as the other reports make it fail.
SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=0 exitcode=66 second_deadlock_stack=1",
    # No fake stack: GCC aligns it less than the AVX-512 code of our kernels is told (GCC bug 110027).
    "ASAN_OPTIONS": "detect_leaks=1 detect_stack_use_after_return=0 strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
FLAGS = ["-std=c++17", "-O1", "-g1", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Wno-psabi", "-pthread"]
CPU_ONLY = ("test_attention.cc", "test_ngram.cc", "test_skinny_matmul.cc", "test_tasks.cc")


@dataclass(frozen=True)
class Mutant:
    """A mistake in csrc: ``find`` becomes ``replace`` in ``file``, and ``report`` (a pattern) must come of it."""

    name: str
    sanitizer: str
    twin: str
    file: str
    find: str
    replace: str
    tests: list[str]
    report: str


def ffi_include() -> Path:
    """The XLA FFI headers."""
    import jaxlib

    return Path(jaxlib.__file__).parent / "include"


def cuda_include() -> Path | None:
    """The headers of a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME")]
    if nvcc := shutil.which("nvcc"):
        plan = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
        homes += re.findall(r"_HERE_=(.+)", plan)[:1]
    for home in [*homes, "/usr/local/cuda"]:
        for include in (Path(home or "/nonexistent") / "include", Path(home or "/nonexistent").parent / "include"):
            if (include / "cuda_runtime.h").is_file():
                return include
    return None


class Build:
    """One twin under one sanitizer."""

    def __init__(self, sanitizer: str, twin: str, foreign: Iterable[Path]):
        self.folder = BUILD / f"{sanitizer}-{twin}"
        self.name = f"{sanitizer}, {twin}"
        self.program = self.folder / "tests"
        self.sanitizer = SANITIZERS[sanitizer]
        folders = [ROOT / "csrc" / "common", ROOT / "csrc" / twin, FOLDER]
        self.sources = [path for folder in folders for path in sorted(folder.rglob("*.cc")) if path.stem != "bindings"]
        self.flags = [*FLAGS, *self.sanitizer, f"-I{ROOT / 'csrc'}", f"-I{FOLDER}"]
        if twin == "cuda":
            self.sources = [path for path in self.sources if path.name not in CPU_ONLY]
            fakes = ("runtime", "kernels", "attention", "decoder", "emulated_ops")
            self.sources += [FAKE / f"{name}.cc" for name in fakes]
            self.flags += ["-DJAXSERVE_CUDA=1", f"-I{FAKE}"]
        self.flags += [f"-isystem{path}" for path in foreign]

    def object_of(self, source: Path) -> Path:
        """Where a source is compiled to."""
        return self.folder / f"{source.parent.name}_{source.stem}.o"

    def outdated(self) -> list[Path]:
        """Sources that have to be compiled."""
        return [source for source in self.sources if not self._is_current(source)]

    def _is_current(self, source: Path) -> bool:
        target = self.object_of(source)
        listed = target.with_suffix(".d")
        if not target.exists() or not listed.exists():
            return False
        built = target.stat().st_mtime
        included = listed.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return all(os.path.exists(p) and os.path.getmtime(p) <= built for p in [*included, __file__])

    def compile(self, source: Path, target: Path | None = None, includes: Iterable[str] = ()) -> None:
        """Compiles one source. Raises CalledProcessError."""
        target = target or self.object_of(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".new")  # an interrupted compilation leaves nothing that looks current
        depends = ["-MMD", "-MF", str(target.with_suffix(".d"))]
        subprocess.run(["g++", *includes, *self.flags, *depends, "-c", source, "-o", fresh], check=True)
        fresh.replace(target)

    def link(self, program: Path, replaced: dict[Path, Path] | None = None) -> None:
        """Links the test program, with some objects (by source) replaced."""
        objects = [(replaced or {}).get(source, self.object_of(source)) for source in self.sources]
        if replaced is None and program.exists():
            built = program.stat().st_mtime
            if all(o.stat().st_mtime <= built for o in objects):
                return
        subprocess.run(["g++", *self.sanitizer, "-pthread", *objects, "-o", program], check=True)


def execute(program: Path, tests: list[str]) -> tuple[int, str, float]:
    """Exit code (None becomes 124 for a program that hangs), output and seconds."""
    start = time.monotonic()
    command = [str(program), *tests]
    # Without address-space randomisation: ThreadSanitizer of this compiler cannot start where it is too random.
    if setarch := shutil.which("setarch"):
        command = [setarch, os.uname().machine, "-R", *command]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, env={**os.environ, **OPTIONS}
        )
    except subprocess.TimeoutExpired as error:
        return 124, f"{error.output or ''}\nit did not end within {TIMEOUT_S} s", time.monotonic() - start
    return ran.returncode, ran.stdout + ran.stderr, time.monotonic() - start


def try_mutant(build: Build, mutant: Mutant) -> str | None:
    """Builds csrc with a mistake and runs the tests it concerns. Returns what is wrong, None if it was reported."""
    folder = build.folder / f"mutant-{mutant.name}"
    original = ROOT / "csrc" / mutant.file
    text = original.read_text()
    if text.count(mutant.find) != 1:
        return f"{mutant.file} has {text.count(mutant.find)} times: {mutant.find!r}; adapt mutants.toml"
    shutil.rmtree(folder, ignore_errors=True)
    changed = folder / mutant.file
    changed.parent.mkdir(parents=True)
    changed.write_text(text.replace(mutant.find, mutant.replace))
    if original.suffix == ".cc":
        affected = {original: changed}
    else:  # a header: whatever includes it finds the changed one first
        depends = {s: build.object_of(s).with_suffix(".d").read_text() for s in build.sources}
        affected = {source: source for source, listed in depends.items() if str(original) in listed}
    replaced = {}
    for source, path in affected.items():
        replaced[source] = folder / f"{source.parent.name}_{source.stem}.o"
        build.compile(path, replaced[source], [f"-I{folder}"])
    program = folder / "tests"
    build.link(program, replaced)
    for _ in range(MUTANT_RUNS):
        code, output, _ = execute(program, mutant.tests)
        if code != 0:
            break
    else:
        return f"nothing was reported in {MUTANT_RUNS} runs"
    if not re.search(mutant.report, output):
        return f"it ended with {code}, but without {mutant.report!r}:\n{output[-3000:]}"
    shutil.rmtree(folder)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sanitizer", choices=list(SANITIZERS), action="append")
    parser.add_argument("--twin", choices=["cpu", "cuda"], action="append")
    parser.add_argument("--no-mutants", action="store_true")
    parser.add_argument("tests", nargs="*", help="parts of test names")
    arguments = parser.parse_args()
    if shutil.which("g++") is None:
        print("make sanitize needs g++; on Debian and Ubuntu: apt-get install g++", file=sys.stderr)
        return 2
    foreign = [ffi_include()]
    twins = arguments.twin or ["cpu", "cuda"]
    if "cuda" in twins:
        if (include := cuda_include()) is not None:
            foreign.append(include)
        else:
            print("!! NOT CHECKED: the CUDA twin, for want of cuda_runtime.h (put nvcc on PATH or set CUDA_HOME)")
            twins.remove("cuda")
    sanitizers = arguments.sanitizer or list(SANITIZERS)
    builds = {(s, t): Build(s, t, foreign) for s in sanitizers for t in twins}
    mutants = [Mutant(name=n, **m) for n, m in tomllib.loads((FOLDER / "mutants.toml").read_text()).items()]
    mutants = [] if arguments.no_mutants else [m for m in mutants if (m.sanitizer, m.twin) in builds]

    start = time.monotonic()
    num_wrong = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        work = [(build, source) for build in builds.values() for source in build.outdated()]
        try:
            list(pool.map(lambda item: item[0].compile(item[1]), work))
            list(pool.map(lambda build: build.link(build.program), builds.values()))
        except subprocess.CalledProcessError as error:
            print(f"failed: {error.cmd[0]} could not build {error.cmd[-3:]}")
            return 1
        print(f"compiled {len(work)} objects ({time.monotonic() - start:.0f} s)", flush=True)
        results = pool.map(lambda build: execute(build.program, arguments.tests), builds.values())
        for build, (code, output, seconds) in zip(builds.values(), results, strict=True):
            print(
                f"{build.name}: {'passed' if code == 0 else f'FAILED, exit code {code}'} ({seconds:.1f} s)", flush=True
            )
            if code != 0:
                num_wrong += 1
                print(output[-20_000:])
        answers = pool.map(lambda mutant: try_mutant(builds[mutant.sanitizer, mutant.twin], mutant), mutants)
        for mutant, wrong in zip(mutants, answers, strict=True):
            print(f"mutant {mutant.name}: {'NOT CAUGHT: ' + wrong if wrong else 'reported'}", flush=True)
            num_wrong += wrong is not None
    print(f"{'failed' if num_wrong else 'all is well'} ({time.monotonic() - start:.0f} s)")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
