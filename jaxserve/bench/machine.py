"""What the numbers were measured on."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path


def machine() -> dict[str, str | int]:
    """CPU model, cores, memory, date and load."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "load_at_start": f"{os.getloadavg()[0]:.2f}",
    }


def sentence(found: dict[str, str | int]) -> str:
    """One line for above a table."""
    return (
        f"{found['date']}, {found['cores']} cores of {found['cpu']}, {found['memory_gib']} GiB, "
        f"Python {found['python']}, load {found['load_at_start']} at the start"
    )
