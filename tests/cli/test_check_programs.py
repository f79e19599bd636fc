"""``jaxserve check-programs`` on the CPU: what it proves, and what makes it fail."""

from __future__ import annotations

import json
from types import SimpleNamespace

import liars
import pytest
from tiny import write_tiny, write_tiny_gguf

from jaxserve.attention import registry
from jaxserve.cli.main import main
from jaxserve.testing import program_report

SIZES = ["--max-running-requests", "1", "--chunked-prefill-size", "16", "--context-length", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of which nothing but ``config.json`` is there."""
    path = write_tiny(tmp_path_factory.mktemp("tiny"))
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    return str(path)


def check(capsys, *arguments: str) -> tuple[int, str]:
    code = main(["check-programs", *arguments, *SIZES])
    return code, capsys.readouterr().out


def test_every_program_is_proven_without_weights(folder, capsys):
    code, out = check(capsys, folder, "--verify-tokens", "4")
    assert code == 0
    names = [line.split("[")[0] for line in out.splitlines() if line.startswith("step ")]
    assert names == ["step extend", "step decode", "step target_verify"]
    assert "3 programs proven" in out


@pytest.mark.parametrize("fence", ["coarse", "relay"])
def test_verify_programs_of_an_algorithm_are_proven(fence, folder, capsys):
    """With live drafts the draft tables are read up to the end record, and no other table behind the marker."""
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"]
    flags += ["--speculative-ngram-max-bfs-breadth", "3", "--speculative-ngram-fence", fence]
    code, out = check(capsys, folder, *flags)
    assert code == 0 and "3 programs proven" in out and "step target_verify[batch=1,tokens=4" in out


def test_live_drafts_behind_the_marker_alone_are_a_violation(folder, capsys, monkeypatch):
    """Taken for snapshotted, they are seen to be read late."""
    monkeypatch.setattr(program_report, "DraftRows", SimpleNamespace(LIVE=None))
    code, out = check(capsys, folder, "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
    assert code == 1 and "draft_tokens" in out and "draft_parents" in out


def test_reports_as_json(folder, capsys):
    code, out = check(capsys, folder, "--attention-backend", "planned", "--json")
    reports = {report["name"].split("[")[0]: report for report in map(json.loads, out.splitlines())}
    assert code == 0
    assert set(reports) == {"prep extend", "prep decode", "step extend", "step decode"}
    assert reports["prep decode"]["marker"] == "jaxserve_snapshot"
    assert reports["step decode"]["marker"] == ""  # it reads no shared row at all
    assert reports["step decode"]["donated"] == ["pool", "relay.tokens", "relay.token_counts"]
    assert reports["step decode"]["pool_copies"] == 0
    assert reports["step decode"]["instructions"] > 20
    assert all(report["violations"] == [] for report in reports.values())


def test_a_gguf_header_is_enough(tmp_path, capsys):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    code, out = check(capsys, str(path), "--attention-backend", "planned", "--no-shared-read-marker")
    assert code == 0
    assert "4 programs proven" in out


@pytest.mark.parametrize("liar", [liars.InWhileLive, liars.LengthsLive, liars.PreWhileLive])
def test_a_planted_late_read_fails_and_is_named(folder, capsys, monkeypatch, liar):
    monkeypatch.setitem(registry._registered, "liar", liar)
    code, out = check(capsys, folder, "--attention-backend", "liar")
    assert code == 1
    assert "VIOLATION step decode[batch=1,tokens=1,width=8]: lengths: " in out
    assert ("block_tables: " in out) == (liar is not liars.LengthsLive)
    assert "programs are wrong" in out


def test_a_planted_pool_copy_fails(folder, capsys, monkeypatch):
    monkeypatch.setitem(registry._registered, "liar", liars.WritesThePool)
    code, out = check(capsys, folder, "--attention-backend", "liar")
    assert code == 1
    assert "copies the KV pool" in out


def test_settings_that_cannot_work_are_refused(folder, capsys):
    assert main(["check-programs", folder, "--decode-batch-buckets", "64"]) == 2
    assert "decode bucket 64 is larger" in capsys.readouterr().err
    assert main(["check-programs", folder + "/nowhere"]) == 1
    assert "no such file or folder" in capsys.readouterr().err
