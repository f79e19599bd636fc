"""Puts a result of ``jaxserve bench fence`` into the documentation: the picture, and the tables between the markers.

jaxserve bench fence --json docs/results/fence-cpu-2-cores.json
python bench/docs.py docs/results/fence-cpu-2-cores.json
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from jaxserve.bench import fence_report

ROOT = Path(__file__).parents[1]
PICTURE = Path("docs/fence_bench.png")
NAME = "fence bench"  # <!-- fence bench: begin -->


def blocks(found: dict[str, Any], source: str) -> dict[str, str]:
    """Document -> what stands between its markers."""
    busy, above = fence_report.busy_note(found), fence_report.above(found)
    return {
        "README.md": busy + fence_report.headline(found),
        "docs/performance.md": f"{busy}{above}\nEvery number: `{source}`.\n\n{fence_report.at_largest_batch(found)}",
    }


def replaced(text: str, block: str) -> str:
    """``text`` with ``block`` between the markers.

    Raises:
        ValueError: the markers are not there, once.
    """
    begin, end = f"<!-- {NAME}: begin -->\n", f"<!-- {NAME}: end -->\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"wanted the markers {begin.strip()} and {end.strip()} once")
    return pattern.sub(lambda _: f"{begin}{block.rstrip()}\n{end}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    result = parser.parse_args().result
    found = json.loads(result.read_text(encoding="utf-8"))
    for name, block in blocks(found, result.absolute().relative_to(ROOT).as_posix()).items():
        path = ROOT / name
        path.write_text(replaced(path.read_text(encoding="utf-8"), block), encoding="utf-8")

    from jaxserve.bench.fence_plot import draw

    draw(found, ROOT / PICTURE)


if __name__ == "__main__":
    main()
