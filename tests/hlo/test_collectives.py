"""Which collectives a program runs: the parser on programs written by hand, and what jit and shard_map compile to."""

import functools
import importlib
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import hlo, native, ops
from te_jax.parallel import all_gather_matmul

HERE = os.path.relpath(__file__)


def line_of(fn, offset=0):
    """Where a function of this file starts, as `Collective.source` says it."""
    return f"{HERE}:{fn.__code__.co_firstlineno + offset}"


def kinds(found):
    return [c.kind for c in found]


# The parser


def program(body, *, computations="", header="num_partitions=8"):
    """The text of a program whose entry computation has these lines, an f32[8,16] called x, and a sum called add."""
    return f"""HloModule jit_f, is_scheduled=true, entry_computation_layout={{(f32[8,16]{{1,0}})->f32[]}}, {header}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{computations}
ENTRY %main.7_spmd (x: f32[8,16]) -> f32[] {{
  %x = f32[8,16]{{1,0:T(8,128)}} parameter(0), sharding={{devices=[4,2]<=[8]}}, metadata={{op_name="x"}}
{body}
}}
"""


def loop(name, trip_count, lines, *, condition="  %c = pred[] constant(true)"):
    """A body and a condition, and the while that runs them."""
    config = f', backend_config={{"known_trip_count":{{"n":"{trip_count}"}}}}' if trip_count else ""
    computations = (
        f"%body.{name} (x: f32[8,16]) -> f32[8,16] {{\n  %x = f32[8,16]{{1,0}} parameter(0)\n{lines}\n}}\n"
        f"%cond.{name} (x: f32[8,16]) -> pred[] {{\n  %x = f32[8,16]{{1,0}} parameter(0)\n{condition}\n}}\n"
    )
    return (
        computations,
        f"  %while.{name} = f32[8,16]{{1,0}} while(%x), condition=%cond.{name}, body=%body.{name}{config}",
    )


ALL_REDUCE = "  %ar = f32[8,16]{1,0} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add"


@pytest.mark.parametrize(
    ("line", "kind", "shape", "size"),
    [
        ("f32[32,16]{1,0} all-gather(%x), dimensions={0}", "all-gather", "f32[8,16]", 512),
        ("f32[2,16]{1,0} reduce-scatter(%x), dimensions={0}, to_apply=%add", "reduce-scatter", "f32[8,16]", 512),
        ("(f32[8,16]{1,0}, f32[8,16]{1,0}) all-reduce(%x, %x), to_apply=%add", "all-reduce", "2 × f32[8,16]", 1024),
        ("f32[8,16]{1,0} all-to-all(f32[8,16]{1,0} %x), dimensions={0}", "all-to-all", "f32[8,16]", 512),
        ("f32[8,16]{1,0} collective-permute(x), source_target_pairs={{0,1}}", "collective-permute", "f32[8,16]", 512),
        ("f32[8,16]{1,0} collective-broadcast(%x), replica_groups={{0,1}}", "collective-broadcast", "f32[8,16]", 512),
        ("f32[9,9]{1,0} ragged-all-to-all(%x, %o, %o, %o), replica_groups={}", "ragged-all-to-all", "f32[8,16]", 512),
        ("pred[4]{0} all-reduce(pred[4]{0} %p), to_apply=%add", "all-reduce", "pred[4]", 4),
        ("s4[6]{0:E(4)} all-gather(s4[3]{0:E(4)} %p), dimensions={0}", "all-gather", "s4[3]", 2),
        ("bf16[] all-reduce(bf16[] %p), to_apply=%add", "all-reduce", "bf16[]", 2),
        ("f8e4m3fn[<=4] all-reduce(f8e4m3fn[<=4] %p), to_apply=%add", "all-reduce", "f8e4m3fn[4]", 4),
        ("f32[16]{0} all-reduce(%made#1), to_apply=%add", "all-reduce", "s32[16]", 64),
        ("f32[9] all-reduce(/*index=0*/%x, /*index=1*/%o), to_apply=%add", "all-reduce", "f32[8,16], s64[4]", 544),
    ],
)
def test_kinds_and_payloads(line, kind, shape, size):
    text = program(
        "  %o = s64[4]{0} constant({0, 1, 2, 3})\n"
        "  %made = (f32[4]{0}, /*index=1*/s32[16]{0}, token[]) opt-barrier(%x)\n"
        f"  ROOT %r = {line}"
    )
    (found,) = hlo.parse(text)
    assert (found.kind, found.shape, found.bytes) == (kind, shape, size)
    assert found.dtype == re.sub(r"\d+ × |\[[^]]*\]", "", shape)
    assert found.times == 1
    assert found.axis is None
    assert found.source is None


@pytest.mark.parametrize(
    ("line", "results"),
    [
        ("f32[8,4]{1,0:T(8,128)} all-reduce(%x), channel_id=1, to_apply=%add", [("f32", (8, 4))]),
        ("(f32[4]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%x, %x), to_apply=%add", [("f32", (4,)), ("bf16", (2, 3))]),
        ("(f32[5]{0}, f32[]) all-reduce-start(%x, %x), to_apply=%add", [("f32", (5,)), ("f32", ())]),
        ("((f32[5]{0}), f32[5]{0}) all-reduce-start(%x), to_apply=%add", [("f32", (5,))]),
        (
            "((f32[5]{0}, s8[2]{0}), (f32[5]{0}, s8[2]{0})) all-reduce-start(%x, %x), to_apply=%add",
            [("f32", (5,)), ("s8", (2,))],
        ),
        ("(bf16[4]{0}, bf16[16]{0}) all-gather-start(x), dimensions={0}", [("bf16", (16,))]),
        (
            "((f32[4]{0}, pred[2]{0}), (f32[8]{0}, pred[4]{0})) all-gather-start(%x, %x), dimensions={0}",
            [("f32", (8,)), ("pred", (4,))],
        ),
        (
            "(f32[3,2]{1,0}, f32[3,2]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
            [("f32", (3, 2))],
        ),
        ("((f32[64]{0}), f32[8]{0}) reduce-scatter-start(%x), dimensions={0}, to_apply=%add", [("f32", (8,))]),
        ("(s4[7]{0}, s4[7]{0}) all-to-all(%x, %x)", [("s4", (7,)), ("s4", (7,))]),
        ("f8e4m3fn[16]{0} collective-broadcast(%x)", [("f8e4m3fn", (16,))]),
    ],
)
def test_results(line, results):
    (found,) = hlo.parse(program(f"  ROOT %r = {line}"))
    assert found.results == tuple(hlo.Buffer(dtype, shape) for dtype, shape in results)


def test_what_is_no_collective_is_not_listed():
    text = program(
        '  %c = f32[8,16]{1,0} custom-call(%x), custom_call_target="te_gemm", backend_config={a = " all-reduce(%x)"}\n'
        "  %all-reduce.1 = f32[8,16]{1,0} add(%x, %x)\n"
        '  %f = f32[8,16]{1,0} fusion(%all-reduce.1), kind=kLoop, calls=%add, metadata={op_name="a/ all-gather(b)"}\n'
        "  %d = f32[8,16]{1,0} all-reduce-done(%f)\n"
        "  %s = (f32[8,16]{1,0}, u32[], token[]) send(%x, %t), channel_id=1"
    )
    assert hlo.parse(text) == []


ASYNC = {
    "all-gather": """
  %s = (f32[8,16]{1,0}, f32[32,16]{1,0}) all-gather-start(%x), replica_groups={}, dimensions={0}
  %d = f32[32,16]{1,0} all-gather-done(%s)""",
    "reduce-scatter": """
  %s = ((f32[8,16]{1,0}), f32[2,16]{1,0}) reduce-scatter-start(%x), replica_groups={}, to_apply=%add
  %u = ((f32[8,16]{1,0}), f32[2,16]{1,0}) reduce-scatter-update(%s)
  %d = f32[2,16]{1,0} reduce-scatter-done(%u)""",
    "all-reduce": """
  %s = f32[8,16]{1,0} all-reduce-start(%x), replica_groups={}, to_apply=%add
  %d = f32[8,16]{1,0} all-reduce-done(%s)""",
    "all-to-all": """
  %s = ((f32[8,16]{1,0}), f32[8,16]{1,0}) async-start(%x), calls=%wrapped
  %u = ((f32[8,16]{1,0}), f32[8,16]{1,0}) async-update(%s), calls=%wrapped
  %d = f32[8,16]{1,0} async-done(%u), calls=%wrapped""",
}
WRAPPED = """
%wrapped (p: f32[8,16]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %a = f32[8,16]{1,0} all-to-all(%p), replica_groups={}, dimensions={0}
}
"""


@pytest.mark.parametrize("kind", ASYNC)
def test_asynchronous_collectives_are_one_each(kind):
    lines = ASYNC[kind]
    (found,) = hlo.parse(program(lines, computations=WRAPPED if "wrapped" in lines else ""))
    assert (found.kind, found.bytes, found.times) == (kind, 512, 1)
    assert found.groups == (tuple(range(8)),)


@pytest.mark.parametrize(
    "groups", ["dense<[0, 2, 4, 6, 1, 3, 5, 7]> : tensor<8xi64>", "array<i64: 0, 2, 4, 6, 1, 3, 5, 7>"]
)
def test_calls_of_te_jax_that_communicate(groups):
    config = f'backend_config={{call = 0 : i64, group_size = 4 : i64, groups = {groups}, name = "a"}}'
    gather, scatter = hlo.parse(
        program(
            "  %w = f32[64,16]{1,0} parameter(1)\n"
            "  %g = (f32[32,64]{1,0}, u8[9]{0}) custom-call(%x, %w), "
            f'custom_call_target="te_all_gather_gemm_v2", api_version=API_VERSION_TYPED_FFI, {config}\n'
            "  %s = ((f32[8,16]{1,0}, f32[64,16]{1,0}), (bf16[2,64]{1,0}, u8[9]{0}), u32[]) custom-call-start(%x, %w), "
            f'custom_call_target="te_gemm_reduce_scatter", {config}'
        ),
        mesh=AbstractMesh((4, 2), ("a", "b")),
    )
    assert (gather.kind, gather.shape, gather.bytes) == ("all-gather-matmul", "f32[8,16]", 512)
    assert (scatter.kind, scatter.shape, scatter.bytes) == ("matmul-reduce-scatter", "bf16[4,2,64]", 1024)
    assert gather.groups == scatter.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert gather.axis == ("a",)
    assert not gather.inserted


def test_calls_of_te_jax_that_do_not_say_who_communicates():
    lines = [
        '  %g = f32[32,64]{1,0} custom-call(%x, %x), custom_call_target="te_all_gather_gemm", backend_config={a = 0}',
        '  %s = bf16[2,64]{1,0} custom-call(%x, %x), custom_call_target="te_gemm_reduce_scatter"',
    ]
    found = hlo.parse(program("\n".join(lines)), mesh=AbstractMesh((8,), ("a",)))
    assert [(c.shape, c.groups, c.axis) for c in found] == [("f32[8,16]", (), None), ("bf16[2,64]", (), None)]


def ids(*shape, order=None):
    return np.arange(np.prod(shape)).reshape(shape).transpose(order or range(len(shape)))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", [(0, 2), (1, 3)]),
        ("{}", [tuple(range(8))]),
        ("[2,4]<=[8]", ids(2, 4)),
        ("[4,2]<=[2,4]T(1,0)", ids(2, 4, order=(1, 0))),
        ("[4,2]<=[2,2,2]T(2,0,1)", ids(2, 2, 2, order=(2, 0, 1)).reshape(4, 2)),
        ("mesh['a'=4,'b'=2] {'a'}", ids(4, 2).T),
        ("mesh['a b'=2,'c'=2,'d,e'=2] {'a b','d,e'}", ids(2, 2, 2, order=(1, 0, 2)).reshape(2, 4)),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", ids(2, 2, 2, order=(0, 2, 1)).reshape(4, 2)),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ids(2, 2, 2, order=(1, 0, 2)).reshape(2, 4)),
        # jaxlib 0.10 and 0.11 print the groups of one and the same program like this:
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(0,2,1)) {'b':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=8] {}", [(i,) for i in range(8)]),
    ],
)
def test_replica_groups(text, groups):
    line = f"  %r = f32[8,16]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={text}, to_apply=%add"
    (found,) = hlo.parse(program(line))
    assert found.groups == tuple(tuple(int(i) for i in group) for group in groups)


def test_replica_groups_along_axes_of_random_meshes(rng):
    for _ in range(20):
        sizes = rng.integers(1, 4, size=3)
        along = rng.permutation(3)[: rng.integers(1, 4)]
        devices = rng.permutation(sizes.prod())
        expected = np.moveaxis(devices.reshape(sizes), along, range(3 - len(along), 3))
        named = ",".join(f"'{'abc'[i]}'={sizes[i]}" for i in range(3))
        axes = ",".join(f"'{'abc'[i]}'" for i in along)
        groups = f"mesh[{named}], device_ids=({','.join(map(str, devices))}) {{{axes}}}"
        line = f"  %r = f32[8,16]{{1,0}} all-gather(%x), replica_groups={groups}, dimensions={{0}}"
        (found,) = hlo.parse(program(line))
        assert found.groups == tuple(map(tuple, expected.reshape(-1, sizes[along].prod()).tolist()))


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("a",)),
        ("replica_groups=[4,2]<=[8]", ("b",)),
        ("replica_groups={}", ("a", "b")),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("a",)),
        ("replica_groups={{0},{1}}", ()),
        ("source_target_pairs={{0,2},{2,4},{1,1}}", ("a",)),
        ("source_target_pairs={{0,3}}", ("a", "b")),
        ("replica_groups={{7,8}}", None),
    ],
)
def test_axes_are_those_along_which_members_differ(groups, axis):
    kind = "collective-permute" if "pairs" in groups else "all-gather"
    text = program(f"  %r = f32[8,16]{{1,0}} {kind}(%x), {groups}")
    assert hlo.parse(text, mesh=AbstractMesh((4, 2), ("a", "b")))[0].axis == axis
    with pytest.raises(ValueError, match=r"mesh has shape .*'a': 2.*, but the program runs on 8 devices"):
        hlo.parse(text, mesh=AbstractMesh((2,), ("a",)))


@pytest.mark.skipif(not native.available(), reason="needs te_jax's extension")
def test_own_calls_on_devices_in_another_order(rng, require_devices):
    """They know devices by other numbers than XLA does, which counts them as they come in the mesh."""
    require_devices(4)
    mesh = Mesh(np.array(jax.devices())[[0, 2, 1, 3]].reshape(2, 2), ("d", "t"))
    groups = {}
    for transport in ("p2p", "xla"):
        layer = functools.partial(all_gather_matmul, axis_name="t", transport=transport)
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P("t"), P(None, "t")), out_specs=P(None, "t"))
        found = hlo.collectives(mapped, *(jnp.ones(shape) for shape in ((4, 4), (4, 8))), mesh=mesh)
        (groups[transport],) = [c.groups for c in found if "all-gather" in c.kind]
        assert all(c.axis == ("t",) for c in found)
    assert groups["p2p"] == groups["xla"] == ((0, 1), (2, 3))


TABLES = r"""
FileNames
1 "/somewhere/else.py"
2 "na\303\257ve \"{.py"

FunctionNames
1 "<module>"
2 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=11 end_line=11 column=2 end_column=3}
2 {file_name_id=2 function_name_id=2 line=22 end_line=22 column=2 end_column=3}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ('{op_name="jit(f)/psum" stack_frame_id=2}', 'naïve "{.py:22'),
        ('{op_name="jit(f)/psum" stack_frame_id=1}', "/somewhere/else.py:11"),
        ('{op_name="jit(f)/psum" stack_frame_id=9}', None),
        ('{op_name="jit(f)/psum"}', None),
        (r'{op_type="a" op_name="jit(f)/psum" source_file="a \"b\", {c.py" source_line=33}', 'a "b", {c.py:33'),
        (r'{op_name="jit(f)/psum" source_file="a\"}, b.py" source_line=33}', 'a"}, b.py:33'),
        ('{op_name="jit(f)/psum" source_file="CWD/d/e.py" source_line=44}', "d/e.py:44"),
        ('{op_name="jit(f)/psum" source_file="e.py"}', "e.py"),
    ],
)
def test_both_forms_of_metadata(metadata, source):
    metadata = metadata.replace("CWD", os.getcwd())
    line = f"  %r = f32[8,16]{{1,0}} all-reduce(%x), replica_groups={{}}, to_apply=%add, metadata={metadata}"
    text = program(line).replace("num_partitions=8\n", f"num_partitions=8\n{TABLES}", 1)
    (found,) = hlo.parse(text)
    assert found.source == source
    assert found.op_name == "jit(f)/psum"


@pytest.mark.parametrize("too_high", [0, 1])
def test_lines_of_te_jax_are_passed_over_where_the_caller_is_known(too_high):
    package = os.path.dirname(os.path.dirname(os.path.abspath(hlo.__file__)))
    parents = [0, 1, 2, 0]
    frames = "\n".join(
        f"{i} {{file_location_id={i} parent_frame_id={parent + too_high}}}" for i, parent in enumerate(parents, 1)
    )
    tables = f"""
FileNames
1 "/home/user/train.py"
2 "{package}/ops/dense.py"

FileLocations
1 {{file_name_id=1 line=11}}
2 {{file_name_id=2 line=22}}
3 {{file_name_id=2 line=33}}
4 {{file_name_id=2 line=44}}

StackFrames
{frames}

"""
    lines = [
        f'  %r{i} = f32[8,16]{{1,0}} all-reduce(%x), to_apply=%add, metadata={{op_name="psum" stack_frame_id={i}}}'
        for i in range(1, 5)
    ]
    text = program("\n".join(lines)).replace("num_partitions=8\n", f"num_partitions=8\n{tables}", 1)
    own = os.path.relpath(f"{package}/ops/dense.py")
    assert [c.source for c in hlo.parse(text)] == ["/home/user/train.py:11"] * 3 + [f"{own}:44"]


def test_without_a_source_it_is_that_of_the_first_reader():
    text = program(
        '  %g = f32[32,16]{1,0} all-gather(%x), replica_groups={}, dimensions={0}, metadata={op_name="x"}\n'
        '  %other = f32[8,16]{1,0} negate(%x), metadata={op_name="neg" source_file="other.py" source_line=1}\n'
        "  %b = f32[512]{0} bitcast(%g)\n"
        '  %f = f32[16]{0} fusion(%other, %b), calls=%add, metadata={op_name="s" source_file="reader.py" source_line=5}'
    )
    assert hlo.parse(text)[0].source == "reader.py:5"


def test_times_multiply_in_nested_loops_and_add_up_over_callers():
    inner_computations, inner_while = loop("inner", 5, ALL_REDUCE, condition=ALL_REDUCE)
    outer_computations, outer_while = loop("outer", 3, inner_while + "\n" + ALL_REDUCE)
    called = f"%both (x: f32[8,16]) -> f32[8,16] {{\n  %x = f32[8,16]{{1,0}} parameter(0)\n{ALL_REDUCE}\n}}\n"
    calls = [
        "  %c0 = f32[8,16]{1,0} call(%x), to_apply=%both",
        '  %c1 = f32[8,16]{1,0} custom-call(%x), custom_call_target="f", called_computations={%both}',
    ]
    text = program("\n".join([outer_while, *calls]), computations=inner_computations + outer_computations + called)
    # The inner body, its condition, which is true once more often than not, the outer body, and what is called twice.
    assert [c.times for c in hlo.parse(text)] == [15, 18, 3, 2]


@pytest.mark.parametrize(
    "branches", ["branch_computations={%branch, %add}", "true_computation=%branch, false_computation=%add"]
)
def test_unknown_times(branches):
    computations, unknown = loop("a", None, ALL_REDUCE)
    branch = f"%branch (x: f32[8,16]) -> f32[8,16] {{\n  %x = f32[8,16]{{1,0}} parameter(0)\n{ALL_REDUCE}\n}}\n"
    nowhere = branch.replace("%branch", "%nowhere")
    text = program(
        f"{unknown}\n"
        f"  %c = f32[8,16]{{1,0}} conditional(%x, %x, %x), {branches}\n"
        "  %d = f32[8,16]{1,0} call(%x), to_apply=%branch",
        computations=computations + branch + nowhere,
    )
    found = hlo.parse(text)
    assert [c.times for c in found] == [None, None, None]
    assert [line.split()[1] for line in hlo.table(found).splitlines()[2:]] == ["?", "?", "?"]


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize(
    ("op_name", "attributes", "inserted"),
    [
        ("jit(f)/shard_map/psum", "replica_groups={{0,1}}", False),
        ("jit(f)/shard_map/psum_invariant.1", "replica_groups={{0,1}}", False),
        ("psum", "replica_groups={{0,1}}", False),
        ("jit(f)/shard_map/pbroadcast_dynamic", "replica_groups={{0,1}}", False),
        ("jit(f)/custom_partitioning", "replica_groups={{0,1}}", False),
        ("jit(f)/a/psum;jit(f)/b/pmax", "replica_groups={{0,1}}", False),
        ("jit(f)/a/psum;jit(f)/b/dot_general", "replica_groups={{0,1}}", True),
        ("jit(f)/a/dot_general;jit(f)/b/psum", "replica_groups={{0,1}}", True),
        ("jit(f)/shard_map/(a/psum:b/(c)/pmax)", "replica_groups={{0,1}}", False),
        ("jit(f)/((psum:a/psum):transpose(jvp(a))/psum_invariant)", "replica_groups={{0,1}}", False),
        ("jit(f)/(a/psum:reduce_sum)", "replica_groups={{0,1}}", True),
        ("jit(f)/(reduce_sum:a/psum)", "replica_groups={{0,1}}", True),
        ("jit(f)/psum/dot_general", "replica_groups={{0,1}}", True),
        ("jit(f)/jvp(psum)", "replica_groups={{0,1}}", True),
        ("jit(f)/my_psum", "replica_groups={{0,1}}", True),
        ("", "replica_groups={{0,1}}", True),
        ("jit(f)/psum", 'replica_groups={{0,1}}, frontend_attributes={is_spmd_generated="true"}', True),
        ("jit(f)/psum", 'replica_groups={{0,1}}, frontend_attributes={is_spmd_generated="false"}', False),
        ("jit(f)/psum", 'replica_groups={}, backend_config={"c":{"is_spmd_generated":true}}', True),
        ("jit(f)/psum", "replica_groups=[4,2]<=[8]", "by groups"),
        ("jit(f)/psum", "replica_groups=mesh['a'=8] {'a'}", "by groups"),
    ],
)
def test_inserted(op_name, attributes, inserted, marks, monkeypatch):
    monkeypatch.setattr(importlib.import_module("te_jax.hlo.collectives"), "_XLA_MARKS_INSERTED", marks)
    text = program(f'  %r = f32[8,16]{{1,0}} all-reduce(%x), {attributes}, metadata={{op_name="{op_name}"}}')
    assert hlo.parse(text)[0].inserted == ((not marks) if inserted == "by groups" else inserted)


REDUCED = "  %r = f32[8,16]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "must begin with HloModule") for text in ("", "module @jit_f {\n}", "ENTRY %main () -> f32[] {\n}")),
        (program('  %r = f32[8] all-reduce(%x, f32[8] %y, ")"'), "a bracket is never closed in 'f32"),
        *((program(REDUCED.format(groups)), "cannot be read") for groups in ("[a]", "[8]", "[2,4]<=[8]T")),
        # An operand of unknown size is not taken for nothing.
        (program(ALL_REDUCE.replace("%x", "%absent")), "operand '%absent' is not in its computation"),
    ],
)
def test_text_that_cannot_be_read_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        hlo.parse(text)


def test_table():
    text = program(
        "  %g = f32[32,16]{1,0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}, "
        'metadata={op_name="dot" source_file="a.py" source_line=1}\n'
        "  %p = f32[8,16]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}, "
        'metadata={op_name="ppermute" source_file="b.py" source_line=22}'
    )
    lines = hlo.table(hlo.parse(text, mesh=AbstractMesh((4, 2), ("a", "b")))).splitlines()
    assert lines[0].split() == ["kind", "times", "bytes", "payload", "axis", "groups", "inserted", "source"]
    assert lines[2].split() == ["all-gather", "1", "512", "f32[8,16]", "b", "4", "of", "2", "yes", "a.py:1"]
    assert lines[3].split() == ["collective-permute", "1", "512", "f32[8,16]", "b", "2", "pairs", "no", "b.py:22"]
    starts = [lines[0].index(heading) for heading in ("payload", "axis", "groups", "inserted", "source")]
    assert all(line[start - 1] == " " and line[start] != " " for line in lines for start in starts)
    ends = [lines[0].index(heading) + len(heading) for heading in ("times", "bytes")]
    assert all(line[end - 1] != " " and line[end] == " " for line in lines for end in ends)
    assert hlo.table([]) == "no collectives"
    uneven = hlo.table(hlo.parse(program(ALL_REDUCE.replace("{}", "{{0,1,2},{3,4},{5,6,7}}"))))
    assert " 3 of 2 or 3 " in uneven
    unknown = hlo.table(hlo.parse(program(loop("a", None, "")[1] + "\n" + ALL_REDUCE)))
    assert unknown.splitlines()[2].split() == ["all-reduce", "1", "512", "f32[8,16]", "?", "1", "of", "8", "yes", "?"]


# What JAX compiles


@pytest.fixture
def mesh(require_devices):
    require_devices(8)
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])


def like(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def test_a_product_over_a_split_dimension_is_all_reduced(mesh):
    def product(x, w):
        return x @ w

    x, w = like(mesh, (32, 16), None, "a"), like(mesh, (16, 8), "a", None, dtype=jnp.float32)
    (found,) = hlo.collectives(product, x, w)
    assert (found.kind, found.axis, found.shape, found.bytes) == ("all-reduce", ("a",), "f32[32,8]", 1024)
    assert found.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert (found.source, found.times, found.inserted) == (line_of(product, 1), 1, True)
    assert found.dtype == "f32"

    with pytest.raises(AssertionError) as raised:
        hlo.assert_no_resharding(product, x, w)
    message = str(raised.value)
    assert "the partitioner inserted 1 collective:\n" in message
    assert "all-reduce of f32[32,8], 1,024 bytes over 'a', for 'jit(product)/dot_general'" in message
    assert f"at {line_of(product, 1)}" in message
    assert "pass allowed=('all-reduce',)" in message
    hlo.assert_no_resharding(product, x, w, allowed=("all-reduce",))
    hlo.assert_no_resharding(product, x, w, allowed="all-reduce")
    with pytest.raises(AssertionError):
        hlo.assert_no_resharding(product, x, w, allowed=("all-gather",))


# What each device, which holds [8, 8], has afterwards.
BY_HAND = {
    "all-reduce": (lambda x: lax.psum(x, "a"), P(None, "b"), 64),
    "all-gather": (lambda x: lax.all_gather(x, "a"), P("a", None, "b"), 256),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "a", tiled=True), P("a", "b"), 16),
    "all-to-all": (lambda x: lax.all_to_all(x, "a", 0, 0, tiled=True), P("a", "b"), 64),
    "collective-permute": (lambda x: lax.pshuffle(x, "a", [1, 2, 3, 0]), P("a", "b"), 64),
}


TRANSFORMS = {"checkpoint": jax.checkpoint, "vmap": lambda f: jax.vmap(f, 2, 2), "named": jax.named_call}


@pytest.mark.parametrize(("kind", "transform"), in_turns([*BY_HAND], TRANSFORMS))
def test_collectives_in_shard_map_are_not_inserted(kind, transform, mesh):
    fn, out, elements = BY_HAND[kind]
    rank = 3 if transform is TRANSFORMS["vmap"] else 2
    x = like(mesh, (32, 16, 3)[:rank], "a", "b")
    mapped = jax.shard_map(transform(fn), mesh=mesh, in_specs=P("a", "b"), out_specs=out)
    (found,) = hlo.collectives(mapped, x)
    assert (found.kind, found.axis, found.inserted) == (kind, ("a",), False)
    assert found.bytes == 8 * 8 * 4 * (3 if rank == 3 else 1)
    assert sum(array.elements for array in found.results) == elements * (3 if rank == 3 else 1)
    assert found.source == line_of(fn)


def test_what_xla_merges_of_a_step_that_is_data_parallel_is_not_inserted(mesh):
    def loss(weights, x):
        return lax.pmean(jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2), "a")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    weights = {"up": jnp.ones((16, 8)), "down": jnp.ones((8, 4))}
    hlo.assert_no_resharding(jax.value_and_grad(mapped), weights, jnp.ones((8, 16)))


def test_what_is_resharded_at_the_edge_of_shard_map_is_inserted(mesh):
    mapped = jax.shard_map(lambda x: lax.psum(x, "a"), mesh=mesh, in_specs=P(None, "a"), out_specs=P())
    inserted, by_hand = hlo.collectives(mapped, like(mesh, (32, 16), "a"))
    assert (inserted.kind, inserted.inserted, inserted.bytes) == ("all-to-all", True, 8 * 16 * 4)
    assert (by_hand.kind, by_hand.inserted) == ("all-reduce", False)
    hlo.assert_no_resharding(mapped, like(mesh, (32, 16), None, "a"))


@pytest.mark.parametrize("constrain", [lax.with_sharding_constraint, jax.sharding.reshard])
def test_wishes_for_shardings_count_as_inserted(constrain, mesh):
    axis_type = AxisType.Explicit if constrain is jax.sharding.reshard else AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2, devices=jax.devices()[:8])
    replicated = NamedSharding(mesh, P())
    (found,) = hlo.collectives(lambda x: constrain(jnp.sin(x), replicated), like(mesh, (32, 16), "a"))
    assert (found.kind, found.axis, found.inserted) == ("all-gather", ("a",), True)


def test_partitioning_rules_write_their_own(mesh):
    @custom_partitioning
    def total(x):
        return x.sum(0)

    def partition(mesh, args, result):
        def lower(x):
            return lax.psum(x.sum(0), "a")

        return mesh, lower, NamedSharding(mesh, P(None)), (NamedSharding(mesh, P("a", None)),)

    total.def_partition(partition, sharding_rule="i j -> j")
    (found,) = hlo.collectives(total, like(mesh, (32, 16), "a", None))
    assert (found.kind, found.axis, found.inserted) == ("all-reduce", ("a",), False)
    assert [c.inserted for c in hlo.collectives(total, like(mesh, (32, 16), "a", "b"))] == [True, False]


def test_times_of_a_scan(mesh):
    def step(carry, _):
        return lax.psum(carry, "a") * 0.1 + carry, None

    def scans(x, count):
        return lax.scan(lambda c, _: lax.scan(step, c, None, length=count), x, None, length=3)[0]

    x = like(mesh, (32, 16), "a", "b")
    specs = P("a", "b")
    shard_map = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    (once,) = hlo.collectives(shard_map(lambda x: lax.scan(step, x, None, length=7)[0]), x)
    (nested,) = hlo.collectives(shard_map(functools.partial(scans, count=5)), x)
    assert (once.times, nested.times) == (7, 15)
    assert (once.kind, once.source, once.inserted) == ("all-reduce", line_of(step, 1), False)


def test_times_that_depend_on_data(mesh):
    def until(x):
        return lax.while_loop(lambda x: x.sum() < 10, lambda x: lax.psum(x, "a"), x)

    def maybe(x):
        return lax.cond(x.sum() < 10, lambda x: lax.psum(x, "a"), lambda x: x, x)

    x = like(mesh, (32, 16), "a", "b")
    for fn in (until, maybe):
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=False)
        (found,) = hlo.collectives(mapped, x)
        assert (found.times, found.inserted) == (None, False)


def test_every_form_of_function_gives_the_same(mesh, rng):
    def product(x, w, *, flip=False):
        return x @ (w.T if flip else w)

    x, w = like(mesh, (32, 16), None, "a"), like(mesh, (8, 16), None, "a")
    jitted = jax.jit(product, static_argnames="flip")
    lowered = jitted.lower(x, w, flip=True)
    expected = hlo.collectives(lambda x, w: product(x, w, flip=True), x, w)[0]
    arrays = [jax.device_put(rng.normal(size=like.shape).astype(np.float32), like.sharding) for like in (x, w)]
    for found in (
        hlo.collectives(jitted, x, w, flip=True),
        hlo.collectives(jitted, *arrays, flip=True),
        hlo.collectives(lowered),
        hlo.collectives(lowered.compile()),
        hlo.parse(lowered.compile().as_text() or "", mesh=mesh),
    ):
        assert [(c.kind, c.payload, c.groups, c.axis, c.times, c.inserted) for c in found] == [
            (expected.kind, expected.payload, expected.groups, expected.axis, expected.times, expected.inserted)
        ]
    for compiled in (lowered, lowered.compile()):
        with pytest.raises(TypeError, match="it takes no arguments here; pass it alone"):
            hlo.collectives(compiled, x, w)
        with pytest.raises(TypeError, match="it takes no arguments here; pass it alone"):
            hlo.collectives(compiled, flip=True)


def test_where_axes_get_their_names(mesh):
    def total(x):
        return lax.with_sharding_constraint(x * 2, P("a")).sum()

    renamed = jax.make_mesh((4, 2), ("p", "q"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    x = like(mesh, (32, 16), "a")
    assert {c.axis for c in hlo.collectives(lambda x: x.sum(), x)} == {("a",)}
    assert {c.axis for c in hlo.collectives(lambda x: x.sum(), x, mesh=renamed)} == {("p",)}
    with jax.set_mesh(mesh):
        assert {c.axis for c in hlo.collectives(total, jax.ShapeDtypeStruct((32, 16), jnp.float32))} == {("a",)}
    small = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="but the program runs on 8 devices"):
        hlo.collectives(lambda x: x.sum(), x, mesh=small)
    assert hlo.collectives(lambda x: x.sum(), jnp.ones(4)) == []
    line = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    found = hlo.collectives(lambda x, y: (x.sum(), y.sum()), x, like(line, (32,), "a"))
    assert {c.axis for c in found} == {None}


def test_the_source_is_where_te_jax_was_called(mesh):
    def loss(logits, labels):
        return ops.softmax_cross_entropy(logits, labels, implementation="reference").sum()

    found = hlo.collectives(loss, like(mesh, (32, 16), None, "a"), like(mesh, (32,), dtype=jnp.int32))
    assert found
    assert {c.source for c in found} == {line_of(loss, 1)}


def test_unknown_kinds_are_refused(mesh):
    with pytest.raises(ValueError, match="allowed has 'allreduce', which is no kind of collective; the kinds are a"):
        hlo.assert_no_resharding(jnp.sin, like(mesh, (32, 16), "a"), allowed=("all-gather", "allreduce"))
