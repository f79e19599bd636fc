"""docs/metrics.md and the dashboard name exactly what a server exports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_engine_metrics import NGRAM

from jaxserve.engine.engine import Engine
from jaxserve.server.metrics import HttpMetrics

ROOT = Path(__file__).parents[2]
PREFIX = "jaxserve:"


@pytest.fixture(scope="module")
def exported(engines: Callable[..., Engine], tiny: Path) -> dict[str, str]:
    """Name without prefix -> kind, of an engine that speculates (which has all there is) and of the HTTP side."""
    registries = (engines(tiny, **NGRAM).metrics.registry, HttpMetrics().registry)
    text = "".join(generate_latest(registry).decode() for registry in registries)
    found = {}
    for family in text_string_to_metric_families(text):
        if family.type == "gauge" and family.name.endswith("_created"):
            continue  # prometheus-client adds when a counter was made
        found[family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")] = family.type
    return found


def documented() -> dict[str, str]:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    table = text[text.index("<!-- metrics: begin -->") : text.index("<!-- metrics: end -->")]
    found: dict[str, str] = {}
    for names, kind in re.findall(r"^\| (`.*?`) \| (\w+) \|", table, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, f"{name} is listed twice"
            found[name] = kind
    return found


def test_every_exported_metric_is_documented_and_no_other(exported: dict[str, str]) -> None:
    assert documented() == exported


def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "deploy/grafana/jaxserve.json").read_text("utf-8"))


def test_every_query_of_the_dashboard_names_an_exported_metric(exported: dict[str, str]) -> None:
    known = set()
    for name, kind in exported.items():
        known |= {name + end for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    queries += [variable["query"]["query"] for variable in dashboard()["templating"]["list"][1:]]
    named = {name for query in queries for name in re.findall(rf"{PREFIX}(\w+)", query)}
    assert len(queries) > 30 and named <= known, named - known
    assert all(PREFIX in query and query.count("(") == query.count(")") for query in queries)


def test_the_dashboard_is_laid_out_without_overlap() -> None:
    board = dashboard()
    assert board["uid"] and board["schemaVersion"] >= 36
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        references = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(references)) == len(references)
