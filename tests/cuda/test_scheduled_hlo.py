"""The checker of scheduled HLO finds every way to read a shared buffer after the marker, and accepts what is sound."""

from __future__ import annotations

import textwrap

import jax
import jax.numpy as jnp
import pytest

from jaxserve.testing.scheduled_hlo import uses_after

SNAPSHOT = (
    '%mark = (s32[4]{0}, s32[4,8]{1,0}) custom-call(%ticket, %ids, %table), custom_call_target="jaxserve_snapshot", '
    'custom_call_has_side_effect=true, metadata={op_name="jit(f)/ffi_call" stack_frame_id=6}, backend_config={}'
)
FUSED = """
%fused (p.0: s32[16,32], p.1: s32[4]) -> s32[4] {
  %p.0 = s32[16,32]{1,0} parameter(0)
  %flat = s32[512]{0} bitcast(%p.0)
  %p.1 = s32[4]{0} parameter(1)
  ROOT %read = s32[4]{0} gather(%flat, %p.1), offset_dims={}, metadata={op_name="a \\"(quoted\\" {name"}
}
"""


def module(body: str, *, computations: str = "", header: str = "is_scheduled=true", root: str = "") -> str:
    """A program with parameters ticket, ids, table, w; ``body`` holds its instructions, ``root`` its last one."""
    root = root or "%out = s32[4]{0} get-tuple-element(%mark), index=0"
    return f"""HloModule jit_f, {header}, entry_computation_layout={{(u32[16]{{0}}, s32[4]{{0}})->(s32[4]{{0}})}}
{computations}
ENTRY %main.5 (ticket: u32[16], ids: s32[4], table: s32[16,32], w: f32[64,128]) -> s32[4] {{
  %ticket = u32[16]{{0}} parameter(0)
  %ids = s32[4]{{0}} parameter(1), metadata={{op_name="ids"}}
  %table = s32[16,32]{{1,0}} parameter(2), metadata={{op_name="shared[\\'table\\']"}}
  %w = f32[64,128]{{1,0}} parameter(3)
{textwrap.indent(textwrap.dedent(body).strip(), "  ")}
  ROOT {root}
}}
"""


def uses(body: str, *, parameters=("table",), concurrent: bool = False, **program) -> list[str]:
    body = body.replace("SNAPSHOT", SNAPSHOT)
    return uses_after(module(body, **program), parameters, "jaxserve_snapshot", concurrent=concurrent)


def test_a_program_that_uses_the_snapshot_only_is_accepted():
    body = """
        SNAPSHOT
        %rows = s32[4,8]{1,0} get-tuple-element(%mark), index=1
        %twice = s32[4,8]{1,0} add(%rows, %rows)
    """
    assert uses(body) == []
    assert uses(body, concurrent=True) == []


def test_a_read_before_the_marker_is_accepted_where_the_schedule_orders():
    assert uses("%sum = s32[] fusion(%table, %ids), kind=kLoop, calls=%fused\nSNAPSHOT", computations=FUSED) == []


def test_a_duplicated_producer_after_the_marker_is_found():
    body = """
        %once = s32[4]{0} fusion(%table, %ids), kind=kLoop, calls=%fused
        SNAPSHOT
        %again = s32[4]{0} fusion(%table, %ids), kind=kLoop, calls=%fused.1
    """
    (finding,) = uses(body, computations=FUSED + FUSED.replace("%fused", "%fused.1"))
    assert finding == (
        "main.5: again (fusion: flat in fused.1) reads parameter 2 (table) after the marker jaxserve_snapshot"
    )


def test_a_copy_after_the_marker_is_found():
    (finding,) = uses("SNAPSHOT\n%late = s32[16,32]{1,0} copy(%table)")
    assert "late (copy) reads parameter 2 (table) after" in finding


def test_uses_of_a_copy_made_before_the_marker_are_accepted():
    assert uses("%early = s32[16,32]{1,0} copy(%table)\nSNAPSHOT\n%x = s32[16,32]{1,0} negate(%early)") == []


@pytest.mark.parametrize(
    "alias",
    [
        "%b = s32[512]{0} bitcast(%table)",
        "%b0 = s32[512]{0} bitcast(%table)\n%b = s32[8,64]{1,0} bitcast(%b0)",
        "%t = (s32[4]{0}, /*index=1*/s32[16,32]{1,0}) tuple(%ids, /*index=1*/%table)\n"
        "%b = s32[16,32]{1,0} get-tuple-element(%t), index=1",
        "%i = (s32[16,32]{1,0}) tuple(%table)\n%t = ((s32[16,32]{1,0}), s32[4]{0}) tuple(%i, %ids)\n"
        "%g = (s32[16,32]{1,0}) get-tuple-element(%t), index=0\n%b = s32[16,32]{1,0} get-tuple-element(%g), index=0",
        "%b = s32[16,32]{1,0} optimization-barrier(%table)",
    ],
)
@pytest.mark.parametrize("alias_first", [True, False])
def test_a_read_through_an_alias_is_found(alias: str, alias_first: bool):
    body = f"{alias}\nSNAPSHOT" if alias_first else f"SNAPSHOT\n{alias}"
    (finding,) = uses(f"{body}\n%x = s32[512]{{0}} negate(%b)")
    assert "x (negate) reads parameter 2 (table) after" in finding


def test_aliases_alone_read_nothing():
    assert uses("SNAPSHOT\n%b = s32[512]{0} bitcast(%table)\n%t = (s32[512]{0}) tuple(%b)") == []


def test_the_other_part_of_a_tuple_is_accepted():
    body = """
        %t = (s32[4]{0}, s32[16,32]{1,0}) tuple(%ids, %table)
        SNAPSHOT
        %g = s32[4]{0} get-tuple-element(%t), index=0
        %x = s32[4]{0} negate(%g)
    """
    assert uses(body) == []
    assert len(uses(body, parameters=["ids"])) == 1


def test_operands_printed_with_shapes_are_read():
    (finding,) = uses("SNAPSHOT\n%x = s32[16,32]{1,0} negate(s32[16,32]{1,0} %table)")
    assert "negate" in finding


def test_a_fused_parameter_that_nothing_reads_is_accepted():
    unused = FUSED.replace("%flat = s32[512]{0} bitcast(%p.0)", "%flat = s32[512]{0} iota(), iota_dimension=0")
    body = "SNAPSHOT\n%x = s32[4]{0} fusion(%table, %ids), kind=kLoop, calls=%fused"
    assert uses(body, computations=unused) == []
    assert len(uses(body, computations=FUSED)) == 1


def test_a_called_computation_is_followed():
    called = FUSED.replace("%fused", "%parallel")
    body = "SNAPSHOT\n%x = s32[4]{0} call(%table, %ids), to_apply=%parallel"
    (finding,) = uses(body, computations=called)
    assert finding.startswith("parallel: read (gather) reads parameter 2 (table)")


def test_a_marker_in_a_called_computation_counts():
    inner = f"""
%inner (ticket: u32[16], ids: s32[4], table: s32[16,32]) -> s32[4] {{
  %ticket = u32[16]{{0}} parameter(0)
  %ids = s32[4]{{0}} parameter(1)
  %table = s32[16,32]{{1,0}} parameter(2)
  {SNAPSHOT}
  ROOT %first = s32[4]{{0}} get-tuple-element(%mark), index=0
}}
"""
    call = "%c = s32[4]{0} call(%ticket, %ids, %table), to_apply=%inner"
    root = "%out = s32[4]{0} negate(%c)"
    assert uses(call, computations=inner, root=root) == []
    (finding,) = uses(f"{call}\n%x = s32[16,32]{{1,0}} negate(%table)", computations=inner, root=root)
    assert "x (negate)" in finding


WHILE = """
%body (carry: (s32[], s32[16,32])) -> (s32[], s32[16,32]) {
  %carry = (s32[], s32[16,32]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%carry), index=0
  %shared = s32[16,32]{1,0} get-tuple-element(%carry), index=1
  %cell = s32[] BODY
  %next = s32[] add(%n, %cell)
  ROOT %handed = (s32[], s32[16,32]{1,0}) tuple(%next, %shared)
}

%condition (carry.1: (s32[], s32[16,32])) -> pred[] {
  %carry.1 = (s32[], s32[16,32]{1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%carry.1), index=0
  ROOT %less = pred[] compare(%n.1, %n.1), direction=LT
}
"""
LOOP = """
%zero = s32[] constant(0)
%start = (s32[], s32[16,32]{1,0}) tuple(%zero, %table)
SNAPSHOT
%loop = (s32[], s32[16,32]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"n":"3"}
"""


def test_a_read_inside_a_loop_is_found():
    (finding,) = uses(LOOP, computations=WHILE.replace("BODY", "reduce(%shared, %n), dimensions={0,1}"))
    assert finding.startswith("body: cell (reduce) reads parameter 2 (table) after")


def test_a_loop_that_only_carries_the_buffer_is_accepted():
    assert uses(LOOP, computations=WHILE.replace("BODY", "negate(%n)")) == []


def test_what_leaves_a_loop_still_aliases():
    read = "%g = s32[16,32]{1,0} get-tuple-element(%loop), index=1\n%x = s32[16,32]{1,0} negate(%g)"
    (finding,) = uses(f"{LOOP}\n{read}", computations=WHILE.replace("BODY", "negate(%n)"))
    assert "x (negate)" in finding


def test_a_marker_inside_a_loop_comes_before_the_next_iteration():
    marked = WHILE.replace("BODY", 'custom-call(%shared), custom_call_target="jaxserve_snapshot"')
    findings = uses(LOOP.replace("SNAPSHOT\n", ""), computations=marked, root="%out = s32[] negate(%zero)")
    assert len(findings) == 1
    assert "cell (custom-call)" in findings[0]


BRANCHES = """
%yes (a: s32[16,32]) -> s32[16,32] {
  %a = s32[16,32]{1,0} parameter(0)
  ROOT %minus = s32[16,32]{1,0} negate(%a)
}

%no (b.1: s32[4]) -> s32[4] {
  ROOT %b.1 = s32[4]{0} parameter(0)
}
"""


def test_a_read_inside_a_branch_is_found():
    body = "SNAPSHOT\n%x = s32[4]{0} conditional(%ids, %table, %ids), branch_computations={%yes, %no}"
    (finding,) = uses(body, computations=BRANCHES)
    assert finding.startswith("yes: minus (negate) reads parameter 2 (table) after")


def test_a_marker_in_one_branch_counts_behind_the_conditional_but_not_in_the_other_branch():
    marker = '%m = s32[4]{0} custom-call(%b.1), custom_call_target="jaxserve_snapshot"'
    marked = BRANCHES.replace("ROOT %b.1 = s32[4]{0} parameter(0)", f"%b.1 = s32[4]{{0}} parameter(0)\n  ROOT {marker}")
    conditional = "%x = s32[4]{0} conditional(%ids, %ids, %table), branch_computations={%no, %yes}"
    root = "%out = s32[4]{0} negate(%ids)"
    assert uses(conditional, computations=marked, root=root) == []
    (finding,) = uses(f"{conditional}\n%late = s32[16,32]{{1,0}} copy(%table)", computations=marked, root=root)
    assert "late (copy)" in finding


def test_an_asynchronous_copy_reads_until_it_is_done():
    start = "%s = (s32[16,32]{1,0}, s32[16,32]{1,0}, u32[]) copy-start(%table)"
    done = "%d = s32[16,32]{1,0} copy-done(%s)"
    use = "%x = s32[16,32]{1,0} negate(%d)"
    assert uses(f"{start}\n{done}\nSNAPSHOT\n{use}") == []
    (finding,) = uses(f"{start}\nSNAPSHOT\n{done}\n{use}")
    assert "d (copy-done) reads parameter 2 (table) after" in finding


def test_an_asynchronous_computation_reads_until_it_is_done():
    start = "%s = ((s32[16,32]{1,0}, s32[4]{0}), s32[4]{0}, s32[]) async-start(%table, %ids), calls=%fused"
    done = "%d = s32[4]{0} async-done(%s)"
    assert uses(f"{start}\n{done}\nSNAPSHOT", computations=FUSED) == []
    assert "d (async-done)" in uses(f"{start}\nSNAPSHOT\n{done}", computations=FUSED)[0]


def test_an_asynchronous_marker_may_end_later_than_it_starts():
    wrapped = f"""
%wrapped (ticket: u32[16], ids: s32[4], table: s32[16,32]) -> (s32[4], s32[4,8]) {{
  %ticket = u32[16]{{0}} parameter(0)
  %ids = s32[4]{{0}} parameter(1)
  %table = s32[16,32]{{1,0}} parameter(2)
  ROOT {SNAPSHOT}
}}
"""
    start = "%s = ((u32[16]{0}), s32[4]{0}) async-start(%ticket, %ids, %table), calls=%wrapped"
    body = f"{start}\n%d = s32[4]{{0}} async-done(%s)"
    root = "%out = s32[4]{0} negate(%d)"
    assert uses(body, computations=wrapped, root=root) == []
    assert uses(body, computations=wrapped, root=root, concurrent=True) == []
    assert len(uses(f"{body}\n%x = s32[16,32]{{1,0}} copy(%table)", computations=wrapped, root=root)) == 1


def test_the_result_of_an_aliasing_call_is_the_shared_memory():
    marker = SNAPSHOT.replace(
        "backend_config={}", "output_to_operand_aliasing={{0}: (0, {}), {1}: (2, {})}, backend_config={}"
    )
    (finding,) = uses(f"{marker}\n%g = s32[4,8]{{1,0}} get-tuple-element(%mark), index=1\n%x = s32[4,8] negate(%g)")
    assert "x (negate) reads parameter 2 (table) after" in finding
    assert uses(f"{marker}\n%g = s32[4]{{0}} get-tuple-element(%mark), index=0\n%x = s32[4] negate(%g)") == []


def test_a_second_marker_reads_after_the_first():
    (finding,) = uses(f"SNAPSHOT\n{SNAPSHOT.replace('%mark', '%mark.2')}")
    assert "mark.2 (custom-call)" in finding


def test_a_returned_parameter_is_found():
    (finding,) = uses("SNAPSHOT", root="%out = (s32[16,32]{1,0}) tuple(%table)")
    assert finding == "out returns parameter 2 (table) itself, not a copy"


def test_a_donated_parameter_is_found():
    header = "is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, may-alias) }"
    (finding,) = uses("SNAPSHOT", header=header)
    assert finding == "parameter 2 (table) is donated: outputs are written over it"


def test_on_a_concurrent_executor_an_independent_reader_is_found():
    reader = "%early = s32[4]{0} fusion(%table, %ids), kind=kLoop, calls=%fused\nSNAPSHOT"
    (finding,) = uses(reader, computations=FUSED, concurrent=True)
    assert finding.endswith("reads parameter 2 (table) and nothing makes the marker jaxserve_snapshot wait for it")


@pytest.mark.parametrize("link", ["operand", "control"])
def test_on_a_concurrent_executor_a_reader_that_feeds_the_marker_is_accepted(link: str):
    marker = (
        SNAPSHOT.replace("%ids,", "%fed,")
        if link == "operand"
        else SNAPSHOT.replace("backend_config", "control-predecessors={%fed}, backend_config")
    )
    reader = "%early = s32[4]{0} fusion(%table, %ids), kind=kLoop, calls=%fused\n%fed = s32[4]{0} negate(%early)"
    assert uses(f"{reader}\n{marker}", computations=FUSED, concurrent=True) == []


@pytest.mark.parametrize("name", [2, "table", "shared['table']"])
def test_parameters_go_by_number_name_or_path(name):
    assert len(uses("SNAPSHOT\n%x = s32[16,32]{1,0} negate(%table)", parameters=[name])) == 1


def test_an_unknown_parameter_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no entry parameter 'tables'; the program has 0: ticket, 1: ids"):
        uses("SNAPSHOT", parameters=["tables"])


def test_a_missing_marker_is_refused_with_the_targets_found():
    other = SNAPSHOT.replace("jaxserve_snapshot", "jaxserve_snapshots")
    with pytest.raises(ValueError, match=r"no custom call to 'jaxserve_snapshot'.*\['jaxserve_snapshots'\]"):
        uses(other)


def test_unscheduled_hlo_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        uses("SNAPSHOT", header="replica_count=1")
    with pytest.raises(ValueError, match="no ENTRY"):
        uses_after("module @jit_f {}", [0], "jaxserve_snapshot")


def compile_for_cpu(reads_late: bool) -> str:
    from jaxserve.barrier.native import native_module
    from jaxserve.barrier.ops import snapshot

    native_module("cpu")

    def step(ticket, ids, table, w):
        ids, (rows,) = snapshot(ticket, ids, [table], num_rows=4, widths=[8])
        x = jnp.tanh(w[rows].sum(1) @ w.T) @ w
        return x + table.sum() if reads_late else x, ids

    shapes = [((16,), jnp.uint32), ((4,), jnp.int32), ((16, 32), jnp.int32), ((64, 128), jnp.float32)]
    return jax.jit(step).lower(*[jax.ShapeDtypeStruct(*shape) for shape in shapes]).compile().as_text()


def test_compiled_for_the_cpu_the_snapshot_op_proves_itself():
    assert uses_after(compile_for_cpu(False), ["table", "ids"], "jaxserve_snapshot", concurrent=True) == []


def test_compiled_for_the_cpu_a_late_read_is_found():
    (finding,) = uses_after(compile_for_cpu(True), ["table", "ids"], "jaxserve_snapshot", concurrent=True)
    assert "reads parameter 2 (table" in finding
