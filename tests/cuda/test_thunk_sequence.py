"""Graph membership read from thunk dumps."""

from __future__ import annotations

import pytest

from jaxserve.testing.hlo_text import parse_module
from jaxserve.testing.thunk_sequence import graph_use, read_thunks

SEQUENCE = """\
001: kCustomCall    [source       | next=000 (1)] kCustomCall
000: kCommandBuffer [prev=001 (1) | next=004 (1)]
    002: kCustomKernel [source       | next=003 (1)] loop_add_fusion grid: [1, 1, 1]
    003: kConditional  [prev=002 (1) | sink        ]
      false_branch:
        005: kCustomKernel [source | sink] loop_multiply_fusion grid: [1, 1, 1]
004: kConditional   [prev=000 (1) | next=009 (2)]
  false_branch:
    006: kCommandBuffer [source | sink]
        007: kCustomKernel [source | sink] sort_1_1 grid: [8, 1, 1]
  true_branch:
    008: kCopy [source | sink] kCopy
009: kCommandBuffer [prev=004 (1) | sink]
    010: kCustomCall [source | next=011] kCustomCall
    011: kCustomKernel [prev=010 | sink] scatter_fusion grid: [1, 1, 1]
"""
METADATA = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "call.1"
    thunk_id: 1
  }
  thunk_kind: "kCustomCall"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "call.2"
    thunk_id: 10
  }
}
"""
HLO = """\
HloModule planted, is_scheduled=true

ENTRY %main (x: s32[4]) -> s32[4] {
  %x = s32[4]{0} parameter(0)
  %call.1 = s32[4]{0} custom-call(%x), custom_call_target="jaxserve_snapshot"
  ROOT %call.2 = s32[4]{0} custom-call(%call.1), custom_call_target="jaxserve_record_end_graph"
}
"""


def test_graphs_splits_and_blocking_branches_are_found(tmp_path):
    (tmp_path / "module_0001.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(SEQUENCE)
    (tmp_path / "module_0001.jit_step.thunk_metadata.txt").write_text(METADATA)
    use = graph_use(read_thunks(tmp_path, parse_module(HLO)))
    assert use.order[0] == "jaxserve_snapshot"
    assert use.graphs == (3, 2)
    assert use.order[1] == "graph(3)"
    assert use.order[3] == "graph(2)"
    assert len(use.splits) == len(use.blocking) == 1
    assert use.calls_inside == ("jaxserve_record_end_graph",)


def test_a_folder_without_a_dump_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds 0 files"):
        read_thunks(tmp_path, parse_module(HLO))
