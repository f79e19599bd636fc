"""Proves on compiled programs that no read of a shared buffer comes after the read-done marker.

    text = jax.jit(step).lower(*shapes).compile().as_text()
    assert uses_after(text, ["block_tables", "lengths"], "jaxserve_snapshot", concurrent=True) == []

Source order proves nothing: XLA duplicates producers, drops barriers and reorders calls with side effects. What runs is
the schedule, and the memory a value lives in. Both are in the compiled text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxserve.testing.hlo_text import Computation, Instruction, Module, parse_module

# Path inside a tuple -> labels of the shared parameters whose memory lives there. Values are tracked as XLA's buffer
# assignment does: a bitcast shares its operand's memory, a copy has its own.
Aliases = dict[tuple, frozenset[str]]

_IN_FLIGHT = ("in flight",)  # path under which an asynchronous start keeps what it still reads
_RESULT = "result"
_SAME_MEMORY = ("bitcast", "optimization-barrier", "opt-barrier", "add-dependency", "domain")


def uses_after(
    hlo_text: str, parameters: Sequence[int | str], marker_target: str, *, concurrent: bool = False
) -> list[str]:
    """Uses of shared parameters that the marker doesn't come after.

    Args:
        hlo_text: a scheduled module, ``compiled.as_text()`` of the CPU or the GPU compiler.
        parameters: the shared buffers: entry parameter numbers, or names as JAX gives them (the argument's name, or
            its path like ``args[0]['lengths']``). Names are safer: jit drops unused arguments, which shifts numbers.
        marker_target: custom call target of the marker, e.g. ``"jaxserve_snapshot"``. The marker itself may read.
        concurrent: whether the executor may start an instruction before earlier ones have ended (the CPU's does). Then
            a reader scheduled before the marker counts too, unless the marker depends on it.

    Returns:
        One line for each use: where, what and why. Empty: proven.

    Raises:
        ValueError: the module isn't scheduled, holds no such marker, or has no such parameter.
    """
    return _findings(hlo_text, parameters, marker_target, concurrent=concurrent)


def reads_of(hlo_text: str, parameters: Sequence[int | str]) -> list[str]:
    """Every use of these parameters: what must be empty for a program whose reads ended before it was launched.

    Args:
        hlo_text: a scheduled module, as for ``uses_after``.
        parameters: as for ``uses_after``.

    Raises:
        ValueError: the module isn't scheduled, or has no such parameter.
    """
    return _findings(hlo_text, parameters, None, concurrent=False)


def _findings(
    hlo_text: str, parameters: Sequence[int | str], marker_target: str | None, *, concurrent: bool
) -> list[str]:
    module = parse_module(hlo_text)
    if not module.is_scheduled:
        raise ValueError("this HLO is not scheduled: its order proves nothing; pass the text of a compiled program")
    labels = {number: _label(module, number) for number in _numbers(module, parameters)}
    walk = _Walk(module, marker_target, concurrent)
    arguments: list[Aliases] = [
        {(): frozenset([labels[number]])} if number in labels else {} for number in sorted(module.entry.parameters())
    ]
    for number in sorted(labels):
        if number in module.donated:
            walk.found(f"{labels[number]} is donated: outputs are written over it")
    returned = walk.run(module.entry, arguments)
    if not walk.marker_seen:
        targets = sorted({t for t in map(_target, _all_instructions(module)) if t})
        raise ValueError(f"no custom call to {marker_target!r} in this program; its targets are {targets}")
    for label in sorted(_labels(returned)):
        walk.found(f"{module.entry.root.name} returns {label} itself, not a copy")
    return walk.findings


def _all_instructions(module: Module) -> list[Instruction]:
    return [i for computation in module.computations.values() for i in computation.instructions]


def _target(instruction: Instruction) -> str | None:
    return instruction.attribute("custom_call_target") if instruction.opcode.startswith("custom-call") else None


def _numbers(module: Module, parameters: Sequence[int | str]) -> set[int]:
    entry = module.entry.parameters()
    numbers = set()
    for wanted in parameters:
        matches = [n for n, p in entry.items() if n == wanted or (isinstance(wanted, str) and wanted in _names(p))]
        if not matches:
            known = ", ".join(f"{n}: {' or '.join(sorted(_names(p)))}" for n, p in sorted(entry.items()))
            raise ValueError(f"no entry parameter {wanted!r}; the program has {known}")
        numbers.update(matches)
    return numbers


def _names(parameter: Instruction) -> set[str]:
    names = {parameter.name, re.sub(r"(\.\d+)+$", "", parameter.name)}
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', parameter.attributes)
    if found:
        names.add(found.group(1).replace("\\'", "'").replace('\\"', '"'))
    return names


def _label(module: Module, number: int) -> str:
    return f"parameter {number} ({module.entry.parameters()[number].name})"


def _labels(aliases: Aliases) -> frozenset[str]:
    return frozenset().union(*aliases.values())


def _union(*several: Aliases) -> Aliases:
    merged: Aliases = {}
    for aliases in several:
        for path, labels in aliases.items():
            merged[path] = merged.get(path, frozenset()) | labels
    return merged


def _inside(aliases: Aliases, prefix: tuple) -> Aliases:
    """The part of a value under a path; a whole that aliases makes every part alias."""
    parts = [{path[len(prefix) :]: labels} for path, labels in aliases.items() if path[: len(prefix)] == prefix]
    wholes = [{(): labels} for path, labels in aliases.items() if path != prefix and path == prefix[: len(path)]]
    return _union(*parts, *wholes)


def _under(aliases: Aliases, prefix: tuple) -> Aliases:
    return {(*prefix, *path): labels for path, labels in aliases.items()}


class _Walk:
    """Goes through a program in the order of its schedule, into every computation it calls.

    Attributes:
        marker_seen: whether the walk has passed a marker.
        findings: the uses found, in order, each once.
    """

    def __init__(self, module: Module, marker_target: str | None, concurrent: bool):
        self.marker_seen = marker_target is None  # no marker: every read counts
        self.findings: list[str] = []
        self._module = module
        self._marker_target = marker_target
        self._callers: list[str] = []  # instructions whose computations the walk is inside of
        self._marked: dict[str, bool] = {}  # computation -> whether it, or one that it calls, holds a marker
        self._before_marker = self._feeding_the_marker() if concurrent else None

    def found(self, finding: str) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    def run(self, computation: Computation, arguments: list[Aliases]) -> Aliases:
        """Walks a computation; returns what its result aliases."""
        values: dict[str, Aliases] = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                number = int(instruction.argument_text)
                values[instruction.name] = arguments[number] if number < len(arguments) else {}
            else:
                operands = [values.get(name, {}) for name in instruction.operands]
                values[instruction.name] = self._step(computation, instruction, operands)
        return values[computation.root.name]

    def _step(self, computation: Computation, instruction: Instruction, operands: list[Aliases]) -> Aliases:
        opcode = instruction.opcode
        if opcode == "tuple":
            return _union(*[_under(aliases, (i,)) for i, aliases in enumerate(operands)])
        if opcode == "get-tuple-element":
            return _inside(operands[0], (int(instruction.attribute("index") or 0),))
        if opcode in _SAME_MEMORY:
            return operands[0] if operands else {}
        if opcode == "call":
            return self._into(instruction, self._module.called_by(instruction)[0], operands)
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "conditional":
            return self._branches(computation, instruction, operands)
        if opcode.endswith("-start"):
            return self._start(computation, instruction, operands)
        if opcode.endswith(("-done", "-update")):
            self._read(computation, instruction, [_inside(aliases, _IN_FLIGHT) for aliases in operands[:1]])
            if opcode.endswith("-update"):
                return operands[0]
            return _inside(operands[0], (_RESULT,)) if operands else {}
        self._read(computation, instruction, operands)
        if self._is_marker(instruction):
            self.marker_seen = True
        aliased = [_under(_inside(operands[n], path), out) for out, n, path in instruction.output_aliases()]
        return _union(*aliased)

    def _into(self, caller: Instruction, computation: Computation, arguments: list[Aliases]) -> Aliases:
        self._callers.append(caller.name)
        try:
            return self.run(computation, arguments)
        finally:
            self._callers.pop()

    def _loop(self, instruction: Instruction, carried: Aliases) -> Aliases:
        computations = [self._module.computations[instruction.called[k][0]] for k in ("condition", "body")]
        # A marker in the body comes before everything that the next iteration does.
        self.marker_seen |= any(self._holds_marker(computation) for computation in computations)
        while True:
            self._into(instruction, computations[0], [carried])
            grown = _union(carried, self._into(instruction, computations[1], [carried]))
            if grown == carried:
                return carried
            carried = grown  # the body hands a shared value on to another place in the tuple

    def _branches(self, computation: Computation, instruction: Instruction, operands: list[Aliases]) -> Aliases:
        self._read(computation, instruction, operands[:1])  # the predicate
        before, after, results = self.marker_seen, False, []
        for branch, argument in zip(self._module.called_by(instruction), operands[1:], strict=True):
            self.marker_seen = before
            results.append(self._into(instruction, branch, [argument]))
            after |= self.marker_seen
        self.marker_seen = before or after
        return _union(*results)

    def _start(self, computation: Computation, instruction: Instruction, operands: list[Aliases]) -> Aliases:
        """An asynchronous operation reads its operands until its ``-done``; a marker's reads are its own affair."""
        called = self._module.called_by(instruction)[:1]
        is_marker = self._is_marker(instruction) or any(map(self._holds_marker, called))
        if not is_marker:
            self._read(computation, instruction, operands)
        result: Aliases = {}
        if called and instruction.opcode == "async-start":
            result = self._into(instruction, called[0], operands)
        self.marker_seen |= is_marker
        in_flight = frozenset() if is_marker else _labels(_union(*operands))
        return _union(_under(result, (_RESULT,)), {_IN_FLIGHT: in_flight} if in_flight else {})

    def _read(self, computation: Computation, instruction: Instruction, operands: list[Aliases]) -> None:
        for number, aliases in enumerate(operands):
            if not _labels(aliases) or not (place := self._place(instruction, number)):
                continue
            reason = self._reason(instruction)
            if reason:
                for label in sorted(_labels(aliases)):
                    self.found(f"{computation.name}: {instruction.name} ({place}) reads {label} {reason}")

    def _place(self, instruction: Instruction, number: int) -> str:
        """Who reads operand ``number``: the opcode, or the instructions inside a fusion; empty if nobody does."""
        if instruction.opcode != "fusion":
            return instruction.opcode
        fused = self._module.called_by(instruction)[0]
        readers = fused.users(fused.parameters()[number].name)
        is_returned = fused.root.opcode == "parameter" and int(fused.root.argument_text) == number
        if not readers and not is_returned:
            return ""
        return f"fusion: {', '.join(reader.name for reader in readers) or 'copy'} in {fused.name}"

    def _reason(self, instruction: Instruction) -> str:
        """Why a read by this instruction, now, is not behind us when the marker's event fires; empty if it is."""
        if self.marker_seen:
            return f"after the marker {self._marker_target}" if self._marker_target else "inside the program"
        if self._before_marker is None or self._before_marker & {instruction.name, *self._callers}:
            return ""
        return f"and nothing makes the marker {self._marker_target} wait for it"

    def _is_marker(self, instruction: Instruction) -> bool:
        return self._marker_target is not None and _target(instruction) == self._marker_target

    def _holds_marker(self, computation: Computation) -> bool:
        if computation.name not in self._marked:
            self._marked[computation.name] = any(
                self._is_marker(instruction)
                or any(self._holds_marker(called) for called in self._module.called_by(instruction))
                for instruction in computation.instructions
            )
        return self._marked[computation.name]

    def _feeding_the_marker(self) -> set[str]:
        """Names of the markers and of every instruction that has ended when a marker starts, by data flow."""
        done: set[str] = set()
        for computation in self._module.computations.values():
            by_name = {instruction.name: instruction for instruction in computation.instructions}
            pending = []
            for instruction in computation.instructions:
                if self._is_marker(instruction):
                    done.add(instruction.name)
                    pending.append(instruction)
                elif any(self._holds_marker(called) for called in self._module.called_by(instruction)):
                    pending.append(instruction)  # only its operands come before: it holds the marker itself
            while pending:
                instruction = pending.pop()
                controls = re.search(r"control-predecessors=\{([^}]*)\}", instruction.attributes)
                names = [n.strip().lstrip("%") for n in controls.group(1).split(",")] if controls else []
                for name in [*instruction.operands, *names]:
                    if name in by_name and name not in done:
                        done.add(name)
                        pending.append(by_name[name])
        return done
