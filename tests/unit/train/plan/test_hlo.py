"""Collectives read from the text of compiled programs, against counts made by hand."""

import pytest

from s3ac_jax.train.plan.hlo import collectives, nbytes

# Written by hand after what XLA writes: a loop of 28 turns within one that the device ends, a
# custom call whose attributes begin a line with a brace, and all ways to write groups.
MODULE = """HloModule jit_step, is_scheduled=true

%add.1 (lhs: f32[], rhs: f32[]) -> f32[] {
  %lhs = f32[] parameter(0)
  %rhs = f32[] parameter(1)
  ROOT %sum = f32[] add(%lhs, %rhs)
}

%all-reduce-scatter.2 (input: f32[64,32]) -> f32[16,32] {
  %input = f32[64,32]{1,0:T(8,128)} parameter(0)
  %all-reduce.9 = f32[64,32]{1,0:T(8,128)} all-reduce(%input), replica_groups=[2,4]<=[8], to_apply=%add.1
  %zero = s32[] constant(0)
  ROOT %slice = f32[16,32]{1,0} dynamic-slice(%all-reduce.9, %zero, %zero), dynamic_slice_sizes={16,32}
}

%inner_condition (state.1: (s32[], f32[16,32])) -> pred[] {
  %state.1 = (s32[], f32[16,32]{1,0}) parameter(0)
  %at.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %limit = s32[]{:T(128)} constant(28)
  ROOT %less.1 = pred[]{:T(512)} compare(%at.1, %limit), direction=LT
}

%inner_body (state.2: (s32[], f32[16,32])) -> (s32[], f32[16,32]) {
  %state.2 = (s32[], f32[16,32]{1,0}) parameter(0)
  %shard = f32[16,32]{1,0} get-tuple-element(%state.2), index=1
  %kernel = f32[16,32]{1,0} custom-call(%shard), custom_call_target="tpu_custom_call", metadata={
}}, metadata={op_name="a kernel"}
  %all-gather.3 = bf16[64,32]{1,0:T(8,128)(2,1)} all-gather(%kernel), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}, metadata={op_name="gathered"}
  %fused = f32[16,32]{1,0} fusion(%all-gather.3), kind=kCustom, calls=%all-reduce-scatter.2
  ROOT %next.2 = (s32[], f32[16,32]{1,0}) tuple(%shard, %fused)
}

%outer_condition (state.3: (s32[], s32[], f32[16,32])) -> pred[] {
  %state.3 = (s32[], s32[], f32[16,32]{1,0}) parameter(0)
  %at.3 = s32[] get-tuple-element(%state.3), index=0
  %end.3 = s32[] get-tuple-element(%state.3), index=1
  ROOT %less.3 = pred[] compare(%at.3, %end.3), direction=LT
}

%outer_body (state.4: (s32[], s32[], f32[16,32])) -> (s32[], s32[], f32[16,32]) {
  %state.4 = (s32[], s32[], f32[16,32]{1,0}) parameter(0)
  %begin = (s32[], f32[16,32]{1,0}) tuple(%state.4)
  %loop = (s32[], f32[16,32]{1,0}) while(%begin), condition=%inner_condition, body=%inner_body
  %all-reduce.5 = (f32[100]{0}, /*index=1*/f32[4,5]{1,0}) all-reduce(%x, %y), replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%add.1
  ROOT %next.4 = (s32[], s32[], f32[16,32]{1,0}) tuple(%loop)
}

ENTRY %main (tokens: s32[], rows: f32[16,32]) -> f32[16,32] {
  %rows = f32[16,32]{1,0} parameter(1)
  %tokens = s32[] parameter(0)
  %start = (s32[], s32[], f32[16,32]{1,0}) tuple(%tokens, %tokens, %rows)
  %outer = (s32[], s32[], f32[16,32]{1,0}) while(%start), condition=%outer_condition, body=%outer_body
  %began = (bf16[8,4]{1,0}, bf16[32,4]{1,0}) all-gather-start(%rows), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %ended = bf16[32,4]{1,0} all-gather-done(%began)
  %moved = (f32[10]{0}, f32[10]{0}, u32[], u32[]) collective-permute-start(%rows), source_target_pairs={{0,1},{1,0}}
  %alone = f32[10]{0} all-reduce(%rows), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add.1
  %shared = f32[3]{0} reduce-scatter(%rows), replica_groups={}, dimensions={0}, to_apply=%add.1
  ROOT %done = f32[16,32]{1,0} get-tuple-element(%outer), index=2
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def found():
    return collectives(MODULE, devices=8, turns=5)


def only(found, kind, times):
    (one,) = [one for one in found if one.kind == kind and one.times == times]
    return one


def test_a_gather_in_both_loops(found):
    one = only(found, "all-gather", 5 * 28)
    assert one.payload == 64 * 32 * 2
    assert one.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert one.sent == 5 * 28 * 4096 * 3 / 4
    assert one.operation == "gathered"


def test_a_scatter_in_the_guise_of_a_reduction(found):
    one = only(found, "reduce-scatter", 5 * 28)
    assert one.sent == 5 * 28 * 64 * 32 * 4 * 3 / 4


def test_a_reduction_of_a_tuple_in_the_outer_loop(found):
    one = only(found, "all-reduce", 5)
    assert one.payload == 480
    assert one.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert one.sent == 5 * 2 * 480 / 2


def test_what_is_begun_is_counted_once(found):
    one = only(found, "all-gather", 1)
    assert one.payload == 32 * 4 * 2
    assert one.groups == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_a_permutation_sends_what_it_moves(found):
    assert only(found, "collective-permute", 1).sent == pytest.approx(40, abs=4)


def test_no_groups_are_one_of_all(found):
    one = only(found, "reduce-scatter", 1)
    assert one.groups == (tuple(range(8)),)
    assert one.sent == 3 * 8 * 4 * 7 / 8


def test_a_group_of_one_sends_nothing(found):
    assert len(found) == 6


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[2,3]{1,0:T(8,128)}", 24), ("pred[]", 1), ("(bf16[4], s8[4], f8e4m3fn[2])", 14),
        ("s4[10]", 5), ("token[]", 0), ("c64[2]", 16),
    ],
)  # fmt: skip
def test_bytes_of_a_shape(shape, size):
    assert nbytes(shape) == size
