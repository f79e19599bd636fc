"""The comparison bench's numbers as a picture: step times of every way, a panel per model and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from jaxserve.bench.machine import sentence

# Of Okabe and Ito.
COLOURS = {"xla": "#E69F00", "xla-cmdbuf": "#0072B2", "xla-cmdbuf-inside": "#009E73", "cuda-graph": "#CC79A7"}


def draw(found: dict[str, Any], path: Path) -> None:
    """Writes the picture; bars are medians, whiskers reach to the 99th percentile, the dark part is the host's."""
    models = list(dict.fromkeys(cell["model"] for cell in found["cells"]))
    batches = list(dict.fromkeys(cell["batch"] for cell in found["cells"]))
    figure, panels = plt.subplots(len(models), len(batches), squeeze=False, layout="constrained",
                                  figsize=(max(5.0, 2.6 * len(batches)), 2.4 * len(models)))  # fmt: skip
    for model, row in zip(models, panels, strict=True):
        for batch, panel in zip(batches, row, strict=True):
            cells = [c for c in found["cells"] if (c["model"], c["batch"]) == (model, batch)]
            for place, cell in enumerate(cells):
                step = float(np.median(cell["step_ms"]))
                above = float(np.percentile(cell["step_ms"], 99)) - step
                panel.bar(place, step, yerr=[[0], [above]], color=COLOURS[cell["way"]], capsize=3)
                panel.bar(place, float(np.median(cell["host_ms"])), color="#333333", width=0.3)
            panel.set_xticks(range(len(cells)), [cell["way"].replace("xla-cmdbuf", "cmdbuf") for cell in cells])
            panel.set_title(f"{model}, batch {batch}", fontsize=8)
            panel.set_ylim(bottom=0)
        row[0].set_ylabel("ms a step (dark: host)")
    figure.suptitle(f"{found['machine']['device']}; {sentence(found['machine'])}", fontsize=7)
    figure.savefig(path, dpi=160)
    plt.close(figure)
