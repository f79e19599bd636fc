"""Which parts of a compiled GPU program run inside CUDA graphs, read from what ``xla_dump_to`` writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from jaxserve.testing.hlo_text import Module

SEQUENCE = "thunk_sequence_after_thunk_passes.txt"
METADATA = "thunk_metadata.txt"
_THUNK = re.compile(r"(\s*)(\d+): (\w+)\s*\[[^\]]*\]\s*(\S*)")
_NAMED = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
_GRAPH = "kCommandBuffer"
_CONTROL_FLOW = ("kConditional", "kWhile")


@dataclass(frozen=True)
class Thunk:
    """One thing the executor launches.

    Attributes:
        kind: XLA's name, ``kCustomKernel``, ``kCustomCall``, ...
        name: custom call target, or HLO instruction.
        graph: number of the outermost CUDA graph it is in, counting from 0; None outside graphs.
        nested: whether it stands in a branch or loop that is itself outside graphs.
    """

    kind: str
    name: str
    graph: int | None
    nested: bool = False


@dataclass(frozen=True)
class GraphUse:
    """How a program is divided between CUDA graphs and single launches.

    Attributes:
        graphs: commands in each graph, in order of execution.
        order: what the executor meets at the top: ``graph(83)`` or the name of a thunk outside graphs.
        splits: thunks that stand between two graphs, which would otherwise be one.
        calls_inside: custom call targets inside graphs.
        blocking: branches and loops outside graphs: the dispatching thread waits for the device to decide them.
    """

    graphs: tuple[int, ...]
    order: tuple[str, ...]
    splits: tuple[str, ...]
    calls_inside: tuple[str, ...]
    blocking: tuple[str, ...]


def read_thunks(folder: Path, module: Module) -> list[Thunk]:
    """The thunks of the one program dumped into ``folder``, in order of execution; graphs themselves are left out.

    Args:
        folder: what ``xla_dump_to`` named.
        module: the program's HLO, which knows the targets of custom calls.

    Raises:
        ValueError: the folder holds no thunk sequence, or more than one.
    """
    found = sorted(folder.glob(f"*{SEQUENCE}"))
    if len(found) != 1:
        raise ValueError(f"{folder} holds {len(found)} files *{SEQUENCE}, wanted one: compile one program into it")
    names: dict[int, str] = {}
    for metadata in folder.glob(f"*{METADATA}"):
        names |= {int(number): name for name, number in _NAMED.findall(metadata.read_text())}
    targets = {i.name: i.attribute("custom_call_target") for c in module.computations.values() for i in c.instructions}
    thunks: list[Thunk] = []
    enclosing: list[tuple[int, int | None]] = []  # (indentation, graph; None: a branch or loop)
    num_graphs = 0
    for match in filter(None, map(_THUNK.match, found[0].read_text().splitlines())):
        indentation, number, kind, text = len(match[1]), int(match[2]), match[3], match[4]
        while enclosing and enclosing[-1][0] >= indentation:
            enclosing.pop()
        graph = next((graph for _, graph in enclosing if graph is not None), None)
        if kind == _GRAPH:
            enclosing.append((indentation, num_graphs if graph is None else graph))
            num_graphs += graph is None
            continue
        instruction = names.get(number, "")
        name = targets.get(instruction) or instruction or text
        thunks.append(Thunk(kind, name, graph, nested=bool(enclosing) and enclosing[0][1] is None))
        if kind in _CONTROL_FLOW:
            enclosing.append((indentation, None))
    return thunks


def graph_use(thunks: list[Thunk]) -> GraphUse:
    """Groups thunks by graph and finds what splits graphs."""
    top = [thunk for thunk in thunks if not thunk.nested]
    sizes: dict[int, int] = {}
    order: list[Thunk] = []  # the first of each graph stands for it
    for thunk in top:
        if thunk.graph is None or thunk.graph not in sizes:
            order.append(thunk)
        if thunk.graph is not None:
            sizes[thunk.graph] = sizes.get(thunk.graph, 0) + 1
    places = [place for place, thunk in enumerate(order) if thunk.graph is not None]
    between = order[places[0] : places[-1]] if places else []
    return GraphUse(
        graphs=tuple(sizes.values()),
        order=tuple(thunk.name if thunk.graph is None else f"graph({sizes[thunk.graph]})" for thunk in order),
        splits=tuple(thunk.name for thunk in between if thunk.graph is None),
        calls_inside=tuple(t.name for t in thunks if t.graph is not None and t.kind == "kCustomCall"),
        blocking=tuple(t.name for t in thunks if t.graph is None and t.kind in _CONTROL_FLOW),
    )
