"""Puts a result of ``jaxserve bench fence`` or ``spec`` into the documentation: the picture, and the marked tables.

jaxserve bench fence --json docs/results/fence-cpu-2-cores.json
python bench/docs.py docs/results/fence-cpu-2-cores.json
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from jaxserve.bench import fence_report, speculation_report

ROOT = Path(__file__).parents[1]
FENCE, SPECULATION = "fence bench", "speculation bench"  # <!-- fence bench: begin -->
PICTURES = {FENCE: Path("docs/fence_bench.png"), SPECULATION: Path("docs/speculation_bench.png")}


def name_of(found: dict[str, Any]) -> str:
    """Which bench a result is of."""
    return SPECULATION if "verify" in found else FENCE


def blocks(found: dict[str, Any], source: str) -> dict[str, str]:
    """Document -> what stands between its markers."""
    report: Any = speculation_report if name_of(found) == SPECULATION else fence_report
    busy, above = fence_report.busy_note(found), f"{report.above(found)}\nEvery number: `{source}`.\n"
    if report is fence_report:
        return {
            "README.md": busy + fence_report.headline(found),
            "docs/performance.md": f"{busy}{above}\n{fence_report.at_largest_batch(found)}",
        }
    tables = [speculation_report.rates(found), speculation_report.verify_costs(found)]
    return {
        "README.md": busy + speculation_report.compact_rates(found),
        "docs/speculative_decoding.md": "\n".join([busy + above, *tables, *speculation_report.verdicts(found)]),
    }


def replaced(text: str, block: str, name: str) -> str:
    """``text`` with ``block`` between the markers of ``name``.

    Raises:
        ValueError: the markers are not there, once.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"wanted the markers {begin.strip()} and {end.strip()} once")
    return pattern.sub(lambda _: f"{begin}{block.rstrip()}\n{end}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    result = parser.parse_args().result
    found = json.loads(result.read_text(encoding="utf-8"))
    name = name_of(found)
    for document, block in blocks(found, result.absolute().relative_to(ROOT).as_posix()).items():
        path = ROOT / document
        path.write_text(replaced(path.read_text(encoding="utf-8"), block, name), encoding="utf-8")
    if name == SPECULATION:
        from jaxserve.bench.speculation_plot import draw
    else:
        from jaxserve.bench.fence_plot import draw
    draw(found, ROOT / PICTURES[name])


if __name__ == "__main__":
    main()
