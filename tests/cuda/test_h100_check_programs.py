"""``jaxserve check-programs --target h100``, without an H100."""

from __future__ import annotations

import json

import liars
import pytest
from tiny import write_tiny

from jaxserve.attention import registry
from jaxserve.cli.main import main

pytestmark = pytest.mark.h100
SIZES = ["--max-running-requests", "1", "--chunked-prefill-size", "16", "--context-length", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny")))


def test_programs_are_proven_and_their_graphs_reported(cuda_module, folder, capsys):
    assert main(["check-programs", folder, "--target", "h100", "--json", *SIZES]) == 0
    reports = {r["name"].split("[")[0]: r for r in map(json.loads, capsys.readouterr().out.splitlines())}
    decode = reports["step decode"]
    assert decode["marker"] == "jaxserve_snapshot"
    assert decode["donated"] == ["pool", "relay.tokens", "relay.token_counts"]
    order = decode["graphs"]["order"]
    marker = order.index("jaxserve_snapshot")
    # A program that draws has loops. XLA of jax 0.11 sets their first values ahead of everything: constants, no rows.
    assert all(name.startswith(("copy.", "loop_broadcast_fusion")) for name in order[:marker])
    assert order[marker + 1].startswith("graph(")
    assert order[-1] == "jaxserve_record_end"
    greedy = reports["step decode greedy"]["graphs"]["order"]
    assert greedy[0] == "jaxserve_snapshot" and greedy[1].startswith("graph(")
    assert all(count >= 5 for count in decode["graphs"]["graphs"])


def test_a_planted_late_read_fails(cuda_module, folder, capsys, monkeypatch):
    monkeypatch.setitem(registry._registered, "liar", liars.LengthsLive)
    assert main(["check-programs", folder, "--target", "h100", "--attention-backend", "liar", *SIZES]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION step decode[" in out
    assert "]: lengths: " in out
    assert "graph(" in out
