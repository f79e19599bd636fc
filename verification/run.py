"""Checks the model of the barrier with ``spin``, and that every fault of ``mutants.txt`` is refuted.

    python verification/run.py [--only NAME ...] [--sound-only] [--no-write]

Needs ``spin`` and a C compiler; nothing else. Counterexamples go to ``verification/counterexamples/``.
Exit code: 0 when the sound model holds everywhere and every mutant is refuted in the way it should be; 1 when not;
2 when a tool is missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER / "barrier.pml"
COUNTEREXAMPLES = FOLDER / "counterexamples"
LANES = {"host": "host", "stream": "schedule stream", "exec": "XLA executions"}
LANE_WIDTH = 44
TIMEOUT_S = 120
MEMORY_MIB = 1500

_ONE_CLEAR = "-DSTEPS=2 -DWITH_SPEC -DMAXFAIL=1 -DONLY_PRE"
# What the sound model must survive. Each is as large as a few seconds allow.
SOUND = {
    "plain steps": "-DSTEPS=5 -DMAXRECYCLE=2",
    "plain steps, one failure": "-DSTEPS=3 -DMAXFAIL=1 -DMAXRECYCLE=2",
    "no marker, one failure": "-DSTEPS=4 -DNO_MARKER -DMAXFAIL=1",
    "NGRAM, mailbox cleared": "-DSTEPS=4 -DWITH_NGRAM",
    "NGRAM, drafts snapshotted": "-DSTEPS=4 -DWITH_NGRAM -DNGRAM_RELAY",
    # The original's bug: the coarse fence orders this gather by accident, the fine one does not (accepted_read_early).
    "NGRAM, tokens gathered behind the coarse fence": "-DSTEPS=3 -DWITH_NGRAM -DMUTANT_ACCEPTED_READ_EARLY",
    "target and draft runner": "-DSTEPS=2 -DWITH_SPEC",
    "owner changes, three steps": "-DSTEPS=3 -DWITH_SPEC -DMAXRECYCLE=0",
    "target and draft runner, one failure": "-DSTEPS=2 -DWITH_SPEC -DMAXFAIL=1 -DMAXRECYCLE=0",
    "no marker, target and draft runner": "-DSTEPS=2 -DWITH_SPEC -DNO_MARKER -DMAXFAIL=1",
    "every host step interleaved": "-DSTEPS=2 -DMAXFAIL=1 -DFINE_GRAINED",
    "mailbox cleared by recovery only": f"{_ONE_CLEAR} -DWITHOUT_CLEAR_WHEN_LAUNCH_FAILS",
    "mailbox cleared by the launch only": f"{_ONE_CLEAR} -DWITHOUT_CLEAR_WHEN_RECOVERING",
    "one staging block": "-DSTEPS=4 -DNSTAGE=1",
}
# Everything is fenced in the end, as an LTL property. A deadlock is caught by the runs above as well.
LIVE = {
    "liveness, one failure": "-DSTEPS=3 -DMAXFAIL=1 -DMAXRECYCLE=0",
    "liveness, target and draft runner": "-DSTEPS=2 -DWITH_SPEC -DMAXRECYCLE=0",
}


@dataclass(frozen=True)
class Mutant:
    """A fault; the fields are explained in mutants.txt."""

    name: str
    flags: str
    finds: str
    engine: str
    stall: str
    fault: str


@dataclass(frozen=True)
class Outcome:
    """What one run of the verifier said.

    Attributes:
        verdict: "holds", "deadlock", "liveness", or the name of the assertion that failed: WAR, RAW, AWAITED (a ring
            slot reserved under a waiter), MISDELIVERED, LEFT (something owed or pinned at the end).
    """

    verdict: str
    states: int
    seconds: float
    events: list[tuple[str, str]]


class VerificationError(Exception):
    """The verifier could not be built or did not finish."""


def read_mutants() -> list[Mutant]:
    """The blocks of mutants.txt, those that are not modelled included."""
    lines = (line for line in (FOLDER / "mutants.txt").read_text().splitlines() if not line.startswith("#"))
    blocks = [block for block in "\n".join(lines).split("\n\n") if block.strip()]
    return [Mutant(**dict(line.split(": ", 1) for line in block.strip().splitlines())) for block in blocks]


def modelled() -> list[Mutant]:
    """The mutants that the model has."""
    return [mutant for mutant in read_mutants() if mutant.flags != "none"]


def verify(flags: str, *, shortest: bool = False, live: bool = False) -> Outcome:
    """Builds and runs the verifier of the model with these macros.

    Args:
        flags: macros of barrier.pml.
        shortest: search breadth first, so that a counterexample is as short as one can be.
        live: check the LTL property instead of assertions and deadlocks.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        macros = [*flags.split(), *(["-DLIVENESS"] if live else [])]
        _run(["spin", *macros, "-a", str(MODEL)], folder)
        how = [] if live else ["-DSAFETY"]
        how += ["-DCOLLAPSE", *(["-DBFS"] if shortest else [])]
        _run([_compiler(), "-O1", "-w", f"-DMEMLIM={MEMORY_MIB}", *how, "-o", "pan", "pan.c"], folder)
        said = _run(["./pan", "-n", "-m20000", *(["-a"] if live else [])], folder)
        stored = re.search(r"(\d+) states, stored", said)
        if stored is None or "max search depth too small" in said or "MEMLIM" in said:
            raise VerificationError(f"{flags}: the search did not finish:\n{said[-1500:]}")
        states = int(stored.group(1))
        if re.search(r"errors: 0\b", said):
            return Outcome("holds", states, time.monotonic() - start, [])
        trail = next(Path(folder).glob("*.trail"))
        replay = _run(["spin", *macros, "-T", "-B", "-k", str(trail), str(MODEL)], folder)
        printed = [line.strip() for line in replay.splitlines()]
        events = [tuple(line[2:].split(" ", 1)) for line in printed if line.startswith("@ ")]
        return Outcome(_verdict(said, events), states, time.monotonic() - start, events)


def _verdict(said: str, events: list[tuple[str, str]]) -> str:
    named = re.match(r"!! ([A-Z]+):", events[-1][1]) if events else None
    if "pan:1: assertion violated" in said and named:  # every assertion of the model prints its name first
        return named.group(1)
    if "pan:1: invalid end state" in said:
        return "deadlock"
    if "pan:1: acceptance cycle" in said:
        return "liveness"
    raise VerificationError(f"an error of the model itself:\n{said}")


def _compiler() -> str:
    return next(name for name in ("gcc", "cc", "clang") if shutil.which(name))


def _run(command: list[str], folder: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, timeout=TIMEOUT_S, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.TimeoutExpired as error:
        raise VerificationError(f"{command[0]} did not finish in {TIMEOUT_S} s") from error
    if "Error:" in done.stdout and command[0] == "spin" and "-a" in command:
        raise VerificationError(f"spin refused the model:\n{done.stdout}")
    if command[0] != "spin" and "pan.c" in command and done.returncode:
        raise VerificationError(f"the verifier did not compile:\n{done.stdout}")
    return done.stdout


# -- counterexamples ---------------------------------------------------------------------------------------------------


def as_table(events: list[tuple[str, str]]) -> str:
    """One line for each event, in the lane where it happens."""
    heads = list(LANES.values())
    lines = ["  #  " + " | ".join(head.ljust(LANE_WIDTH) for head in heads).rstrip()]
    lines.append("---- " + "-+-".join("-" * LANE_WIDTH for _ in heads))
    for number, (lane, text) in enumerate(events, 1):
        for i, part in enumerate(textwrap.wrap(text, LANE_WIDTH, subsequent_indent="  ")):
            cells = [part.ljust(LANE_WIDTH) if lane == name else " " * LANE_WIDTH for name in LANES]
            lines.append((f"{number:3}  " if i == 0 else "     ") + " | ".join(cells).rstrip())
    return "\n".join(lines)


def write_counterexample(mutant: Mutant, outcome: Outcome) -> None:
    """Saves the table of a refuted mutant."""
    COUNTEREXAMPLES.mkdir(exist_ok=True)
    deadlock = outcome.verdict == "deadlock"
    end = "Deadlock: from here on nobody can move." if deadlock else f"Violated: {outcome.verdict}."
    text = f"{mutant.name}\n\n" + textwrap.fill(mutant.fault, 100) + "\n\n"
    text += f"Found with {mutant.flags}\n\n{as_table(outcome.events)}\n\n{end}\n"
    (COUNTEREXAMPLES / f"{mutant.name}.txt").write_text(text)


# -- the whole check ---------------------------------------------------------------------------------------------------


def base_flags(mutant: Mutant) -> str | None:
    """The macros of a mutant's model without the fault; None where the size of the model is the fault or part of it."""
    if "MUTANT_" not in mutant.flags or "-DRING=" in mutant.flags:
        return None
    return " ".join(flag for flag in mutant.flags.split() if "MUTANT_" not in flag)


def check_sound(only: set[str]) -> bool:
    """Runs the sound model. Returns whether it holds everywhere."""
    good = True
    # The models that faults are put into. Each must hold without its fault, or a counterexample would mean nothing.
    bases = sorted({base_flags(mutant) for mutant in modelled()} - {None} - set(SOUND.values()))
    for name, flags in {**SOUND, **LIVE, **{f"base {flags}": flags for flags in bases}}.items():
        if only and name not in only:
            continue
        outcome = verify(flags, live=name in LIVE)
        good &= outcome.verdict == "holds"
        print(f"{'holds' if outcome.verdict == 'holds' else 'FAILS':8} {name:56} {outcome.states:10,} states "
              f"{outcome.seconds:5.1f} s", flush=True)  # fmt: skip
        if outcome.verdict != "holds":
            print(f"{outcome.verdict}:\n{as_table(outcome.events)}")
    return good


def check_mutants(only: set[str], write: bool) -> bool:
    """Runs every mutant. Returns whether each is refuted in the way it should be."""
    good = True
    for mutant in modelled():
        if only and mutant.name not in only:
            continue
        outcome = verify(mutant.flags, shortest=True)
        refuted = outcome.verdict == mutant.finds
        good &= refuted
        word = "refuted" if refuted else "SURVIVES" if outcome.verdict == "holds" else "CHANGED"
        print(f"{word:8} {mutant.name:56} {outcome.states:10,} states {outcome.seconds:5.1f} s  "
              f"{outcome.verdict} after {len(outcome.events)} events", flush=True)  # fmt: skip
        if refuted and write:
            write_counterexample(mutant, outcome)
        elif not refuted:
            print(f"  wanted: {mutant.finds}. {mutant.fault}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of mutants or of sound runs")
    parser.add_argument("--sound-only", action="store_true", help="leave the mutants out")
    parser.add_argument("--no-write", action="store_true", help="leave verification/counterexamples as it is")
    options = parser.parse_args()
    if shutil.which("spin") is None:
        print("spin is not installed. On Debian and Ubuntu: apt-get install spin", file=sys.stderr)
        return 2
    if not any(shutil.which(name) for name in ("gcc", "cc", "clang")):
        print("no C compiler was found. On Debian and Ubuntu: apt-get install gcc", file=sys.stderr)
        return 2
    known = {*SOUND, *LIVE, *(mutant.name for mutant in modelled())}
    only = set(options.only)
    if only - known:
        print(f"unknown: {', '.join(sorted(only - known))}; known are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    start = time.monotonic()
    try:
        good = check_sound(only)
        if not options.sound_only:
            good &= check_mutants(only, not options.no_write)
    except VerificationError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{'all as it should be' if good else 'NOT as it should be'} ({time.monotonic() - start:.0f} s)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
