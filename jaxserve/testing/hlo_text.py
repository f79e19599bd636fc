"""Reads compiled HLO text (``compiled.as_text()``) of the CPU and GPU compilers into instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(\(.*->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|called_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_OUTPUT_ALIAS = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+),\s*\{([\d,\s]*)\}")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        operands: names of the instructions it reads, in order; empty for parameters and constants.
        argument_text: what stands between the parentheses: the number of a parameter.
        attributes: everything behind the operands.
        called: attribute name -> names of the computations it calls.
    """

    name: str
    opcode: str
    operands: tuple[str, ...]
    argument_text: str
    attributes: str
    is_root: bool
    called: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def attribute(self, name: str) -> str | None:
        """Text of a simple attribute (``index=1``, ``custom_call_target="x"``), or None."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|([^,\s]+))', self.attributes)
        return None if found is None else found.group(1) if found.group(1) is not None else found.group(2)

    def output_aliases(self) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
        """(output path, operand number, operand path) of every output that lives in an operand's memory."""
        start = self.attributes.find("output_to_operand_aliasing=")
        if start < 0:
            return []
        text, _ = _balanced(self.attributes, self.attributes.index("{", start))
        return [(_path(o), int(n), _path(p)) for o, n, p in _OUTPUT_ALIAS.findall(text)]


@dataclass(frozen=True)
class Computation:
    """A list of instructions; in a scheduled module they stand in the order of execution."""

    name: str
    instructions: tuple[Instruction, ...]

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    def parameters(self) -> dict[int, Instruction]:
        """Parameter number -> its instruction."""
        return {int(i.argument_text): i for i in self.instructions if i.opcode == "parameter"}

    def users(self, name: str) -> list[Instruction]:
        """The instructions that take ``name`` as an operand."""
        return [i for i in self.instructions if name in i.operands]


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        donated: entry parameter numbers whose memory an output may reuse.
    """

    computations: dict[str, Computation]
    entry: Computation
    is_scheduled: bool
    donated: frozenset[int]

    def called_by(self, instruction: Instruction) -> list[Computation]:
        """The computations an instruction calls, in the order they are written."""
        names = [name for called in instruction.called.values() for name in called]
        return [self.computations[name] for name in names if name in self.computations]


def parse_module(hlo_text: str) -> Module:
    """Parses the text of one module.

    Raises:
        ValueError: it holds no entry computation.
    """
    header = ""
    computations: dict[str, Computation] = {}
    entry = None
    name, instructions = None, []
    for line in hlo_text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif line.startswith("}") and name is not None:
            computations[name] = Computation(name, tuple(instructions))
            name, instructions = None, []
        elif name is None and (found := _COMPUTATION.match(line)):
            name = found.group(2)
            entry = name if found.group(1) else entry
        elif name is not None and (found := _INSTRUCTION.match(line)):
            instructions.append(_instruction(found.group(2), found.group(3), is_root=bool(found.group(1))))
    if entry is None or entry not in computations:
        raise ValueError("this HLO text holds no ENTRY computation; pass compiled.as_text()")
    return Module(computations, computations[entry], "is_scheduled=true" in header, _donated(header))


def _donated(header: str) -> frozenset[int]:
    start = header.find("input_output_alias=")
    if start < 0:
        return frozenset()
    text, _ = _balanced(header, header.index("{", start))
    return frozenset(int(number) for _, number, _ in _OUTPUT_ALIAS.findall(text))


def _instruction(name: str, text: str, *, is_root: bool) -> Instruction:
    text = _COMMENT.sub("", text)
    if text.startswith("("):  # a tuple shape
        _, end = _balanced(text, 0)
    else:
        end = text.index(" ")
    opcode, _, _ = text[end:].strip().partition("(")
    argument_text, end = _balanced(text, text.index("(", end))
    attributes = text[end:]
    operands: tuple[str, ...] = ()
    if opcode not in ("parameter", "constant", "iota"):
        # "%x", or "f32[4]{0} %x" where the printer adds shapes.
        operands = tuple(part.split()[-1].lstrip("%") for part in _split(argument_text))
    called = {key: tuple(_split(value.strip("{}").replace("%", ""))) for key, value in _CALLED.findall(attributes)}
    return Instruction(name, opcode.strip(), operands, argument_text.strip(), attributes, is_root, called)


def _balanced(text: str, start: int) -> tuple[str, int]:
    """What the bracket at ``start`` encloses, and the position behind its closing one; strings may hold brackets."""
    closing = []
    quoted = False
    position = start
    while position < len(text):
        letter = text[position]
        if quoted:
            if letter == "\\":
                position += 1
            elif letter == '"':
                quoted = False
        elif letter == '"':
            quoted = True
        elif letter in _CLOSING:
            closing.append(_CLOSING[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
            if not closing:
                return text[start + 1 : position], position + 1
        position += 1
    raise ValueError(f"unbalanced brackets in HLO text: {text[start : start + 80]!r}")


def _split(text: str) -> list[str]:
    """Splits at the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        if letter in "({[":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(index) for index in text.split(",") if index.strip())
