"""A serving bench's latencies as a picture: what share of samples took at most how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from jaxserve.bench.machine import sentence

COLOUR, INK = "#0072B2", "#333333"


def draw(found: dict[str, Any], path: Path) -> None:
    """Writes the picture; the format is that of the file's name."""
    good = [each for each in found["per_request"] if each["error"] is None]
    panels = {
        "time to first token": [each["ttft_ms"] for each in good],
        "between chunks (ITL)": [gap for each in good for gap in each["itls_ms"]],
        "end to end": [each["e2el_ms"] for each in good],
    }
    with plt.rc_context({"font.size": 9, "axes.edgecolor": INK, "text.color": INK, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(1, len(panels), figsize=(10, 3.6), sharey=True, layout="constrained")
        for panel, (title, values) in zip(axes, panels.items(), strict=True):
            ordered = np.sort(values)
            panel.step(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), where="post", color=COLOUR)
            panel.set(title=title, xlabel="ms", ylim=(0, 1.02))
            panel.set_xlim(left=0)
            panel.grid(color="#DDDDDD", linewidth=0.6)
        axes[0].set_ylabel("share of samples")
        settings = found["settings"]
        figure.suptitle(f"{settings['model']}, {settings['dataset']}: {found['request_throughput']:.2f} requests/s, "
                        f"{found['output_throughput']:.1f} output tokens/s, {found['failed']} failed")  # fmt: skip
        figure.text(0.995, 0.002, sentence(found["machine"]), ha="right", va="bottom", fontsize=6.5, color="#777777")
        figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))  # type: ignore[union-attr, call-arg]
        figure.savefig(path, dpi=160)
        plt.close(figure)
