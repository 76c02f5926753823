"""Emission: C expressions with C's precedence, names, macros and statements in step, no template left over."""

import math
import re
from dataclasses import fields, replace

import jinja2
import pytest
from c_evaluator import c_value
from expressions import NAMES, conditions, integers, values
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import build
from flashgen.emit.cexpr import c_text
from flashgen.emit.cuda import STRUCTURE, cuda, indent
from flashgen.emit.env import environment, header, templates
from flashgen.emit.view import Names, camel, statement
from flashgen.interp import machine as interpreter
from flashgen.ir.dtype import BF16, F32
from flashgen.ir.expr import (
    INF,
    NEG_INF,
    Binary,
    Cast,
    Const,
    I,
    J,
    Unary,
    Var,
    evaluate,
    exp2,
    load,
    log,
    maximum,
    minimum,
    select,
    substitute,
)
from flashgen.ir.nodes import For, If, Let, Note, Space, Tile, Window
from flashgen.ir.visit import statements
from flashgen.machine.base import Barrier, FillFragment, MachineStmt, MapFragment, PackFragment
from flashgen.machine.sm80 import CopyTileAsync, MmaSync
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

SPECS = [Spec(64, 64, causal=True), Spec(40, 72, deterministic=True, aligned=False), Spec(128, 128)]
ARCHES = ["sm_90", "sm_80", "sm_120"]
ALL = {
    f"{spec}-{name}": (spec, stages)
    for spec, arch in zip(SPECS, ARCHES, strict=True)
    for name, stages in build.everything(spec, parse_arch(arch)).items()
}
SPEC, FORWARD = ALL["d64_bf16_causal-attention_forward"]
BACKWARD = ALL["d64_bf16_causal-attention_backward"][1]
each = pytest.mark.parametrize(("spec", "stages"), ALL.values(), ids=ALL)
quick = settings(max_examples=80, deadline=None)
A, B, C = (Var(name) for name in NAMES)


def same(name):
    return name


# Expressions


@quick
@given(st.one_of(integers(), conditions()), values)
def test_c_has_the_value_of_the_expression(expr, values):
    assert c_value(c_text(expr, same), values) == evaluate(expr, values)


@quick
@given(integers(), integers(), values, st.sampled_from(["+", "-", "*"]))
def test_a_name_spelled_as_a_sum_keeps_its_value(expr, inner, values, op):
    """What a name stands for may be any expression; the text around it must not pull it apart."""
    spelled = {"a": f"({c_text(Binary(op, inner, B), same)})"}
    text = c_text(expr, lambda name: spelled.get(name, name))
    assert c_value(text, values) == evaluate(substitute(expr, {"a": Binary(op, inner, B)}), values)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (A - (B - 1), "a - (b - 1)"),
        (A - B - 1, "a - b - 1"),
        ((A + B) * C, "(a + b) * c"),
        (A // B * C, "a / b * c"),
        (A * (B // C), "a * (b / c)"),
        (A % (B + 1), "a % (b + 1)"),
        ((A < B) & ((B < C) | A.equals(C)), "a < b && (b < c || a == c)"),
        (select(A < B, A, select(B < C, 1, 2)), "a < b ? a : (b < c ? 1 : 2)"),
        (select(A < B, A, B) + 1, "(a < b ? a : b) + 1"),
        (select(select(A < B, A < C, B < C), A, B), "(a < b ? a < c : b < c) ? a : b"),
        (minimum(A + 1, B) - maximum(A, 0), "min(a + 1, b) - max(a, 0)"),
        (Binary("-", A, Const(-3)), "a - -3"),
        (-A - -B, "-(a) - -(b)"),
        (exp2(A * 0.5), "exp2_approx(a * 0.5f)"),
        (log(A) * 2.0, "logf(a) * 2.0f"),
        (select(A.equals(NEG_INF), INF, A), "a == -INF ? INF : a"),
        (Const(True), "true"),
        (Const(1e-30), "1e-30f"),
        (Const(math.log2(math.e)), "1.4426950408889634f"),
    ],
)
def test_spelling(expr, expected):
    assert c_text(expr, same) == expected


@pytest.mark.parametrize(
    ("parent", "expected"),
    [(5, "a + b"), (6, "(a + b)")],
)
def test_a_parent_that_binds_tighter_gets_parentheses(parent, expected):
    assert c_text(A + B, same, parent=parent) == expected


def test_what_c_has_no_spelling_for_is_refused():
    with pytest.raises(ValueError, match="s is loaded in a uniform expression"):
        c_text(load("s", I) + 1, same)
    with pytest.raises(ValueError, match="rounded inside of an expression"):
        c_text(Cast(BF16, A) + 1, same)
    with pytest.raises(KeyError):
        c_text(Unary("sinh", A), same)


# Names


NAMES_OF = Names(FORWARD.machine, FORWARD.plan)


def test_dimensions_arguments_and_locals():
    assert [NAMES_OF.variable(name) for name in ("block_q", "seqlen_k", "scale_log2", "kv_block")] == [
        *("BLOCK_Q", "args.seqlen_k", "args.scale_log2", "kv_block")
    ]
    assert (
        NAMES_OF.uniform(Var("kv_block") * Var("block_kv") < Var("seqlen_k")) == "kv_block * BLOCK_KV < args.seqlen_k"
    )
    assert camel("q_tile") == "QTile" and camel("s") == "S"


def test_places():
    window = Window("k", (Var("batch"), Var("head_kv"), Var("kv_block") * Var("block_kv")))
    assert NAMES_OF.place("s") == "s" and NAMES_OF.place(Tile("q_tile")) == "q_tile"
    assert NAMES_OF.place(window) == "args.k.at(batch, head_kv, kv_block * BLOCK_KV)"
    assert NAMES_OF.rows_left(window) == "args.seqlen_k - kv_block * BLOCK_KV"
    later = Window("k", (Var("batch"), Var("head_kv"), Var("a") - 1))
    assert NAMES_OF.rows_left(later) == "args.seqlen_k - (a - 1)"
    first = Window("k", (Var("batch"), Var("head_kv"), Const(0)))
    assert NAMES_OF.rows_left(first) == "args.seqlen_k"
    assert NAMES_OF.place(Tile("k_tile", Var("a") % 2)) == "k_tile + a % 2 * KTile::BYTES"
    assert NAMES_OF.place(Tile("k_tile", Var("a") + 1)) == "k_tile + (a + 1) * KTile::BYTES"


def test_elements_of_registers_and_of_shared_vectors():
    buffer = FORWARD.machine.buffer("s")
    kind = NAMES_OF.fragments["s"]
    expr = select(Var("kv_start") + J <= I, load("s", I, J), NEG_INF)
    assert NAMES_OF.element(expr, buffer) == f"kv_start + {kind}::col(j) <= {kind}::row(i) ? s[i][j] : -INF"
    assert NAMES_OF.element(J * 2, buffer, "2 * j + 1") == f"{kind}::col(2 * j + 1) * 2"
    rows = NAMES_OF.element(load("s", I, J) - load("row_max", I), buffer)
    assert rows == "s[i][j] - row_max[i]"
    other = Names(BACKWARD.machine, BACKWARD.plan)
    kind = other.fragments["s"]
    assert other.element(load("lse_tile", J), BACKWARD.machine.buffer("s")) == f"lse_tile[{kind}::col(j)]"
    staged = load("lse_tile", Var("step") % 2, J)
    assert other.element(staged, BACKWARD.machine.buffer("s")) == f"lse_tile[step % 2 * BLOCK_Q + {kind}::col(j)]"


def test_tiles_of_one_shape_and_division_share_a_layout():
    assert NAMES_OF.fragments["s"] == NAMES_OF.fragments["p"] == NAMES_OF.fragments["p_operand"]
    assert NAMES_OF.fragments["o_acc"] != NAMES_OF.fragments["s"]
    other = FORWARD.machine.with_buffer(replace(FORWARD.machine.buffer("p"), warps=(1, 4)))
    assert Names(other, FORWARD.plan).fragments["p"] != Names(other, FORWARD.plan).fragments["s"]
    assert {NAMES_OF.fragments[name] for name in ("row_max", "lse_row")} <= set(NAMES_OF.fragments.values())


# Statements and macros


def subclasses(kind):
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in subclasses(child))]


STATEMENTS = [kind for kind in subclasses(MachineStmt) if kind.NAME]
FILES = {path.stem: path for path in sorted((templates() / "stmt").glob("*.jinja"))}


def macros(family):
    """Names of the macros of a file, read from its text."""
    return re.findall(r"^//% macro (\w+)\(", FILES[family].read_text(), re.MULTILINE)


def test_every_statement_has_a_macro_and_every_macro_a_statement():
    named = {kind.FAMILY: [] for kind in STATEMENTS}
    for kind in STATEMENTS:
        named[kind.FAMILY].append(kind.NAME)
    named["common"] += [*STRUCTURE.values(), "remark"]
    assert named.keys() == FILES.keys()
    for family, names in named.items():
        assert sorted(macros(family)) == sorted(set(names)) == sorted(names), family


@pytest.mark.parametrize("kind", STATEMENTS, ids=lambda kind: kind.NAME)
def test_each_statement_is_declared_in_full(kind):
    """Its name, the fields it writes and reads, its formula, its precondition in words, its meaning on the CPU."""
    assert re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() == kind.NAME
    names = {item.name for item in fields(kind)}
    assert set(kind.WRITES) | set(kind.READS) <= names
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("), "a docstring of its own"
    families = ("sm80", "sm90") if kind.FAMILY == "common" else (kind.FAMILY,)
    assert all(kind in interpreter.FAMILIES[family] for family in families)
    touches_shared = {item.type for item in fields(kind)} & {"Tile", "Place", "Expr"} and kind is not FillFragment
    words = kind.NEEDS.split()
    assert words == ["nothing"] or len(words) >= 4
    assert not touches_shared or len(words) >= 4, f"{kind.NAME} touches shared memory and needs nothing"


def test_the_interpreter_knows_no_other_statements():
    known = {kind for family in interpreter.FAMILIES.values() for kind in family}
    assert known - {For, If, Let, Note} == set(STATEMENTS)


@each
def test_every_statement_of_a_kernel_is_printed(spec, stages):
    """Each macro is called as often as its statement stands in the IR: calls are counted in the text."""
    text = stages.source.text
    calls = {
        "copy_tile_async": "copy_tile_async<",
        "copy_tile_elements": "copy_tile_elements<",
        "copy_vector_async": "copy_vector_async<",
        "commit_group": "commit_group();",
        "wait_group": "wait_group<",
        "barrier": "__syncthreads();",
        "store_tile": "store_tile<",
        "store_fragment": "store_fragment<",
        "reduce_rows": "reduce_rows<",
        "combine_lanes": "combine_lanes<",
        "pack_fragment": "= pack<",
        "mma_sync": "multiply_",
        "store_rows": "store_rows<",
        "load_rows": "load_rows<",
        "add_fragment": "add_fragment<",
        "load_fragment": "load_fragment<",
        "zero_window": "zero_window<",
    }
    names = [stmt.NAME for stmt in statements(stages.machine.body) if isinstance(stmt, MachineStmt)]
    for name, call in calls.items():
        assert text.count(call) == names.count(name), name
    lets = [stmt.name for stmt in statements(stages.machine.body) if isinstance(stmt, Let)]
    assert all(f"const int {name} = " in text for name in lets)


@each
def test_notes_become_comments(spec, stages):
    text = stages.source.text
    for stmt in statements(stages.machine.body):
        assert not stmt.note or f"// {stmt.note}\n" in text


def test_a_statement_of_its_own_in_a_kernel_appears_in_the_cuda():
    """The IR is what is printed: one statement more, one line more, and the same template."""
    extra = FORWARD.machine.having(body=(*FORWARD.machine.body, Barrier(note="one more")))
    texts = (FORWARD.source.text, cuda(extra, FORWARD.plan, SPEC).text)
    before, after = ([line for line in text.splitlines() if line] for text in texts)
    assert after == [*before[:-1], "  // one more", "  __syncthreads();", before[-1]]


def view(stmt):
    return statement(stmt, NAMES_OF, "")


def test_view_models_are_spelled():
    product = next(s for s in statements(FORWARD.machine.body) if isinstance(s, MmaSync) and s.acc == "s")
    seen = view(product)
    assert seen["product"] == "multiply_shared" and seen["accumulate"] is False
    assert seen["types"] == f"UNROLLED_DEPTH, {NAMES_OF.fragments['s']}, QTile, false, KTile, true"
    copy = next(
        s for s in statements(FORWARD.machine.body) if isinstance(s, CopyTileAsync) and s.dst.buffer == "q_tile"
    )
    assert view(copy) | {"row_stride": "args.q.row_stride", "true_cols": "TRUE_HEAD_DIM"} == view(copy)
    assert view(copy)["dst_type"] == "QTile" and view(copy)["rows"] == "args.seqlen_q - q_start"
    packed = view(PackFragment("p_operand", load("p", I, J)))
    assert (packed["even"], packed["odd"]) == ("p[i][2 * j]", "p[i][2 * j + 1]")
    assert view(MapFragment("row_max", load("row_sum", I)))["dst_is_tile"] is False


# The file


LEFT_OVER = r"\$\{|//%|//#|<%|%>|<#|#>|\{\{|Undefined|\bNone\b|\bTrue\b|\bFalse\b|<built-in|object at 0x|\bnan"


@each
def test_nothing_of_a_template_is_left_over(spec, stages):
    text = stages.source.text
    assert not re.search(LEFT_OVER, text), re.search(LEFT_OVER, text)
    for opened, closed in ("{}", "()", "[]"):
        assert text.count(opened) == text.count(closed) > 0
    assert text.endswith("}\n") and "\n\n\n" not in text
    assert all(line == line.rstrip() and "\t" not in line for line in text.splitlines())


@pytest.mark.parametrize("planted", ["${name}", "//% endif", "x = None;", "<# why #>"])
def test_left_overs_would_be_seen(planted):
    assert re.search(LEFT_OVER, planted)


@each
def test_the_file_says_what_it_is_and_each_number_once(spec, stages):
    text, plan = stages.source.text, stages.plan
    lines = text.splitlines()
    own = spec.forward() if stages.tile.name == "attention_forward" else spec
    assert lines[0].startswith(f"// {stages.tile.name}: {own}.") and plan.text().splitlines()[0] in text
    constants = re.findall(r"^constexpr int (\w+) = (\d+);", text, re.MULTILINE)
    assert len(dict(constants)) == len(constants)
    found = {name: int(value) for name, value in constants}
    assert found["THREADS"] == plan.threads and found["MIN_BLOCKS"] == plan.min_blocks
    for name, size in plan.dims:
        assert found.get(name.upper(), size) == size
    for place in plan.shared:
        assert found[f"{place.buffer.upper()}_OFFSET"] == place.offset
    assert f'extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) {stages.tile.name}(' in text
    assert stages.source.name == stages.tile.name


@each
def test_includes_are_the_headers_that_come_along(spec, stages):
    names = re.findall(r'#include "([^"]+)"', stages.source.text)
    assert [name for name, _ in stages.source.headers] == names
    assert all(text == header(name.split("/")[1]) for name, text in stages.source.headers)


@each
def test_arguments_are_the_globals_in_the_order_of_the_kernel(spec, stages):
    struct = stages.source.text.split("struct Args {")[1].split("};")[0]
    members = re.findall(r"^\s*(?:Tensor|Vector)<\w+> (\w+);", struct, re.MULTILINE)
    assert members == [b.name for b in stages.machine.buffers if b.space is Space.GLOBAL]
    scalars = re.findall(r"^\s*(?:int|float) (\w+);", struct, re.MULTILINE)
    assert scalars == [scalar.name for scalar in stages.machine.scalars]


@each
def test_every_local_is_declared_before_it_is_used(spec, stages):
    """Loop variables, grid indices and Lets: the first line that has the name declares it."""
    text = stages.source.text.split("__global__")[1]
    names = [axis.name for axis in stages.machine.axes]
    names += [s.name for s in statements(stages.machine.body) if isinstance(s, Let)]
    names += [s.axis for s in statements(stages.machine.body) if isinstance(s, For)]
    names += [b.name for b in stages.machine.buffers if b.space is Space.SHARED]
    for name in names:
        first = next(line for line in text.splitlines() if re.search(rf"(?<![\w.]){name}\b", line.split("//")[0]))
        assert re.search(rf"(const int|for \(int|const SharedAddress|float\* const) {name}\b", first), first


def test_longest_tiles_come_first_where_the_kernel_says_so():
    assert re.search(r"const int q_block = q_block_count - 1 - blockIdx\.x;", FORWARD.source.text)
    full = ALL["d128_bf16-attention_forward"][1].source.text
    assert "const int q_block = blockIdx.x;" in full


def test_the_text_does_not_depend_on_what_was_emitted_before():
    spec, stages = ALL["d128_bf16-attention_backward"]
    assert cuda(stages.machine, stages.plan, spec) == stages.source


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a {\nb;\n}\n", "a {\n  b;\n}\n"),
        ("a {\nif (x) {\nb;\n} else {\nc;\n}\n}\n", "a {\n  if (x) {\n    b;\n  } else {\n    c;\n  }\n}\n"),
        ("\n\na;\n\n\n\nb;\n", "a;\n\nb;\n"),
        ("a {\nif (x) {\nb;\n\n}\n\n\n}\n\nc;\n", "a {\n  if (x) {\n    b;\n  }\n}\n\nc;\n"),
        ("x = {1, 2};\ny; // {\nz;\n", "x = {1, 2};\ny; // {\nz;\n"),
    ],
)
def test_indentation_follows_the_braces(raw, expected):
    assert indent(raw) == expected


# The environment


@pytest.mark.parametrize("source", ["${nothing}", "${s.missing}", "//% for x in nothing\n${x}\n//% endfor\n"])
def test_undefined_names_are_errors(source):
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string(source).render(s={})


@pytest.mark.parametrize("name", ["wait_group", "copy_tile_async", "mma_sync"])
def test_a_macro_without_its_fields_raises(name):
    macro = getattr(environment().get_template("stmt/sm80.jinja").module, name)
    with pytest.raises(jinja2.UndefinedError):
        macro({"note": "", "body": ""})


def test_delimiters_leave_cuda_alone():
    cuda_text = 'int a[2] = {{1}, {2}};  // "100% {x}" #1\nif (a % b) { c = {0}; }\n'
    assert environment().from_string(cuda_text).render() == cuda_text
    assert environment().from_string("${x} = {${y}};\n").render(x="a", y=1) == "a = {1};\n"


def test_floats_of_the_ir_are_floats_of_c():
    """A literal without f would make the whole expression double."""
    for _, stages in ALL.values():
        code = re.sub(r"//.*", "", stages.source.text)
        assert not re.search(r"(?<![\w.])\d+\.\d+(e[-+]?\d+)?(?![\df])", code)
        assert F32.cuda == "float" and "double" not in code
